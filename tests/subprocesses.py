"""Modules and tests in processes of their own; what failed is not run again.

A test under `on_eight_devices` is an ordinary one. Where JAX has one device, as it has
in pytest, those of a file run in one more pytest, and the test says how it went there.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile

import jax
import pytest

from tests.pages import ROOT

SECONDS = 300
FAILED: dict[tuple[object, ...], str] = {}


def cpu_devices(count: int) -> str:
    return f"--xla_force_host_platform_device_count={count}"


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


def on_eight_devices(test):
    """Runs a test where JAX has eight CPU devices."""

    @functools.wraps(test)
    def there(*args, **kwargs):
        if jax.device_count() >= 8:
            return test(*args, **kwargs)
        name, _ = os.environ["PYTEST_CURRENT_TEST"].rsplit(" ", 1)  # "... (call)"
        reports, why_not = _reports(name.partition("::")[0])
        if failure := reports.get(name, why_not):
            pytest.fail(failure, pytrace=False)

    there.on_eight_devices = True
    return there


@functools.cache
def _reports(file: str) -> tuple[dict[str, str], str]:
    """By test of a file, why it failed, if it did; and why others did not run."""
    with tempfile.NamedTemporaryFile("r") as lines:
        plugins = [f"-p{name}" for name in (__name__, "no:xdist", "no:cacheprovider")]
        variables = {"XLA_FLAGS": cpu_devices(8), "JAMP_REPORTS": lines.name}
        why_not = "It did not run."
        try:
            run("pytest", "-s", file, *plugins, **variables)
        except AssertionError as error:
            why_not = str(error)
        return dict(map(json.loads, lines)), why_not


# Hooks of the pytest with eight devices


def pytest_collection_modifyitems(items):
    items[:] = [item for item in items if hasattr(item.obj, "on_eight_devices")]


def pytest_runtest_logreport(report):
    if report.when == "call" or report.failed:
        line = report.nodeid, report.longreprtext if report.failed else ""
        with open(os.environ["JAMP_REPORTS"], "a") as lines:
            print(json.dumps(line), file=lines)
