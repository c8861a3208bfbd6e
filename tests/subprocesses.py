"""Runs a module of these tests in a process of its own."""

import json
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[1]


def on_devices(count: int, module: str):
    """What a module prints last, as JSON, on some virtual CPU devices."""
    flags = f"--xla_force_host_platform_device_count={count}"
    return json.loads(run(module, XLA_FLAGS=flags).splitlines()[-1])


def run(module: str, *args: str, **variables: str) -> str:
    """What a module prints, given arguments and environment variables."""
    done = subprocess.run(
        [sys.executable, "-m", module, *args],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
