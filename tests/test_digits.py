"""examples/digits.py: what it prints and draws, whether it learns, and resuming."""

import re
import shutil

import jax
import numpy as np
import pytest

from tests.bits import assert_same_bits
from tests.scripts import (
    ENVIRONMENT,
    NEEDS_EXTRA,
    load,
    optimized,
    png_size,
    rows,
    run_script,
    standard_promotion,
)

pytestmark = NEEDS_EXTRA

# Flags, then what the level's properties must say, and the scale in the table.
COMMANDS = {
    "O2": (
        ["--loss-scale", "128.0", "--keep-batchnorm-fp32", "False"],
        {"loss_scale": "128.0", "keep_batchnorm_fp32": "False"},
        "128",
    ),
    "O3": (
        ["--keep-batchnorm-fp32", "True", "--loss-scale", "dynamic"],
        {"loss_scale": "dynamic", "keep_batchnorm_fp32": "True"},
        "65536",
    ),
}


@pytest.mark.parametrize("level", COMMANDS)
def test_digits_takes_apex_flags_as_strings(level, tmp_path):
    flags, properties, scale = COMMANDS[level]
    flags = ["--opt-level", level, *flags, "--steps", "2"]
    stdout, stderr = run_script("digits.py", tmp_path, *flags)
    after = stdout.split("After processing overrides")[1]
    for name, value in {"opt_level": level, **properties}.items():
        assert re.search(rf"^{name} *: {re.escape(value)}$", after, re.MULTILINE)
    assert "2/2" in stderr  # the progress bar
    table = rows(stdout)
    assert list(table) == [level]
    accuracy, loss, skipped, final_scale, _ = table[level]
    assert 0 <= float(accuracy.removesuffix(" %")) <= 100
    assert 1 < float(loss) < 4  # ten classes, untrained: about log(10) = 2.3
    assert (skipped, final_scale) == ("0", scale)
    assert png_size(tmp_path / "digits.png") == (840, 960)


@pytest.mark.standard_promotion
def test_digits_compares_the_levels_from_one_seed(tmp_path, monkeypatch, capsys):
    digits = load("digits")
    digits.FEATURES = (4,)  # compiles fast
    assert list(digits.LEVELS) == ["O0", "O1", "O2", "O3", "O4", "O5"]
    digits.LEVELS = {name: digits.LEVELS[name] for name in ("O0", "O2", "O5")}
    monkeypatch.setenv("COLUMNS", ENVIRONMENT["COLUMNS"])
    plot = tmp_path / "levels.png"
    runs = digits.main(
        ["--compare", "--steps", "2", "--seed", "3", "--plot", str(plot)]
    )
    stdout = capsys.readouterr().out
    table = rows(stdout)
    assert list(table) == ["O0", "O2", "O5"]
    scales = ["1", "65536", "1"]
    assert [cells[3] for cells in table.values()] == scales
    assert png_size(plot) == (840, 960)
    # One seed: the first loss is that of the same params on the same batch, rounded.
    losses = [run["loss"][0] for run in runs]
    np.testing.assert_allclose(losses, losses[0], rtol=0.02)
    assert len(set(losses)) > 1


def train(tmp_path, *flags):
    """Trains for 12 epochs, of the default of 20, in this process."""
    flags = [*flags, "--epochs", "12", "--plot", str(tmp_path / "digits.png")]
    with optimized():
        (run,) = load("digits").main(flags)
    return run


@pytest.mark.standard_promotion
@pytest.mark.parametrize("level", ["O1", "O5"])
def test_digits_learns(level, tmp_path):
    run = train(tmp_path, "--opt-level", level)
    assert run["accuracy"] >= 0.97
    assert run["final_loss"] < 0.05
    assert run["state"].skipped_steps == 0


