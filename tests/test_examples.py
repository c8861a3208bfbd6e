"""The examples, run as a user runs them; and whether they learn."""

import importlib.util
import os
import pathlib
import re
import struct
import subprocess
import sys

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples").glob("*.py"))
DIGITS = ROOT / "examples" / "digits.py"

needs_extra = [
    pytest.mark.skipif(
        importlib.util.find_spec(name) is None,
        reason=f"needs {name}, which the extra `examples` installs",
    )
    for name in ("matplotlib", "rich", "sklearn", "tqdm")
]


def marked(test):
    for mark in needs_extra:
        test = mark(test)
    return test


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_is_read_in_one_sitting(script):
    assert len(script.read_text().splitlines()) <= 200


# A run of two steps is nearly all compilation, which is faster without optimizations.
ENVIRONMENT = {
    "COLUMNS": "100",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "PYTHONPATH": str(ROOT),
}


def run_script(folder, *flags):
    """Runs digits.py from another folder, and returns its standard output and error."""
    done = subprocess.run(
        [sys.executable, str(DIGITS), *flags],
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


# Flags, then what the level's properties must say, and the scale in the table.
COMMANDS = {
    "O0": ([], {"loss_scale": "1.0"}, "1"),
    "O2": (
        ["--loss-scale", "128.0", "--keep-batchnorm-fp32", "False"],
        {"loss_scale": "128.0", "keep_batchnorm_fp32": "False"},
        "128",
    ),
    "O3": (
        ["--keep-batchnorm-fp32", "True"],
        {"loss_scale": "1.0", "keep_batchnorm_fp32": "True"},
        "1",
    ),
    "O5": (["--loss-scale", "dynamic"], {"loss_scale": "dynamic"}, "65536"),
}


@marked
@pytest.mark.parametrize("level", COMMANDS)
def test_digits_takes_apex_flags_as_strings(level, tmp_path):
    flags, properties, scale = COMMANDS[level]
    stdout, stderr = run_script(tmp_path, "--opt-level", level, *flags, "--steps", "2")
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


def load():
    """A fresh copy of the script, as a module."""
    spec = importlib.util.spec_from_file_location("digits", DIGITS)
    digits = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(digits)
    return digits


@marked
@pytest.mark.standard_promotion
def test_digits_compares_the_levels_from_one_seed(tmp_path, monkeypatch, capsys):
    digits = load()
    digits.FEATURES = (4,)  # compiles fast
    monkeypatch.setenv("COLUMNS", ENVIRONMENT["COLUMNS"])
    plot = tmp_path / "levels.png"
    runs = digits.main(
        ["--compare", "--steps", "2", "--seed", "3", "--plot", str(plot)]
    )
    stdout = capsys.readouterr().out
    table = rows(stdout)
    assert list(table) == ["O0", "O1", "O2", "O3", "O4", "O5"]
    scales = ["1", "65536", "65536", "1", "1", "1"]
    assert [cells[3] for cells in table.values()] == scales
    assert png_size(plot) == (840, 960)
    # One seed: the first loss is that of the same params on the same batch, rounded.
    losses = [run["loss"][0] for run in runs]
    np.testing.assert_allclose(losses, losses[0], rtol=0.02)
    assert len(set(losses)) > 1


def train(tmp_path, *flags):
    """Trains for the default number of epochs, in this process."""
    (run,) = load().main([*flags, "--plot", str(tmp_path / "digits.png")])
    return run


@marked
@pytest.mark.standard_promotion
@pytest.mark.parametrize("level", ["O0", "O1", "O5"])
def test_digits_learns(level, tmp_path):
    run = train(tmp_path, "--opt-level", level)
    assert run["accuracy"] >= 0.97
    assert run["final_loss"] < 0.05
    assert run["skipped_steps"] == 0


@marked
@pytest.mark.standard_promotion
def test_digits_learns_at_o2_from_a_scale_far_too_high_as_well(tmp_path):
    default = train(tmp_path, "--opt-level", "O2")
    assert default["accuracy"] >= 0.97
    assert default["skipped_steps"] == 0
    assert default["final_scale"] == 2.0**16

    high = train(tmp_path, "--opt-level", "O2", "--init-scale", str(2.0**40))
    skips = high["skipped_steps"]
    # A logit's gradient is up to 0.9 / 64 of the scale at first: inf in float16 at
    # 2**40, 2**39, ..., 2**23: 18 steps. Those of a kernel sum over the batch.
    assert 18 <= skips <= 30
    assert skips == high["skipped"].sum()
    np.testing.assert_array_equal(high["skipped"][:18], 1)
    # Each skip halves the scale of the next step, and nothing else moves it.
    halvings = np.concatenate([[0], np.cumsum(high["skipped"])])
    np.testing.assert_array_equal(high["scale"], 2.0 ** (40 - halvings[:-1]))
    assert high["final_scale"] == 2.0 ** (40 - skips)
    # Nothing was learnt on a skipped step: ten classes, so about log(10) = 2.3.
    assert high["loss"][:18].min() > 1.5
    assert abs(high["accuracy"] - default["accuracy"]) <= 0.01
