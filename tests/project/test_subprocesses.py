"""A run that failed is not tried again, and says again what it said."""

import pytest

from tests import subprocesses


def test_a_run_that_took_too_long_is_remembered(tmp_path, monkeypatch):
    monkeypatch.setattr(subprocesses, "SECONDS", 1)
    counted = tmp_path / "runs"
    program = f"import time; open({str(counted)!r}, 'a').write('x'); "
    program += "print('its last words', flush=True); time.sleep(60)"
    for _ in range(3):
        with pytest.raises(AssertionError, match="(?s)timeit .*its last words"):
            subprocesses.run("timeit", "-n1", "-r1", program)
    assert counted.read_text() == "x"


THERE = """
import os
from tests.subprocesses import on_eight_devices

def test_passes(): ...
def test_fails(): assert "these" == "those"
def test_crashes(): print("its last words", flush=True), os._exit(3)
def test_comes_after(): ...

for name in ("passes", "fails", "crashes", "comes_after"):
    globals()[f"test_{name}"] = on_eight_devices(globals()[f"test_{name}"])
def test_is_for_one_device(): assert False
"""


def test_failures_and_a_crash_there_are_told_here(tmp_path):
    path = tmp_path / "test_there.py"
    path.write_text(THERE)
    reports, why_not = subprocesses._reports(str(path))
    passes, fails = (reports.pop(name) for name in sorted(reports)[::-1])
    assert passes == "" and "'these' == 'those'" in fails
    assert reports == {}
    assert "pytest ended with 3." in why_not and "its last words" in why_not
