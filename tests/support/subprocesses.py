"""Run modules in separate processes, and do not repeat failed runs."""

import os
import subprocess
import sys

from tests.support.pages import ROOT

SECONDS = 300
FAILED: dict[tuple[object, ...], str] = {}


def cpu_devices(count: int) -> str:
    """Adds `count` devices to the flags in XLA_FLAGS."""
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} --xla_force_host_platform_device_count={count}".strip()


def run(module: str, *args: str, **variables: str) -> str:
    """Runs a module with arguments and environment variables, and returns its output.

    A run that crashed or took too long is not repeated.
    """
    asked = (module, *args, *variables.items())
    if asked not in FAILED:
        command = [sys.executable, "-m", module, *args]
        where = {"cwd": ROOT, "env": {**os.environ, **variables}}
        try:
            done = subprocess.run(
                command, **where, capture_output=True, timeout=SECONDS
            )
            if done.returncode == 0:
                return done.stdout.decode()
            ended = f"ended with {done.returncode}"
        except subprocess.TimeoutExpired as error:
            done, ended = error, f"did not end in {SECONDS} s"
        said = [(stream or b"").decode() for stream in (done.stdout, done.stderr)]
        FAILED[asked] = "\n".join([f"{module} {ended}.", *(s[-2000:] for s in said)])
    raise AssertionError(FAILED[asked])
