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
