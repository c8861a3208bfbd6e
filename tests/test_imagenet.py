"""examples/imagenet.py: its flags, its images, whether it learns, resuming, devices.

Run as a module, it trains on as many devices as there are and prints losses as JSON.
"""

import json
import re
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from tests.bits import assert_same_bits
from tests.scripts import NEEDS_EXTRA, load, png_size, run_script, standard_promotion
from tests.subprocesses import run

pytestmark = [*NEEDS_EXTRA, pytest.mark.standard_promotion]

TINY = ["-a", "tiny", "--width", "4", "--image-size", "16", "-p", "1"]


def load_imagenet():
    """imagenet.py with a model that compiles fast, without its picture."""
    imagenet = load("imagenet")
    imagenet.ARCHS["tiny"] = ((), False)  # a convolution, BatchNorm and a dense layer
    imagenet.figure = lambda run: types.SimpleNamespace(savefig=run.get)
    return imagenet


@pytest.fixture(scope="module")
def imagenet():
    return load_imagenet()


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """12 classes, of 10 images for training and 2 for validation."""
    folder = tmp_path_factory.mktemp("data") / "patterns"
    load("image_folder").draw_patterns(folder, each=12, size=16)
    return folder


def train(imagenet, data, *flags):
    with standard_promotion():
        return imagenet.main([str(data), *TINY, *flags])