@pytest.mark.standard_promotion
def test_digits_learns_at_o2_from_a_scale_far_too_high_as_well(tmp_path):
    default = train(tmp_path, "--opt-level", "O2")
    assert default["accuracy"] >= 0.97
    assert default["state"].skipped_steps == 0
    assert default["state"].loss_scale == 2.0**16

    high = train(tmp_path, "--opt-level", "O2", "--init-scale", str(2.0**40))
    skips = int(high["state"].skipped_steps)
    # A logit's gradient is up to 0.9 / 64 of the scale at first: inf in float16 at
    # 2**40, 2**39, ..., 2**23: 18 steps. Those of a kernel sum over the batch.
    assert 18 <= skips <= 30
    assert skips == high["skipped"].sum()
    np.testing.assert_array_equal(high["skipped"][:18], 1)
    # Each skip halves the scale of the next step, and nothing else moves it.
    halvings = np.concatenate([[0], np.cumsum(high["skipped"])])
    np.testing.assert_array_equal(high["scale"], 2.0 ** (40 - halvings[:-1]))
    assert high["state"].loss_scale == 2.0 ** (40 - skips)
    # Nothing was learnt on a skipped step: ten classes, so about log(10) = 2.3.
    assert high["loss"][:18].min() > 1.5
    assert abs(high["accuracy"] - default["accuracy"]) <= 0.01


# Epochs of 4 batches, of which the first 2 or 3 are skipped.
SHORT = ["-b", "359", "--steps", "10", "--init-scale", str(2.0**22)]


def short_run(digits, folder, *flags):
    (run,) = digits.main([*SHORT, "--plot", str(folder / "digits.png"), *flags])
    return run


@pytest.fixture(scope="module")
def digits():
    """digits.py with a model that compiles fast."""
    module = load("digits")
    module.FEATURES = (4,)
    return module


@pytest.fixture(scope="module")
def stopped(digits, tmp_path_factory):
    """The checkpoints of a run that was stopped in its seventh step of ten."""
    folder = tmp_path_factory.mktemp("stopped")
    train_step, steps = digits.train_step, []

    def until_the_seventh(*args):
        steps.append(args)
        if len(steps) == 7:
            raise KeyboardInterrupt
        return train_step(*args)

    digits.train_step = until_the_seventh
    with standard_promotion(), pytest.raises(KeyboardInterrupt):
        short_run(digits, folder, "--checkpoint-dir", str(folder / "run"))
    digits.train_step = train_step
    return folder / "run"


@pytest.fixture(scope="module")
def whole(digits, tmp_path_factory):
    """The run that was not stopped."""
    with standard_promotion():
        return short_run(digits, tmp_path_factory.mktemp("whole"))


def resume(digits, stopped, folder, *flags):
    """Goes on with a copy of the stopped run."""
    checkpoints = str(shutil.copytree(stopped, folder / "run"))
    flags = ["--checkpoint-dir", checkpoints, "--resume", *flags]
    with standard_promotion():
        return short_run(digits, folder, *flags)


def test_a_resumed_run_ends_as_if_never_stopped(digits, stopped, whole, tmp_path):
    assert 0 < whole["state"].skipped_steps < 4  # so there are moments to carry over
    resumed = resume(digits, stopped, tmp_path)
    np.testing.assert_array_equal(resumed["steps"], np.arange(5, 11))
    for name in ("loss", "scale", "skipped"):
        np.testing.assert_array_equal(resumed[name], whole[name][4:])
    # As leaves: each run makes its own tx and apply_fn, which are static.
    assert_same_bits(*(jax.tree.leaves(run["state"]) for run in (resumed, whole)))
    assert resumed["accuracy"] == whole["accuracy"]


def test_another_level_goes_on_with_params_batches_and_scale(
    digits, stopped, whole, tmp_path
):
    resumed = resume(digits, stopped, tmp_path, "--opt-level", "O1")
    assert resumed["level"] == "O1"
    leaves = jax.tree.leaves(resumed["state"].params)
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}
    np.testing.assert_allclose(resumed["loss"][0], whole["loss"][4], rtol=1e-3)
    assert resumed["scale"][0] == whole["scale"][4] < 2.0**22


@pytest.mark.standard_promotion
def test_a_run_is_not_saved_over_another_and_resumes_from_a_folder(
    digits, stopped, tmp_path, capsys
):
    flags = ["--plot", str(tmp_path / "digits.png"), "--checkpoint-dir", str(stopped)]
    with pytest.raises(SystemExit, match="4 of 10 steps. Resume or rename it"):
        digits.main([*SHORT, *flags])
    with pytest.raises(SystemExit, match="4 of 4 steps"):
        digits.main([*SHORT, "--steps", "4", "--resume", *flags])
    with pytest.raises(SystemExit, match="2"):
        digits.main(["--resume"])
    assert "--resume needs --checkpoint-dir" in capsys.readouterr().err
