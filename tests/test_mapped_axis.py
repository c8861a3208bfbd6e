"""`axis_name` beside other axes and with NNX models.

`test_many_devices.py` has the means, their flags and what is refused.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests import subprocesses


@functools.cache
def reports():
    return subprocesses.on_devices(8, "tests.mapped")


check_vma = pytest.mark.parametrize("check_vma", [True, False])


@check_vma
def test_devices_with_other_parts_of_the_params_skip_as_well(check_vma):
    clean, broken = reports()[f"two axes/{check_vma}"]
    # Half a step along the mean of two rows: 1 - 0.5 * [0.5, 1.5, 2.5, 3.5].
    assert clean == [[0.75, 0.25, -0.25, -0.75], [[0] * 4] * 2]
    assert broken == [[1.0] * 4, [[1] * 4] * 2]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("wrap", ["replicated", "FSDP", "shard_map"])
def test_nnx_steps_on_eight_devices_as_on_one(wrap, level):
    """Losses, skips, statistics of BatchNorm and params; the second batch is inf."""
    one = reports()[f"nnx/{level}/one device"]
    many = reports()[f"nnx/{level}/{wrap}"]
    assert (one["skips"], one["scale"]) == (many["skips"], many["scale"]) == (1, 2.0**7)
    np.testing.assert_array_equal(np.isfinite(one["losses"]), [True, False, True])
    np.testing.assert_allclose(many["losses"], one["losses"], rtol=1e-5)
    tolerance = {"O0": 1e-5, "O5": 2e-3}.get(level, 1e-3)
    for a, b in zip(many["arrays"], one["arrays"], strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


def loss_fn(params, x):
    return (params["w"] * x).sum()


def test_predivide_under_vmap_gives_the_mean():
    params = {"w": np.ones(2, np.float32)}
    state = jamp.initialize(params, optax.sgd(0.1), "O0", verbosity=0)
    grads = jamp.scaled_grad(loss_fn, axis_name="i", predivide=3.0)
    f = jax.vmap(lambda x: grads(state, x).unscale()[0]["w"], axis_name="i")
    np.testing.assert_allclose(f(jnp.arange(4.0)), np.full((4, 2), 1.5), rtol=1e-6)
