"""The examples run as their users run them, are short, and show what they say."""

import functools
import re
import runpy
import shutil
import sys
from collections import Counter
from pydoc_data.topics import topics

import jax
import numpy as np
import pytest

from tests.bits import assert_same_bits
from tests.scripts import EXAMPLES, load, needs_extra, png_size, wait_for

pytestmark = [needs_extra, pytest.mark.standard_promotion]

# So that models compile fast.
SMALL = {
    "bert_lamb": {"SIZE": 120},
    "dcgan": {"NGF": 4, "NDF": 4},
    "digits": {"FEATURES": (4,)},
}


@functools.cache
def example(name):
    return load(name, **SMALL.get(name, {}))


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda p: p.name)
def test_an_example_is_read_in_one_sitting(script):
    most = 70 if script.stem == "haiku_or_equinox" else 220
    assert len(script.read_text().splitlines()) <= most


# Flags, what is printed, and the picture with its size. Strings go to jamp as they are.
CHAR_LM = "--width 16 --heads 2 --layers 1 --context 16 --lr 0.03"
RUNS = {
    "digits": (
        "--opt-level O3 --keep-batchnorm-fp32 True --loss-scale dynamic --steps 2",
        [r"keep_batchnorm_fp32 *: True\n", r"O3 │ +[\d.]+ % │ +[\d.]+ │ +0 │ +65536 │"],
        ("digits.png", (840, 960)),
    ),
    "char_lm": (
        f"{CHAR_LM} --opt-level O5 --loss-scale 128.0 --steps 2 --sample 5",
        [r"loss_scale *: 128.0\n", r"\[sample:\]", r"O5 │.*\+0.00% │.* 0 │ +128 │"],
        ("char_lm.png", (840, 840)),
    ),
    "bert_lamb": (
        "--opt-level O3 --loss-scale 128.0 --steps 2 -b 2 --accumulate 3 --layers 0 "
        "--hidden 16 --length 64 --lr 1e-3 --seed 1",
        [r"frequency │ \d\.\d+ +│ \d+\.\d%", r"O3 +│.*│ 0 +│ 128 ", r"\[MASK\]"],
        ("bert_lamb.png", (840, 960)),
    ),
    "dcgan": (
        "--opt_level O2 --steps 2 --batchSize 16 --nz 8 --lr 1e-4 --beta1 0.9 "
        "--manualSeed 1 --outf out",
        [r"opt_level *: O2\n", r"D fake │.* of D │", r" G │.* of G │"],
        ("out/dcgan.png", (1000, 800)),
    ),
    "fp16_optimizer": (
        "--static-loss-scale 128 --steps 2",
        [r"FP16_Optimizer processing param group 0:", "loss scale 128, 0 overflows"],
        None,
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_example_prints_and_draws(name, tmp_path, monkeypatch, capsys):
    flags, said, picture = RUNS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    example(name).main(flags.split())
    stdout, stderr = capsys.readouterr()
    for words in said:
        assert re.search(words, stdout), stdout
    assert "2/2" in stderr  # the progress bar
    if picture:
        assert png_size(tmp_path / picture[0]) == picture[1]


# ---- digits.py ---------------------------------------------------------------------
def run_digits(tmp_path, *flags):
    return example("digits").main([*flags, "--plot", str(tmp_path / "digits.png")])[0]


def test_a_resumed_run_of_digits_ends_as_if_never_stopped(tmp_path, monkeypatch):
    # Epochs of 4 batches, of which the first 2 or 3 are skipped.
    flags = ["-b", "359", "--steps", "10", "--init-scale", str(2.0**22)]
    saved, copied = (["--checkpoint-dir", str(tmp_path / x)] for x in ("run", "copy"))
    whole, train_step = run_digits(tmp_path, *flags), example("digits").train_step
    steps = iter(range(1, 8))

    def until_the_seventh(*args):
        if next(steps) == 7:
            wait_for(tmp_path / "run" / "4")  # saved while it goes on
            raise KeyboardInterrupt
        return train_step(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(example("digits"), "train_step", until_the_seventh)
        run_digits(tmp_path, *flags, *saved)
    with pytest.raises(SystemExit, match="4 of 10 steps. Resume or rename it"):
        run_digits(tmp_path, *flags, *saved)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    resumed = run_digits(tmp_path, *flags, *saved, "--resume")
    assert 0 < whole["state"].skipped_steps < 4  # so there are moments to carry over
    halvings = np.cumsum(whole["skipped"]) - whole["skipped"]
    np.testing.assert_array_equal(whole["scale"], 2.0 ** (22 - halvings))
    np.testing.assert_array_equal(resumed["steps"], np.arange(5, 11))
    for name in ("loss", "scale", "skipped"):
        np.testing.assert_array_equal(resumed[name], whole[name][4:])
    # As leaves: each run makes its own tx and apply_fn, which are static.
    assert_same_bits(*(jax.tree.leaves(run["state"]) for run in (resumed, whole)))
    other = run_digits(tmp_path, *flags, *copied, "--resume", "--opt-level", "O1")
    assert other["state"].params["Dense_0"]["kernel"].dtype == np.float32
    np.testing.assert_allclose(other["loss"][0], whole["loss"][4], rtol=1e-3)
    assert other["scale"][0] == whole["scale"][4] < 2.0**22


# ---- char_lm.py --------------------------------------------------------------------
ALL = "\n\n".join(topics[name] for name in sorted(topics))


def test_char_lm_learns_in_half_as_in_float32(tmp_path):
    char_lm = load("char_lm")
    char_lm.LEVELS = {name: char_lm.LEVELS[name] for name in ("O0", "O2")}
    flags = f"{CHAR_LM} --steps 60 --sample 50 --compare --plot {tmp_path}/levels.png"
    baseline, run = char_lm.main(flags.split())
    frequencies = np.array(list(Counter(ALL).values())) / len(ALL)
    entropy = -(frequencies * np.log(frequencies)).sum()  # 3.2 nats
    assert max(run["final_loss"], run["validation"][60]) < 0.9 * entropy
    np.testing.assert_allclose(run["loss"], baseline["loss"], rtol=0.01)
    assert (run["loss"] != baseline["loss"]).any()
    assert (run["scale"] == 2.0**16).all()
    # A fifth of the text is spaces; before training, 1 of 104 would be.
    assert Counter(run["text"][1])[" "] >= 5


def bert_run(tmp_path, flags):
    return example("bert_lamb").main([*flags.split(), "--plot", f"{tmp_path}/bert.png"])


def test_bert_learns_and_waits_with_the_warmup_for_the_scale(tmp_path):
    flags = f"--layers 1 --hidden 32 --length 20 --lr 0.01 --init-scale {2.0**24}"
    run = bert_run(tmp_path, f"{flags} --steps 150")
    # What the frequencies of words are worth, counted otherwise; the test masks 15 %.
    _, *parts = example("bert_lamb").load_text()
    train, test = (Counter(part[part >= 3].tolist()) for part in parts)
    loss = -sum(n * np.log(train[word] / train.total()) for word, n in test.items())
    assert run["baseline"][0] == pytest.approx(loss / test.total(), rel=0.03)
    _, test_loss, right = run["tests"][-1]
    assert test_loss < run["baseline"][0] - 0.1 and right > run["baseline"][1] + 0.02
    assert 3 <= run["skipped"].sum() == run["state"].skipped_steps <= 12
    halvings = np.cumsum(run["skipped"]) - run["skipped"]
    np.testing.assert_array_equal(run["scale"], 2.0 ** (24 - halvings))
    # A rise of 15 steps from 1 / 15, then a fall; the step after is the first at 0.
    taken = np.arange(150) - halvings
    rate = 0.01 * np.minimum((1 + taken * 14 / 15) / 15, (150 - taken) / 135)
    np.testing.assert_allclose(run["lr"], rate, rtol=1e-4)


def test_fp16_optimizer_learns_from_a_scale_far_too_high(capsys):
    flags = ["--init-scale", str(2.0**24), "--steps", "150"]
    state, _, accuracy = example("fp16_optimizer").main(flags)
    overflows = int(re.search(r"(\d+) overflows", capsys.readouterr().out).group(1))
    assert overflows >= 2
    assert state.loss_scale == 2.0 ** (24 - overflows)
    assert accuracy >= 0.93


@pytest.mark.parametrize("framework", ["haiku", "equinox"])
def test_haiku_and_equinox_learn_in_half_as_in_float32(framework, capsys):
    flags = f"--framework {framework} --steps 200 --loss-scale 128.0 --opt-level"
    runs = [example("haiku_or_equinox").main([*flags.split(), x]) for x in ("O0", "O2")]
    (_, right), (state, half_right) = runs
    assert right > 0.8  # at chance it is 0.1
    assert abs(half_right - right) <= 0.02
    assert (state.step, state.loss_scale) == (200, 128)
    found = re.findall(r"Products in (.*)\n", capsys.readouterr().out)
    assert found == [" ".join(5 * ["f32"]), " ".join(5 * ["f16"])]


# ---- What is wrong with a command line is said, and before JAX is imported ---------
SCRIPTS = (
    "bert_lamb char_lm dcgan digits distributed fp16_optimizer haiku_or_equinox "
    "imagenet"
).split()
WRONG = {
    "--opt-level O9": "'O9': one of O0, O1, O2, O3, O4, O5",
    "--loss-scale banana": "'banana': a positive number, such as 128, or 'dynamic'",
    "--loss-scale -1": "'-1': a positive number",
    "--loss-scale 0": "'0': a positive number",
    "--init-scale nan": "'nan': a positive number",
    "--epochs 0": "'0': a whole number of at least 1",
    "--batch-size 1.5": "'1.5': a whole number of at least 1",
    "--plot /no/such/a.png": "/no/such cannot be written to",
    "--plot a.txt": "must end in .png, .svg or .pdf",
    "--resume": "--resume needs --checkpoint-dir",
    "--beside 0": "'0': one of O0",
}


@pytest.fixture
def run(monkeypatch, capsys):
    def run(script, flags):
        monkeypatch.syspath_prepend(EXAMPLES)
        for name in ("jax", "flax", "jamp"):  # importing them is an error
            monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.setattr(sys, "argv", [script, *flags.split()])
        with pytest.raises(SystemExit):
            runpy.run_path(str(EXAMPLES / f"{script}.py"), run_name="__main__")
        out, err = capsys.readouterr()
        return " ".join((out + err).split())

    return run


@pytest.mark.parametrize("flags", WRONG)
def test_a_wrong_flag_is_an_error_without_jax(flags, run):
    assert WRONG[flags] in run("digits", flags)


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_shows_defaults_without_jax(script, run):
    assert run(script, "--help").count("(default: ") >= 2
    assert "at least 1" in run(script, "--steps 0")


@pytest.mark.parametrize(
    "path, error",
    [
        (EXAMPLES / "flags.py", SystemExit),
        (EXAMPLES / "../jamp/__init__.py", ImportError),
    ],
)
def test_an_old_python_gets_one_line(path, error, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(error, match=r"^jamp needs Python 3\.12 or newer; this is 3\."):
        runpy.run_path(str(path))
