"""Modules in processes of their own; what failed is not run again."""

import os
import subprocess
import sys

from tests.support.pages import ROOT

SECONDS = 300
FAILED: dict[tuple[object, ...], str] = {}


def cpu_devices(count: int) -> str:
    """XLA_FLAGS for this many devices, beside the flags that are set already."""
    flags = os.environ.get("XLA_FLAGS", "")
    return f"{flags} --xla_force_host_platform_device_count={count}".strip()


def run(module: str, *args: str, **variables: str) -> str:
    """What a module prints, given arguments and environment variables.

    The same run is not tried again if it crashed or took too long.
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