# ---- The command line ----------------------------------------------------------------
def test_imagenet_takes_apex_flags_on_two_devices(data, tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    flags = ["-a", "resnet18", "--width", "2", "--image-size", "16", "-b", "8"]
    flags += ["-j", "2", "--lr", "0.2", "--momentum", "0.8", "--weight-decay", "1e-3"]
    flags += ["-p", "2", "--steps", "4", "--deterministic", "--sync_bn"]
    flags += ["--opt-level", "O2", "--keep-batchnorm-fp32", "True"]
    flags += ["--loss-scale", "128.0"]
    stdout, stderr = run_script("imagenet.py", tmp_path, str(data), *flags)
    after = stdout.split("After processing overrides")[1]
    for name, value in {"opt_level": "O2", "loss_scale": "128.0"}.items():
        assert re.search(rf"^{name} *: {re.escape(value)}$", after, re.MULTILINE)
    number = r"(\d+\.\d+)"
    lines = re.findall(
        rf"Epoch {number}  {number} images/s  Loss {number}  Prec@1 {number}  "
        rf"Prec@5 {number}  Scale 128  Skipped 0",
        after,
    )
    lines = np.float64(lines)
    np.testing.assert_allclose(lines[:, 0], [0.29, 0.57])  # 7 batches of 2 x 8 in 120
    assert (lines[:, 1] > 0).all()
    assert ((1 < lines[:, 2]) & (lines[:, 2] < 8)).all()  # untrained: log(12) = 2.5
    assert (lines[:, 3] <= lines[:, 4]).all()
    tested = re.findall(rf" \* Loss {number}  Prec@1 {number}  Prec@5 {number}", after)
    assert len(tested) == 1
    assert "4/4" in stderr
    assert "Warning" not in stderr
    assert png_size(tmp_path / "imagenet.png") == (840, 960)


@pytest.mark.parametrize(
    ("arch", "count"), [("resnet18", 11_689_512), ("resnet50", 25_557_032)]
)
def test_the_models_have_as_many_params_as_torchvisions(imagenet, arch, count):
    model = imagenet.ResNet(arch, classes=1000)
    images = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    variables = jax.eval_shape(model.init, jax.random.key(0), images)
    sizes = [leaf.size for leaf in jax.tree.leaves(variables["params"])]
    assert sum(sizes) == count


# Per epoch 10 steps. By hand, from apex's adjust_learning_rate.
RATES = {0: 0.002, 24: 0.05, 48: 0.098, 49: 0.1, 50: 0.1, 299: 0.1, 300: 0.01}
RATES |= {599: 0.01, 600: 0.001, 799: 0.001, 800: 1e-4, 899: 1e-4, 900: 1e-5}


def test_the_learning_rate_is_apex_schedule(imagenet):
    steps = np.array(list(RATES))
    rates = [imagenet.learning_rate(0.1, 10, 0, jnp.int32(step)) for step in steps]
    np.testing.assert_allclose(rates, list(RATES.values()), rtol=1e-5)
    later = [imagenet.learning_rate(0.1, 10, 300, jnp.int32(i)) for i in (0, 300)]
    np.testing.assert_allclose(later, [0.01, 0.001], rtol=1e-5)


# ---- The images ----------------------------------------------------------------------
@pytest.fixture(scope="module")
def reader():
    return load("image_folder")


def test_batches_follow_from_the_seed_wherever_they_begin(reader, data):
    def batches(workers, seed, start, stop):
        folder = reader.ImageFolder(data / "train", 50, 8, workers)
        return list(folder.shuffled(seed, start, stop))

    whole = batches(1, 7, 0, 5)
    assert len(whole) == 5
    assert_same_bits(whole, batches(4, 7, 0, 5))
    assert_same_bits(whole[3:], batches(3, 7, 3, 5))
    images = [np.asarray(images) for images, _ in whole]
    assert images[0].dtype == np.uint8
    assert images[0].shape == (50, 8, 8, 3)
    # Two batches in an epoch; the next is in another order.
    assert (np.asarray(whole[0][1]) != np.asarray(whole[2][1])).any()
    (other, _), *_ = batches(1, 8, 0, 1)
    assert (np.asarray(other) != images[0]).any()


def test_an_epoch_has_each_image_once_and_validation_all(reader, tmp_path):
    values = {}
    for label, name in enumerate(["ant", "bee", "cat"]):
        (tmp_path / name).mkdir()
        for i in range(3):  # of one color each, which no crop changes
            values[20 * label + 5 * i] = label
            image = Image.new("RGB", (9 + i, 12), (20 * label + 5 * i, 0, 255))
            image.save(tmp_path / name / f"{i}.png")
    folder = reader.ImageFolder(tmp_path, batch_size=4, image_size=6, workers=2)
    assert folder.classes == ["ant", "bee", "cat"]
    assert len(folder) == 2

    def seen(batches):
        pairs = [
            (int(image[0, 0, 0]), int(label))
            for images, labels in batches
            for image, label in zip(np.asarray(images), np.asarray(labels), strict=True)
        ]
        return [pair for pair in pairs if pair[1] >= 0], len(pairs)

    pairs, size = seen(folder.shuffled(0, 0, 2))
    assert size == len(set(pairs)) == 8
    assert set(pairs) < set(values.items())
    pairs, size = seen(folder.in_order())
    assert pairs == list(values.items())
    assert size == 12  # three of no class
    with pytest.raises(ValueError, match="A batch of 10 is more than 9 images"):
        reader.ImageFolder(tmp_path, batch_size=10).shuffled(0, 0, 1)


def test_validation_takes_the_middle_of_an_image(reader, tmp_path):
    ramp = np.zeros((32, 48, 3), np.uint8)
    ramp[..., 0], ramp[..., 1] = 5 * np.arange(48), 5 * np.arange(32)[:, None]
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    middle = reader.decode(tmp_path / "ramp.png", 28)  # 7/8 of 32: nothing is scaled
    np.testing.assert_array_equal(middle, ramp[2:30, 10:38])
    crops = [
        reader.decode(tmp_path / "ramp.png", 8, np.random.default_rng(seed))
        for seed in range(40)
    ]
    mirrored = [crop[0, 0, 0] > crop[0, -1, 0] for crop in crops]
    assert 8 < sum(mirrored) < 32


def test_each_image_has_a_crop_of_its_own_in_each_epoch(reader, tmp_path):
    ramp = np.arange(32 * 48 * 3).reshape(32, 48, 3) % 251
    (tmp_path / "one").mkdir()
    for i in range(4):
        Image.fromarray(ramp.astype(np.uint8)).save(tmp_path / f"one/{i}.png")
    folder = reader.ImageFolder(tmp_path, batch_size=2, image_size=8, workers=1)
    batches = [*folder.shuffled(0, 0, 4), *folder.shuffled(1, 0, 4)]
    crops = np.concatenate([images for images, _ in batches])
    assert len({crop.tobytes() for crop in crops}) == 16


def test_without_images_patterns_are_drawn_once(reader, tmp_path, monkeypatch, capsys):
    draw = reader.draw_patterns
    monkeypatch.setattr(reader, "draw_patterns", lambda path: draw(path, 6, 8))
    missing, drawn = tmp_path / "typo", tmp_path / "drawn"
    train_set, val_set = reader.train_and_val(missing, 4, 8, drawn=drawn)
    assert (len(train_set.classes), len(train_set.files)) == (12, 60)
    assert val_set.classes == train_set.classes
    assert len(val_set.files) == 12
    assert f"{missing} is no folder: patterns, from {drawn}" in capsys.readouterr().out
    monkeypatch.setattr(reader, "draw_patterns", None)
    reader.train_and_val(None, 4, 8, drawn=drawn)
    reader.train_and_val(drawn, 4, 8)
    assert str(drawn) in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["drawn"]


# ---- Training ------------------------------------------------------------------------
# Three steps in an epoch. From epoch 5 on there is no warm-up.
RUN = ["-b", "32", "--lr", "0.4", "--start-epoch", "5", "--steps"]


@pytest.fixture(scope="module")
def whole(imagenet, data):
    """A run that was not stopped."""
    return train(imagenet, data, *RUN, "55")


@pytest.fixture(scope="module")
def stopped(imagenet, data, tmp_path_factory):
    """Its steps 16 to 35, of which the last is in the middle of an epoch, and where."""
    folder = tmp_path_factory.mktemp("stopped")
    return folder, train(imagenet, data, *RUN, "35", "--checkpoint-dir", str(folder))


def test_it_learns(whole):
    np.testing.assert_array_equal(whole["steps"], np.arange(16, 56))
    np.testing.assert_array_equal(whole["val"]["steps"], [*range(18, 55, 3), 55])
    assert whole["loss"][0] > 2
    assert whole["prec1"][-6:].mean() > 30  # 12 classes: 8.3 by chance
    assert whole["val"]["prec5"][-1] > 60


def test_a_resumed_run_ends_as_if_never_stopped(
    imagenet, data, whole, stopped, monkeypatch
):
    schedule, given = imagenet.learning_rate, []

    def recorded(*args):
        given.append(args[:-1])
        return schedule(*args)

    monkeypatch.setattr(imagenet, "learning_rate", recorded)
    resumed = train(imagenet, data, *RUN, "55", "--resume", str(stopped[0]))
    assert set(given) == {(0.05, 3, 15)}  # 0.4 for 256 images, so 0.05 for 32
    np.testing.assert_array_equal(resumed["steps"], np.arange(36, 56))
    for name in ("loss", "prec1", "prec5", "scale", "skipped"):
        np.testing.assert_array_equal(resumed[name], whole[name][20:])
        np.testing.assert_array_equal(stopped[1][name], whole[name][:20])
    assert_same_bits(*(jax.tree.leaves(run["state"]) for run in (resumed, whole)))
    np.testing.assert_array_equal(resumed["val"]["loss"], whole["val"]["loss"][-8:])


def test_evaluate_gives_what_the_last_validation_gave(imagenet, data, stopped):
    folder, run = stopped
    resume = ["--resume", str(folder), "-b", "9"]
    evaluated = train(imagenet, data, *resume, "--evaluate")
    for name in ("steps", "prec1", "prec5"):
        assert evaluated["val"][name] == run["val"][name][-1:]
    # And what NumPy has of the logits, in float64.
    images, labels = decoded(data / "val")
    mean, std = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])
    state, x = evaluated["state"], np.float32((images / 255 - mean) / std)
    with standard_promotion():
        logits = state.apply_fn(
            {"params": state.params, "batch_stats": state.batch_stats}, x
        )
    logits = np.float64(logits)
    ranks = (np.argsort(-logits, kind="stable") == labels[:, None]).argmax(1)
    expected = 100 * (ranks == 0).mean(), 100 * (ranks < 5).mean()
    np.testing.assert_allclose(
        [evaluated["val"][name][0] for name in ("prec1", "prec5")], expected
    )
    losses = np.log(np.exp(logits).sum(1)) - logits[np.arange(len(labels)), labels]
    np.testing.assert_allclose(evaluated["val"]["loss"], losses.mean(), rtol=2e-3)


