"""Training goes on in a new process, bit for bit; a save that is killed loses none."""

import json
import pathlib
import re
import signal
import subprocess
import sys

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import serialization

from tests import resume
from tests.bits import assert_same_bits
from tests.subprocesses import ROOT

pytestmark = pytest.mark.standard_promotion  # for optax.adam, here and in the process


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The states at the save and at the end, and what the other process says."""
    folder = tmp_path_factory.mktemp("checkpoints")
    with jax.numpy_dtype_promotion("standard"):
        start = {run: resume.make(run, seed=0) for run in resume.RUNS}
        saved = resume.train(start, resume.BEFORE)
        resume.save(folder, saved)
        straight = resume.train(start, resume.BEFORE + resume.AFTER)
    done = subprocess.run(
        [sys.executable, "-m", "tests.resume", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    return folder, saved, straight, json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("run", resume.RUNS)
@pytest.mark.parametrize("form", resume.FORMS)
def test_a_new_process_goes_on_bit_for_bit(runs, form, run):
    _, saved, straight, resumed = runs
    restored, trained = resumed[form][run]
    assert restored == resume.described(saved[run])
    assert trained == resume.described(straight[run])


@pytest.mark.parametrize("run", resume.RUNS)
def test_the_runs_above_need_all_that_is_saved(runs, run):
    # Masters that half cannot hold, moments, and counters about to move a scale.
    _, saved, straight, _ = runs
    before, after = saved[run], straight[run]
    first, second = before.loss_scales
    assert (first.scale, first.hysteresis, first.consecutive_skips) == (512, 1, 1)
    assert (second.scale, second.unskipped, second.consecutive_skips) == (256, 1, 0)
    assert (before.step, before.skipped_steps, before.last_step_skipped) == (1, 2, True)
    assert (after.step, after.skipped_steps) == (3, 3)
    assert [float(s.scale) for s in after.loss_scales] == [512, 1024]
    for name in ("params", "opt_state", "ema"):
        pairs = zip(
            jax.tree.leaves(getattr(before, name)),
            jax.tree.leaves(getattr(after, name)),
            strict=True,
        )
        assert not any(np.array_equal(a, b) for a, b in pairs)
    if run.startswith(("O2", "O5")):
        master, param = before.opt_state.masters["kernel"], before.params["kernel"]
        assert not np.array_equal(master, np.float32(param))


# Killed while saving


def test_orbax_keeps_the_last_complete_checkpoint(runs):
    folder, saved, _, _ = runs
    with resume.manager(folder / "raw") as checkpoints:
        written = [p for p in (folder / "raw").rglob("*") if p.is_file()]
        begun = [p for p in written if (folder / "raw" / "7") not in p.parents]
        assert begun  # step 8, on which the process ended
        assert checkpoints.all_steps() == [7]
        shapes = jax.eval_shape(lambda: saved)
        args = ocp.args.StandardRestore(shapes)
        assert_same_bits(checkpoints.restore(7, args=args), saved)
        checkpoints.save(8, args=ocp.args.StandardSave(saved))
        checkpoints.wait_until_finished()
        assert checkpoints.latest_step() == 8


PAGE = (ROOT / "docs" / "checkpoints.md").read_text()
KILLED = """
import builtins, io, os, pathlib, signal, sys
recipe, moment, path = sys.argv[1:]
die = lambda *args: os.kill(os.getpid(), signal.SIGKILL)

class HalfWritten(io.FileIO):
    def write(self, data):
        super().write(data[: len(data) // 2])
        die()

if moment == "write":
    builtins.open = HalfWritten
elif moment:
    assert hasattr(os, moment)
    setattr(os, moment, die)
namespace = {}
exec(recipe, namespace)
namespace["write"](pathlib.Path(path), sys.stdin.buffer.read())
"""


def write(path, data, moment=""):
    """Runs the page's recipe in a process, which ends at `moment`."""
    (recipe,) = re.findall(r"```python\n([^`]*?\bdef write\([^`]*?)```", PAGE)
    args = [sys.executable, "-c", KILLED, recipe, moment, str(path)]
    done = subprocess.run(args, input=data, capture_output=True, timeout=60)
    return done.returncode, done.stderr.decode()


@pytest.mark.parametrize("moment", ["write", "fsync", "replace"])
def test_a_file_written_as_the_page_says_is_never_in_part(runs, tmp_path, moment):
    _, saved, straight, _ = runs
    old, new = ({"O2": s["O2 optax adam"]} for s in (saved, straight))
    path: pathlib.Path = tmp_path / "state.msgpack"
    assert write(path, serialization.to_bytes(old)) == (0, "")

    data = serialization.to_bytes(new)
    assert write(path, data, moment) == (-signal.SIGKILL, "")
    target = {"O2": resume.make("O2 optax adam", seed=1)}
    assert_same_bits(serialization.from_bytes(target, path.read_bytes()), old)
    assert len(list(tmp_path.iterdir())) == 2  # beside it what had been begun

    assert write(path, data) == (0, "")
    assert_same_bits(serialization.from_bytes(target, path.read_bytes()), new)
    assert [p.name for p in tmp_path.iterdir()] == ["state.msgpack"]
