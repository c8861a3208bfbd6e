"""`scaled_grad` inside of a scaled loss: MAML, against its gradient in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp

RATE = 0.125
W, X = np.float32([0.5, -0.25, 1.0]), np.float32([0.5, 1.0, 0.25])
ACCURACY = {"O0": 1e-6, "O1": 2e-3, "O2": 2e-3, "O4": 2e-2, "O5": 2e-2}
SGD = optax.sgd(RATE)


def make(level, scale=None):
    options = {"loss_scale": scale, "verbosity": 0}
    return jamp.initialize({"w": jnp.asarray(W)}, SGD, level, **options)


def error(params, size=1.0):
    return size * ((params["w"].astype(jnp.float32) * X).sum() - 1) ** 2


INNER = ("by hand", "by a step")


def outer(params, state, how, size=1.0):
    """The error after a step."""
    at = state.replace(params=params)
    grads = jamp.scaled_grad(functools.partial(error, size=size))(at)
    if how == "by a step":
        return error(at.apply_gradients(grads=grads).params)
    fast = params["w"].astype(jnp.float32) - RATE * grads.unscale()[0]["w"]
    return error({"w": fast.astype(params["w"].dtype)})


def exact(size=1.0):
    """The gradient of the error after one step of gradient descent, in float64."""
    w, x = W.astype(np.float64), X.astype(np.float64)
    fast = w - RATE * size * 2 * (w @ x - 1) * x
    hessian = size * 2 * np.outer(x, x)
    return (np.eye(3) - RATE * hessian) @ (2 * (fast @ x - 1) * x)


@pytest.mark.parametrize("how", INNER)
@pytest.mark.parametrize("level", ACCURACY)
def test_the_second_derivative_is_right_at_every_level(level, how):
    state = make(level, None if level in ("O0", "O4", "O5") else 1024.0)
    loss, grads = jamp.scaled_value_and_grad(outer)(state, state, how)
    np.testing.assert_allclose(
        grads.unscale()[0]["w"], exact(), rtol=ACCURACY[level], atol=ACCURACY[level]
    )
    assert grads.finite and loss > 0


@pytest.mark.parametrize("how", INNER)
def test_an_overflow_inside_skips_the_step_around_until_both_fit(how):
    state, size = make("O2"), 8.0  # whose inner gradient is inf at scales above 2^13

    @jax.jit
    def step(state):
        grads = jamp.scaled_grad(outer)(state, state, how, size)
        return state.apply_gradients(grads=grads), grads.unscale()[0]["w"]

    for _ in range(8):
        before = state
        state, grads = step(state)
        if state.step:
            break
        assert np.isnan(grads).any() or np.isinf(grads).any()
        assert state.loss_scale == before.loss_scale / 2
    assert state.step == 1 and 2 <= state.skipped_steps < 8
    np.testing.assert_allclose(grads, exact(size), rtol=1e-2, atol=1e-2)
    # Outside of a loss they stay as they are.
    grads = jamp.scaled_grad(functools.partial(error, size=size))(make("O2"))
    assert np.isinf(grads.tree["w"]).any() and not np.isnan(grads.tree["w"]).any()