def decoded(folder):
    """The middles of all images, and their labels, without the reader."""
    classes = sorted(path.name for path in folder.iterdir())
    images, labels = [], []
    for label, name in enumerate(classes):
        for path in sorted((folder / name).iterdir()):
            with Image.open(path) as image:
                box = (1, 1, 15, 15)
                images.append(np.asarray(image.resize((16, 16), Image.BILINEAR, box)))
            labels.append(label)
    return np.array(images), np.array(labels)


def test_no_run_is_saved_over_another(imagenet, data, stopped, tmp_path):
    saved = ["--checkpoint-dir", str(stopped[0])]
    with pytest.raises(SystemExit, match="15 of 34 steps done. Resume .* or rename"):
        train(imagenet, data, *RUN, "34", *saved)
    with pytest.raises(FileNotFoundError):
        train(imagenet, data, *RUN, "34", "--resume", str(tmp_path / "typo"))


# ---- Several devices -----------------------------------------------------------------
EXACT = ["--opt-level", "O0", "--steps", "4", "--lr", "1"]


@pytest.fixture(scope="module")
def two_devices(data, tmp_path_factory):
    """What two devices made of batches of 2 x 16, and the checkpoint of one run."""
    folder = tmp_path_factory.mktemp("two")
    flags = "--xla_force_host_platform_device_count=2"
    stdout = run("tests.test_imagenet", str(data), str(folder), XLA_FLAGS=flags)
    return json.loads(stdout.splitlines()[-1]) | {"folder": folder}


