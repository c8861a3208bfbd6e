"""examples/imagenet.py: its flags, its images, whether it learns, and resuming."""

import functools
import re
import types

import jax
import numpy as np
import pytest

from tests.bits import assert_same_bits
from tests.scripts import load, needs_extra, png_size

pytestmark = [needs_extra, pytest.mark.standard_promotion]

TINY = ["-a", "tiny", "--width", "4", "--image-size", "16", "-p", "1"]


@functools.cache
def imagenet():
    """imagenet.py with a model that compiles fast, without its picture."""
    imagenet = load("imagenet")
    imagenet.ARCHS["tiny"] = ((), False)  # a convolution, BatchNorm and a dense layer
    imagenet.figure = lambda run: types.SimpleNamespace(savefig=run.get)
    return imagenet


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """12 classes, of 10 images for training and 2 for validation."""
    folder = tmp_path_factory.mktemp("data") / "patterns"
    load("image_folder").draw_patterns(folder, each=12, size=16)
    return folder


@pytest.fixture(scope="module")
def train(data):
    """What a run gives; of equal flags, once."""
    return functools.cache(lambda *flags: imagenet().main([str(data), *TINY, *flags]))


# ---- The command line, and the helpers -----------------------------------------------
def test_imagenet_takes_apex_flags(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XLA_FLAGS", "")
    flags = "-b 16 -j 2 --lr 0.2 --momentum 0.8 --weight-decay 1e-3 -p 2 --steps 4 "
    flags += "--deterministic --sync_bn --keep-batchnorm-fp32 True --loss-scale 128.0"
    load("imagenet", ARCHS=imagenet().ARCHS).main([str(data), *TINY, *flags.split()])
    stdout, stderr = capsys.readouterr()
    assert re.search(r"loss_scale *: 128.0\n", stdout.split("After processing")[1])
    line = r"Epoch (\S+)  (\S+) images/s  Loss (\S+)  Prec@1 (\S+)  Prec@5 (\S+)  "
    line += "Scale 128  Skipped 0"
    epochs, speeds, losses, first, five = np.float64(re.findall(line, stdout)).T
    np.testing.assert_allclose(epochs, [0.29, 0.57])  # 7 batches of 16 in 120
    assert (speeds > 0).all() and (first <= five).all()
    assert ((1 < losses) & (losses < 8)).all()  # untrained: log(12) = 2.5
    assert stdout.count(" * Loss ") == 1 and "4/4" in stderr
    assert png_size(tmp_path / "imagenet.png") == (840, 960)


# Per epoch 10 steps. By hand, from apex's adjust_learning_rate.
RATES = {0: 0.002, 24: 0.05, 48: 0.098, 49: 0.1, 50: 0.1, 299: 0.1, 300: 0.01}
RATES |= {599: 0.01, 600: 0.001, 799: 0.001, 800: 1e-4, 899: 1e-4, 900: 1e-5}


def test_the_learning_rate_is_apex_schedule():
    for start in (0, 300):
        steps = np.array([step for step in RATES if step >= start])
        rates = imagenet().learning_rate(0.1, 10, start, steps - start)
        np.testing.assert_allclose(rates, [RATES[step] for step in steps], rtol=1e-5)


# ---- Training ------------------------------------------------------------------------
def test_it_learns_and_a_resumed_run_ends_as_if_never_stopped(train, tmp_path):
    # Three steps in an epoch. From epoch 5 on there is no warm-up.
    flags, folder = "-b 32 --lr 0.4 --start-epoch 5 --steps".split(), str(tmp_path)
    whole = train(*flags, "45")
    stopped = train(*flags, "25", "--checkpoint-dir", folder)  # in an epoch's middle
    resumed = train(*flags, "45", "--resume", folder)
    np.testing.assert_array_equal(whole["val"]["steps"], range(18, 46, 3))
    assert whole["prec1"][-6:].mean() > 25  # 12 classes: 8.3 by chance
    for name in ("steps", "loss", "prec1", "prec5", "scale", "skipped"):
        both = np.concatenate([stopped[name], resumed[name]])
        np.testing.assert_array_equal(both, whole[name])
    assert_same_bits(*(jax.tree.leaves(run["state"]) for run in (resumed, whole)))
    np.testing.assert_array_equal(resumed["val"]["loss"], whole["val"]["loss"][-7:])
    evaluated = train("--resume", folder, "-b", "9", "--evaluate")["val"]
    for name in ("steps", "prec1", "prec5"):
        assert evaluated[name] == stopped["val"][name][-1:]
    with pytest.raises(SystemExit, match="15 of 24 steps done. Resume .* or rename"):
        train(*flags, "24", "--checkpoint-dir", folder)
