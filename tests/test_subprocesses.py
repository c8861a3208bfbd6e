"""A run that failed is not tried again, and says again what it said."""

import jax
import pytest

from tests import subprocesses
from tests.subprocesses import on_eight_devices

ENDS = {"crash": "sys.exit(words)", "hang": "print(words, flush=True); time.sleep(60)"}


@pytest.mark.parametrize("end", ENDS)
def test_a_run_that_failed_is_remembered(end, tmp_path, monkeypatch):
    counted = tmp_path / "runs"
    lines = ["import sys, time", f"open({str(counted)!r}, 'a').write('x')"]
    program = "; ".join([*lines, "words = 'its last words'", ENDS[end]])
    if end == "hang":
        monkeypatch.setattr(subprocesses, "SECONDS", 1)
    for _ in range(3):
        with pytest.raises(AssertionError, match="(?s)timeit .*its last words"):
            subprocesses.run("timeit", "-n1", "-r1", program)
    assert counted.read_text() == "x"
    assert subprocesses.run("timeit", "-n1", "-r1", "pass").startswith("1 loop")


@on_eight_devices
def test_there_are_eight_devices():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8


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
