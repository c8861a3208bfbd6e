"""DP-SGD: gradients with an axis of examples in front, where the optimizer wants it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp

pytestmark = pytest.mark.standard_promotion  # for optax

CLIP, RATE = 0.5, 0.25
START = {"w": np.float32([[0.5], [-0.25]]), "b": np.float32([0.125])}
X = np.float32([[1.0, 0.5], [-0.5, 1.0], [0.25, -1.0], [1.0, 1.0]])
Y = np.float32([[1.0], [0.5], [-1.0], [0.0]])


def private(noise=0.0):
    return optax.contrib.differentially_private_aggregate(CLIP, noise, key=0)


def begin(level, tx, **kwargs):
    options = {"loss_scale": jamp.DynamicLossScale(2.0**8), "verbosity": 0} | kwargs
    return jamp.initialize(START, tx, level, **options)


def loss_fn(params, x, y):
    error = x @ params["w"] + params["b"] - y
    return (error.astype(jnp.float32) ** 2).sum()


def each_of(state, x, y):
    return jax.vmap(jamp.scaled_grad(loss_fn), (None, 0, 0))(state, x, y)


def step(state, x, y):
    return state.apply_gradients(grads=each_of(state, x, y))


def expected():
    error = 2 * (X.astype(np.float64) @ START["w"] + START["b"] - Y)
    w, b = error[:, :, None] * X[:, :, None], error
    norms = np.sqrt((w**2).sum((1, 2)) + (b**2).sum(1))
    shares = np.minimum(1, CLIP / norms)
    return {
        "w": START["w"] - RATE * np.mean(w * shares[:, None, None], 0),
        "b": START["b"] - RATE * np.mean(b * shares[:, None], 0),
    }


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_each_example_is_clipped(level):
    state = begin(level, optax.chain(private(), optax.sgd(RATE)))
    after = jax.jit(step)(state, X, Y)
    assert after.step == 1
    for key, value in jamp.master_params(after).items():
        np.testing.assert_allclose(value, expected()[key], atol=2e-3)
    bad = jax.jit(step)(state, X * np.float32([[1], [1], [1e30], [1]]), Y)
    assert (bad.step, bad.skipped_steps) == (0, 1)


TXS = {
    "sgd": optax.sgd(RATE),
    "fused": jamp.optimizers.fused_adam(RATE),
    "lbfgs": optax.lbfgs(),
}


@pytest.mark.parametrize("name", TXS)
def test_an_axis_that_nothing_takes_away_is_an_error(name):
    state = begin("O2", TXS[name])
    with pytest.raises(ValueError, match=r"gradients\['b'\] has shape \(4, 1\), expec"):
        step(state, X, Y)