def test_sync_bn_makes_of_two_devices_one(imagenet, data, two_devices):
    one, sync = train(imagenet, data, *EXACT, "-b", "32"), two_devices["sync"]
    np.testing.assert_allclose(sync["loss"], one["loss"], rtol=1e-4)
    np.testing.assert_array_equal(sync["prec1"], one["prec1"])
    np.testing.assert_allclose(sync["val"], one["val"]["loss"], rtol=1e-3)
    # Without it, each normalizes by its own images: much the same, and not the same.
    first = two_devices["local"]["loss"][0]
    assert 1e-3 < abs(first / one["loss"][0] - 1) < 0.2


def test_one_device_reads_what_two_saved(imagenet, data, two_devices):
    resume = ["--resume", str(two_devices["folder"]), "-b", "32", "--evaluate"]
    (loss,) = train(imagenet, data, *EXACT, *resume)["val"]["loss"]
    np.testing.assert_allclose(loss, two_devices["sync"]["val"][-1], rtol=1e-5)


def main(data, folder):
    imagenet, out = load_imagenet(), {}
    saved = ["--sync-bn", "--checkpoint-dir", folder]
    for name, flags in {"sync": saved, "local": []}.items():
        result = train(imagenet, data, *EXACT, "-b", "16", *flags)
        out[name] = {column: result[column].tolist() for column in ("loss", "prec1")}
        out[name]["val"] = result["val"]["loss"].tolist()
    print(json.dumps(out))


if __name__ == "__main__":
    main(*sys.argv[1:])
