"""Test that the examples run, are short, and show the results that they claim."""

import re
import runpy
import sys
import types

import jax
import numpy as np
import pytest

from tests.docs.scripts import EXAMPLES, load, needs_extra, png_size
from tests.support.bits import assert_same_bits

pytestmark = [needs_extra, pytest.mark.standard_promotion]

# So that models compile fast.
SMALL = {"dcgan": {"NGF": 4, "NDF": 4}, "digits": {"FEATURES": (4,)}}


# Flags, the printed text, and the picture with its size. jamp gets strings unchanged.
RUNS = {
    "digits": (
        "--opt-level O3 --keep-batchnorm-fp32 True --loss-scale dynamic --steps 2",
        [
            r"^jamp O3: float16 params, float32 BatchNorm, dynamic loss",
            r"(?m)O3 │ +[\d.]+ % │ +[\d.]+ │ +0 │ +65536 │$",
        ],
        ("digits.png", (840, 960)),
    ),
    "dcgan": (
        "--opt_level O2 --steps 2 --batchSize 16 --nz 8 --lr 1e-4 --beta1 0.9 "
        "--manualSeed 1 --outf out",
        [r"^jamp O2: float16 params", r"D fake │.* of D │", r" G │.* of G │"],
        ("out/dcgan.png", (1000, 800)),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_an_example_prints_and_draws(name, tmp_path, monkeypatch, capsys):
    flags, said, (picture, size) = RUNS[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    load(name, **SMALL[name]).main(flags.split())
    stdout, stderr = capsys.readouterr()
    for words in said:
        assert re.search(words, stdout), stdout
    assert "2/2" not in stderr  # a progress bar only in a terminal
    assert png_size(tmp_path / picture) == size


@pytest.mark.slow
def test_fp16_optimizer_learns_from_a_scale_far_too_high():
    state, _, accuracy = load("fp16_optimizer").main(
        ["--init-scale", str(2.0**24), "--steps", "150"]
    )
    assert state.loss_scale <= 2.0**22
    assert accuracy >= 0.93


@pytest.mark.slow
def test_char_lm_learns_in_half_as_in_float32(tmp_path):
    char_lm = load("char_lm")
    char_lm.LEVELS = {name: char_lm.LEVELS[name] for name in ("O0", "O2")}
    flags = "--width 16 --heads 2 --layers 1 --context 16 --lr 0.03 --steps 60 "
    flags += f"--sample 50 --compare --plot {tmp_path}/levels.png"
    baseline, run = char_lm.main(flags.split())
    # Guessing by the frequencies of the characters gives 3.2 nats.
    assert max(run["final_loss"], run["validation"][60]) < 0.9 * 3.2
    np.testing.assert_allclose(run["loss"], baseline["loss"], rtol=0.01)
    assert (run["loss"] != baseline["loss"]).any()
    assert (run["scale"] == 2.0**16).all()


@pytest.mark.slow
def test_bert_learns_and_waits_with_the_warmup_for_the_scale(tmp_path):
    bert_lamb = load("bert_lamb", SIZE=120)
    flags = f"--layers 1 --hidden 32 --length 20 --lr 0.01 --init-scale {2.0**24}"
    run = bert_lamb.main(f"{flags} --steps 150 --plot {tmp_path}/bert.png".split())
    _, test_loss, right = run["tests"][-1]
    assert test_loss < run["baseline"][0] - 0.1 and right > run["baseline"][1] + 0.02
    assert 3 <= run["skipped"].sum() == run["state"].skipped_steps <= 12
    halvings = np.cumsum(run["skipped"]) - run["skipped"]
    np.testing.assert_array_equal(run["scale"], 2.0 ** (24 - halvings))
    # A skipped step does not advance the warm-up.
    np.testing.assert_allclose(run["lr"][: halvings.max() + 1], 0.01 / 15, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["haiku", "equinox"])
def test_haiku_and_equinox_learn_in_half(framework, capsys):
    flags = f"--framework {framework} --steps 120 --loss-scale 128.0 --opt-level O2"
    state, right = load("haiku_or_equinox").main(flags.split())
    assert right > 0.8  # chance is 0.1
    assert (state.step, state.loss_scale) == (120, 128)
    assert f"Matmuls in {' '.join(5 * ['f16'])}\n" in capsys.readouterr().out


@pytest.mark.slow
def test_imagenet_learns_and_a_resumed_run_ends_as_if_never_stopped(tmp_path):
    imagenet, data = load("imagenet"), tmp_path / "patterns"
    imagenet.ARCHS["tiny"] = ((), False)  # a convolution, BatchNorm and a dense layer
    imagenet.figure = lambda run: types.SimpleNamespace(savefig=run.get)
    # 12 classes with 10 images for training and 2 for validation.
    load("image_folder").draw_patterns(data, each=12, size=16)
    tiny = [str(data), *"-a tiny --width 4 --image-size 16 -p 1".split()]
    # Three steps per epoch. The warm-up ends at epoch 5.
    tiny += "-b 32 --lr 0.4 --start-epoch 5".split()
    train = lambda *flags: imagenet.main([*tiny, *flags])  # noqa: E731
    folder = str(tmp_path / "run")
    whole = train("--steps", "45")
    stopped = train("--steps", "25", "--checkpoint-dir", folder)  # within an epoch
    resumed = train("--steps", "45", "--resume", folder)
    assert whole["prec1"][-6:].mean() > 25  # chance is 8.3
    for name in ("steps", "loss", "prec1", "prec5", "scale", "skipped"):
        both = np.concatenate([stopped[name], resumed[name]])
        np.testing.assert_array_equal(both, whole[name])
    assert_same_bits(*(jax.tree.leaves(run["state"]) for run in (resumed, whole)))
    np.testing.assert_array_equal(resumed["val"]["loss"], whole["val"]["loss"][-7:])
    evaluated = train("--resume", folder, "--evaluate")["val"]
    assert evaluated["prec1"] == stopped["val"]["prec1"][-1:]
    with pytest.raises(SystemExit, match="15 of 24 steps done. Resume .* or rename"):
        train("--steps", "24", "--checkpoint-dir", folder)


@pytest.mark.slow
def test_the_advice_for_lost_digits_repairs_them(capsys):
    load("lost_digits").main()
    first, second = capsys.readouterr().out.split("O5 against O0")[1:]
    assert "keep_fp32" in first and "keep_fp32" not in second


SCRIPTS = "bert_lamb", "char_lm", "dcgan", "digits", "distributed", "fp16_optimizer"
SCRIPTS += ("haiku_or_equinox", "imagenet")


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_needs_no_jax(name, monkeypatch, capsys):
    for module in ("jax", "flax", "jamp"):  # importing them is an error
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert "(default: " in capsys.readouterr().out


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_imports_and_its_defaults_parse(name):
    assert load(name).parse([])
