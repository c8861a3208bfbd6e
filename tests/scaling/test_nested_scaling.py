"""Derivatives of derivatives, against float64: WGAN-GP's penalty, and MAML."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.states import with_scales

# Relative to the largest element: half's rounding is 2^-12 and 2^-9, several in a row.
ACCURACY = {"O1": 2.0**-8, "O2": 2.0**-8, "O5": 2.0**-5}
BATCH, INPUTS, HIDDEN, WEIGHT = 8, 6, 16, 10.0

# One number per sample; smooth, so that no second derivative is zero.
CRITIC = nn.Sequential([nn.Dense(HIDDEN), nn.tanh, nn.Dense(1)])


def draw():
    rng = np.random.default_rng(0)
    kernel, bias = rng.normal(size=(INPUTS, HIDDEN)) / 2, rng.normal(size=HIDDEN) / 8
    last = {"kernel": rng.normal(size=(HIDDEN, 1)) / 4, "bias": np.zeros(1)}
    params = {"layers_0": {"kernel": kernel, "bias": bias}, "layers_2": last}
    real, fake = rng.normal(size=(2, BATCH, INPUTS)) + [[[0.0]], [[1.0]]]
    share = rng.random((BATCH, 1))
    data = {"real": real, "fake": fake, "mixed": share * real + (1 - share) * fake}
    return jax.tree.map(np.float32, (params, data))


PARAMS, DATA = draw()


def critic_loss(critic, slopes, data):
    """And the slopes, as aux."""
    penalty = ((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2).mean()
    apart = critic(data["fake"]).mean() - critic(data["real"]).mean()
    return apart + WEIGHT * penalty, slopes


@jax.jit
def value_and_grad(state, data):
    """((loss, slopes), grads)"""

    def loss_fn(params):
        def critic(x):
            return CRITIC.apply({"params": params}, x)[:, 0]

        def scaled_mean(x):
            return jamp.scale_loss(critic(x).mean(), state)

        # By the recipe of the page: in float32.
        slopes = jamp.unscale(jax.grad(scaled_mean)(data["mixed"]), state) * BATCH
        return critic_loss(critic, slopes, data)

    return jamp.scaled_value_and_grad(loss_fn, has_aux=True)(state)


def oracle(params, data):
    """The same in float64, by JAX alone."""

    def loss_fn(params):
        def critic(x):
            first, last = params["layers_0"], params["layers_2"]
            hidden = jnp.tanh(x @ first["kernel"] + first["bias"])
            return (hidden @ last["kernel"] + last["bias"])[:, 0]

        slopes = jax.grad(lambda x: critic(x).sum())(data["mixed"])
        return critic_loss(critic, slopes, data)

    with jax.enable_x64(True):
        params, data = jax.tree.map(jnp.float64, (params, data))
        found = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return jax.tree.map(np.asarray, found)


def assert_near(got, expected, accuracy):
    """In units of the largest element, as half's errors come."""
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, g), e in pairs:
        assert e.dtype == np.float64
        largest = max(np.abs(e).max(), 1e-30)
        error = np.abs(np.asarray(g, np.float64) - e).max() / largest
        assert error <= accuracy, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("level", ACCURACY)
def test_value_and_gradients_match_float64(level):
    state = jamp.initialize(PARAMS, optax.sgd(0.5), level, verbosity=0)
    state = with_scales(state, 2.0**8) if level in ("O1", "O2") else state
    (loss, slopes), grads = value_and_grad(state, DATA)
    (expected_loss, expected_slopes), expected_grads = oracle(PARAMS, DATA)
    assert (loss.dtype, slopes.dtype) == (jnp.float32, jnp.float32)
    np.testing.assert_allclose(loss, expected_loss, rtol=ACCURACY[level])
    assert_near((slopes, grads), (expected_slopes, expected_grads), ACCURACY[level])


# `scaled_grad` inside of a scaled loss: MAML

RATE = 0.125
W, X = np.float32([0.5, -0.25, 1.0]), np.float32([0.5, 1.0, 0.25])
TOLERANCE = {"O0": 1e-6, "O2": 2e-3, "O4": 2e-2}
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
    fast = params["w"].astype(jnp.float32) - RATE * grads["w"]
    return error({"w": fast.astype(params["w"].dtype)})


def exact(size=1.0):
    """The gradient of the error after one step of gradient descent, in float64."""
    w, x = W.astype(np.float64), X.astype(np.float64)
    fast = w - RATE * size * 2 * (w @ x - 1) * x
    hessian = size * 2 * np.outer(x, x)
    return (np.eye(3) - RATE * hessian) @ (2 * (fast @ x - 1) * x)


@pytest.mark.parametrize("how", INNER)
@pytest.mark.parametrize("level", TOLERANCE)
def test_the_second_derivative_is_right_at_every_level(level, how):
    state = make(level, 1024.0 if level == "O2" else None)
    loss, grads = jamp.scaled_value_and_grad(outer)(state, state, how)
    np.testing.assert_allclose(grads["w"], exact(), TOLERANCE[level], TOLERANCE[level])
    assert loss > 0


@pytest.mark.parametrize("how", INNER)
def test_an_overflow_inside_skips_the_step_around_until_both_fit(how):
    state, size = make("O2"), 8.0  # whose inner gradient is inf at scales above 2^13

    @jax.jit
    def step(state):
        grads = jamp.scaled_grad(outer)(state, state, how, size)
        return state.apply_gradients(grads=grads), grads["w"]

    for _ in range(8):
        before = state
        state, grads = step(state)
        if state.step:
            break
        assert np.isnan(grads).all()
        assert state.loss_scale == before.loss_scale / 2
    assert state.step == 1 and 2 <= state.skipped_steps < 8
    np.testing.assert_allclose(grads, exact(size), rtol=1e-2, atol=1e-2)
