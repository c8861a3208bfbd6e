"""examples/distributed.py: two processes agree, go on, and do not outlive others."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from tests.scripts import (
    ENVIRONMENT,
    EXAMPLES,
    NEEDS_EXTRA,
    load,
    png_size,
    run_script,
    standard_promotion,
)

pytestmark = NEEDS_EXTRA

SAYS = re.compile(
    r"^process (\d) of (\d): params (\w{8}), loss scale (\w+), (\d) skipped, loss (.+)",
    re.MULTILINE,
)
BOTH = ["--processes", "2", "--checkpoint-dir", "run", "--save-every", "2"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def started(folder):
    flags = [*BOTH, "--steps", "3", "--overflow-at", "2"]
    return run_script("distributed.py", folder, *flags)


def test_both_processes_say_that_they_have_the_same(started, folder):
    stdout, stderr = started
    one, other = sorted(SAYS.findall(stdout))
    assert (one[:2], other[:2]) == (("0", "2"), ("1", "2"))
    assert one[2:] == other[2:]
    assert one[3:5] == ("32768", "1")  # half of 2**16
    assert float(one[5]) > 0
    assert stdout.count("Selected optimization level O2") == 1
    assert stderr.count("0/3 [") == 1  # one progress bar
    assert png_size(folder / "distributed.png") == (840, 600)


@pytest.fixture(scope="module")
def resumed(started, folder):
    """Goes on with the params split, until the launcher is killed after step 4."""
    flags = [*BOTH, "--resume", "--fsdp", "--steps", "1000000"]
    launcher = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "distributed.py"), *flags],
        cwd=folder,
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        until = time.monotonic() + 240
        while not (folder / "run" / "4").exists():
            assert launcher.poll() is None, launcher.communicate()
            assert time.monotonic() < until
            time.sleep(0.1)
        launcher.kill()
        # Both processes write to this pipe: it ends when the last of them has ended.
        out, _ = launcher.communicate(timeout=60)
        return launcher.returncode, out.decode()
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def alone(folder):
    """distributed.py in this process; it must not look for others."""
    module = load("distributed")
    module.connect = lambda: None

    def main(*flags):
        with standard_promotion():
            return module.main([*flags, "--plot", str(folder / "alone.png")])

    return main


def test_processes_end_with_a_launcher_that_is_killed(resumed):
    code, out = resumed  # which was there to the end within its time
    assert code == -signal.SIGKILL
    assert "/999997 [" in out  # the steps that were left after three
    assert not SAYS.search(out)  # they were in the midst


def test_one_process_goes_on_where_two_have_stopped(resumed, alone, folder):
    for path in (folder / "run").iterdir():
        if (
            path.name.isdigit() and int(path.name) > 4
        ):  # until the kill, more were saved
            shutil.rmtree(path)
    flags = ["--steps", "6", "--overflow-at", "2"]
    whole = alone(*flags)
    run = alone(*flags, "--resume", "--checkpoint-dir", str(folder / "run"))
    assert (list(whole["steps"]), list(run["steps"])) == ([1, 2, 3, 4, 5, 6], [5, 6])
    assert whole["skipped"] == [False, True, False, False, False, False]
    assert whole["scale"] == [2.0**16] * 2 + [2.0**15] * 4
    assert run["scale"] == whole["scale"][4:]
    assert run["state"].skipped_steps == whole["state"].skipped_steps == 1
    assert run["state"].step == 5
    # The same rows, summed by one device rather than two, in half.
    np.testing.assert_allclose(run["loss"], whole["loss"][4:], rtol=1e-3)


def test_distributed_learns(alone):
    run = alone("--opt-level", "O1", "--steps", "60", "--batch-size", "64")
    assert run["loss"][-1] < 0.5 * run["loss"][0]


# The launcher, with a script that does nothing else

SCRIPT = """
import os, pathlib, sys, time
i = os.environ["JAX_PROCESS_ID"]
pathlib.Path(i + ".part").write_text(str(os.getpid()))
os.rename(i + ".part", i)
print(sys.argv[1:], os.environ["JAX_NUM_PROCESSES"])
while not pathlib.Path("1" if i == "0" else "0").exists():
    time.sleep(0.01)
if i == "1" and sys.argv[1] == "fails":
    sys.exit(3)
time.sleep(600 if sys.argv[1] != "ends" else 0)
"""


@pytest.fixture
def launch(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text(SCRIPT)
    module = load("distributed")
    module.__file__ = str(tmp_path / "script.py")

    start = time.monotonic()
    yield module
    assert time.monotonic() - start < 120  # not those that wait for ten minutes
    for i in "01":
        with pytest.raises(ProcessLookupError):
            os.kill(int((tmp_path / i).read_text()), 0)


def test_a_launch_ends_when_all_have_ended(launch, tmp_path, capfd):
    assert launch.launch(2, ["ends"]) is None
    lines = capfd.readouterr().out.splitlines()
    assert lines == ["['ends', '--processes', '1', '--launched'] 2"] * 2


def test_a_process_that_fails_ends_the_others(launch):
    with pytest.raises(SystemExit, match=r"exit codes: \[None, 3\]"):
        launch.launch(2, ["fails"])


def test_an_interrupt_ends_all(launch, tmp_path, monkeypatch):
    def interrupt(seconds):
        if all((tmp_path / i).exists() for i in "01"):
            raise KeyboardInterrupt

    monkeypatch.setattr(launch.time, "sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launch.launch(2, ["waits"])
