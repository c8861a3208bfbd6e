"""Test that a program lowers to the same text in each process."""

import pytest

from tests.support.subprocesses import run


@pytest.mark.slow  # four processes, each of which lowers twelve steps
def test_each_process_lowers_the_same_text_and_finds_the_compiled_programs(tmp_path):
    """Otherwise hosts compile different programs, and each run compiles again."""

    def printed(seed, *args):
        return run("tests.autocast.steps", *args, PYTHONHASHSEED=str(seed)).splitlines()

    digests = printed(1)
    assert len(digests) == 12
    assert printed(2) == digests

    def states(seed):
        lines = printed(seed, str(tmp_path))
        assert lines[::2] == digests
        return {line.split()[-1] for line in lines[1::2]}

    assert states(3) == {"compiled"}
    assert states(4) == {"found"}
