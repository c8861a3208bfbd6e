"""float8 leaves and PRNG keys among the params: stepped, and saved."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jamp
from tests.support.bits import assert_same_bits

LEVELS = ["O0", "O2", "O5"]
KINDS = [jnp.float8_e4m3fn, jnp.float8_e5m2]
VALUES = np.linspace(-3, 3, 301)


def begin(dtype, level, tx):
    tree = {"scale": jnp.asarray(VALUES, dtype), "w": jnp.ones(3)}
    allowed = {"allow_incoming_model_not_fp32": True, "loss_scale": 1}
    return jamp.initialize(tree, tx, level, verbosity=0, **allowed)


def loss_fn(params, x):
    return (params["scale"].astype(jnp.float32) * x).sum() + params["w"].sum()


def step(state, x):
    grads = jamp.scaled_grad(loss_fn)(state, x)
    assert grads["scale"].dtype == jnp.float32
    return state.apply_gradients(grads=grads)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", KINDS)
def test_a_float8_leaf_is_stepped_in_float32(dtype, level):
    state = begin(dtype, level, optax.sgd(0.3))
    x = jnp.asarray(np.cos(VALUES), jnp.float32)
    after = step(state, x)
    grad = np.asarray(x).astype(dtype).astype(np.float64)  # rounded by the derivative
    before = np.asarray(state.params["scale"]).astype(np.float64)
    exact = np.float32(before - np.float32(0.3) * grad).astype(dtype)
    np.testing.assert_array_equal(np.asarray(after.params["scale"]), exact)
    assert_same_bits(jax.jit(step)(state, x).params, after.params)


def test_what_float8_cannot_hold_is_its_largest():
    state = begin(KINDS[0], "O0", optax.sgd(1e4))
    after = step(state, jnp.ones(VALUES.size)).params["scale"]
    assert (
        np.asarray(after, np.float32) == -float(ml_dtypes.finfo(KINDS[0]).max)
    ).all()
