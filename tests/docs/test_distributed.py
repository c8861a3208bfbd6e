"""Test that two processes of examples/distributed.py agree, and that one resumes."""

import os
import re
import subprocess
import sys

import numpy as np
import pytest

from tests.docs.scripts import EXAMPLES, ROOT, load, needs_extra, png_size

pytestmark = [pytest.mark.slow, needs_extra, pytest.mark.standard_promotion]

SAYS = re.compile(
    r"^process (\d) of (\d): params (\w{8}), loss scale (\w+), (\d) skipped, loss (.+)",
    re.MULTILINE,
)


def launched(folder, *flags):
    """Returns the output of both processes."""
    command = [sys.executable, str(EXAMPLES / "distributed.py"), "--processes", "2"]
    done = subprocess.run(
        [*command, "--checkpoint-dir", "run", "--save-every", "2", *flags],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def printed(folder):
    return launched(folder, "--steps", "3", "--overflow-at", "2")


def test_both_processes_say_that_they_have_the_same(printed, folder):
    one, other = sorted(SAYS.findall(printed))
    assert (one[:2], other[:2]) == (("0", "2"), ("1", "2"))
    assert one[2:] == other[2:]
    assert one[3:5] == ("32768", "1")  # half of 2**16
    assert float(one[5]) > 0
    assert printed.count("jamp O2") == 1
    assert "0/3 [" not in printed  # no progress bar without a terminal
    assert png_size(folder / "distributed.png") == (840, 600)


def test_one_process_goes_on_where_two_have_stopped(printed, folder):
    split = launched(folder, "--resume", "--fsdp", "--steps", "4")
    assert len(SAYS.findall(split)) == 2
    module = load("distributed", connect=lambda: None)  # a single process

    def alone(*flags):
        return module.main([*flags, "--plot", str(folder / "alone.png")])

    flags = ["--steps", "6", "--overflow-at", "2"]
    whole = alone(*flags)
    run = alone(*flags, "--resume", "--checkpoint-dir", str(folder / "run"))
    assert (list(whole["steps"]), list(run["steps"])) == ([1, 2, 3, 4, 5, 6], [5, 6])
    assert whole["skipped"] == [False, True, False, False, False, False]
    assert whole["scale"] == [2.0**16] * 2 + [2.0**15] * 4
    assert run["scale"] == whole["scale"][4:]
    assert run["state"].skipped_steps == whole["state"].skipped_steps == 1
    # The same rows, summed by one device rather than two, in half.
    np.testing.assert_allclose(run["loss"], whole["loss"][4:], rtol=1e-3)
