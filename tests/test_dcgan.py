"""examples/dcgan.py: what it prints and draws, and what a skip leaves alone."""

import re

import jax
import numpy as np
import pytest

from tests.bits import assert_same_bits, copy
from tests.scripts import (
    NEEDS_EXTRA,
    load,
    png_size,
    rows,
    run_script,
    standard_promotion,
)

pytestmark = NEEDS_EXTRA


def test_dcgan_takes_apex_flags_and_makes_a_picture(tmp_path):
    flags = ["--opt_level", "O2", "--steps", "2", "--batchSize", "16", "--nz", "8"]
    flags += ["--lr", "1e-4", "--beta1", "0.9", "--manualSeed", "1", "--outf", "out"]
    stdout, stderr = run_script("dcgan.py", tmp_path, *flags)
    assert re.search(r"^opt_level *: O2$", stdout, re.MULTILINE)
    assert "2/2" in stderr
    table = rows(stdout)
    assert list(table) == ["D real", "D fake", "G"]
    for loss, overflows, scale, _ in table.values():
        assert 0 < float(loss) < 2  # two classes, untrained: about log(2) = 0.7
        assert float(scale) == 2.0**16 / 2 ** int(overflows)
    assert [cells[-1][-4:] for cells in table.values()] == ["of D", "of D", "of G"]
    assert png_size(tmp_path / "out" / "dcgan.png") == (1000, 800)


@pytest.fixture(scope="module")
def gan(tmp_path_factory):
    """dcgan.py with models that compile fast, and a run of four steps."""
    dcgan = load("dcgan")
    dcgan.NGF = dcgan.NDF = 4
    folder = str(tmp_path_factory.mktemp("gan"))
    with standard_promotion():
        return dcgan, dcgan.main(["--steps", "4", "--nz", "8", "--outf", folder])


def with_scale(state, loss_id, scale):
    scales = list(state.loss_scales)
    scales[loss_id] = scales[loss_id]._replace(scale=jax.numpy.float32(scale))
    return state.replace(loss_scales=tuple(scales))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("loss_id", [0, 1, 2])
def test_one_model_of_the_gan_steps_while_the_other_skips(gan, loss_id):
    dcgan, run = gan
    rng = np.random.default_rng(0)
    images = rng.uniform(-1, 1, (64, 8, 8, 1)).astype(np.float32)
    noise = rng.standard_normal((64, 8), np.float32)
    state = run["state"]
    for i in range(3):
        state = with_scale(state, i, 2.0**24 if i == loss_id else 2.0**8)
    before = copy(state)
    after, metrics = dcgan.train_step(
        jax.tree.map(jax.numpy.array, state), images, noise
    )
    skips = "G" if loss_id == 2 else "D"
    for model in ("D", "G"):
        parts = [
            [getattr(s, name)[model] for name in ("params", "opt_state", "batch_stats")]
            for s in (before, after)
        ]
        skipped = after.skipped_steps[model] - before.skipped_steps[model]
        assert after.last_step_skipped[model] == (model == skips) == skipped
        if model == skips:
            assert_same_bits(*parts)
        else:
            for old, new in zip(*map(jax.tree.leaves, parts), strict=True):
                assert (old != new).any()
    for i in range(3):
        assert metrics["overflow"][i] == (i == loss_id)
        clean = before.loss_scales[i].unskipped + 1
        assert after.loss_scales[i].unskipped == (0 if i == loss_id else clean)
        assert after.loss_scales[i].scale == (2.0**23 if i == loss_id else 2.0**8)
