"""Run modules in separate processes."""

import os
import subprocess
import sys

from tests.support.pages import ROOT

SECONDS = 300


def run(module: str, *args: str, **variables: str) -> str:
    """Runs a module with arguments and environment variables; returns its output."""
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    printed = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, f"{module} ended with {done.returncode}.\n{printed}"
    return done.stdout


def cpu_devices(count: int) -> str:
    """Adds `count` devices to the flags in XLA_FLAGS."""
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} --xla_force_host_platform_device_count={count}".strip()
