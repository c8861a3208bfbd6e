"""Helpers for the tests of the examples."""

import importlib.util
import struct
import sys

import pytest

from tests.support.pages import ROOT

EXAMPLES = ROOT / "examples"

IMPORTED = "equinox", "haiku", "matplotlib", "orbax", "rich", "sklearn", "tqdm"
MISSING = [name for name in IMPORTED if importlib.util.find_spec(name) is None]
needs_extra = pytest.mark.skipif(
    bool(MISSING), reason=f"needs {MISSING}, which the extra `examples` installs"
)


def png_size(path):
    """Returns the width and height from the header."""
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", header[16:])


def load(script, **small):
    """Returns a fresh copy of an example as a module, with smaller constants."""
    spec = importlib.util.spec_from_file_location(script, EXAMPLES / f"{script}.py")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(EXAMPLES))  # where examples import each other from
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(EXAMPLES))
    vars(module).update(small)
    return module
