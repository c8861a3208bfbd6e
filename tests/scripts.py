"""Runs the examples, as a user does in a shell or in this process."""

import contextlib
import functools
import importlib.util
import os
import pathlib
import struct
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"

# For `pytestmark`.
NEEDS_EXTRA = [
    pytest.mark.skipif(
        importlib.util.find_spec(name) is None,
        reason=f"needs {name}, which the extra `examples` installs",
    )
    for name in ("equinox", "haiku", "matplotlib", "orbax", "rich", "sklearn", "tqdm")
]

ENVIRONMENT = {"COLUMNS": "100", "PYTHONPATH": str(ROOT)}


def run_script(script, folder, *flags):
    """Runs an example in a folder, and returns its standard output and error."""
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / script), *flags],
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


def rows(stdout):
    """The rows of the table that was printed last, by level."""
    lines = [line.split("│")[1:-1] for line in stdout.splitlines() if "│" in line]
    return {cells[0].strip(): [cell.strip() for cell in cells[1:]] for cells in lines}


def png_size(path):
    """Width and height, from the header."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:])


def load(script):
    """A fresh copy of an example, as a module."""
    spec = importlib.util.spec_from_file_location(script, EXAMPLES / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXAMPLES))  # where an example looks for its neighbours
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    return module


# For Flax and optax as they are, outside of tests with the mark of this name.
standard_promotion = functools.partial(jax.numpy_dtype_promotion, "standard")


@contextlib.contextmanager
def optimized():
    """For runs of hundreds of steps: there what XLA can do for them pays."""
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", True)
