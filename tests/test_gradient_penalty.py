"""Derivatives of derivatives: WGAN-GP's penalty on the slope of a critic.

The inner gradient is taken by jax.grad in the loss, so it is scaled and unscaled by
hand, as docs/gradient_penalty.md has it. Oracle: the gradient in float64, by hand.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.states import with_scales

LEVELS = ("O0", "O1", "O2", "O4", "O5")
SCALED = ("O1", "O2")  # those in float16
# Relative to the largest element: half's rounding is 2^-12 and 2^-9, several in a row.
ACCURACY = {"O0": 2.0**-19, "O1": 2.0**-8, "O2": 2.0**-8, "O4": 2**-5, "O5": 2**-5}
BATCH, INPUTS, HIDDEN, WEIGHT = 8, 6, 16, 10.0
SGD = optax.sgd(0.5)  # the same object each time, or jit would trace again


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
# Its slopes, divided by the batch, are less than half of float16's smallest number.
FLAT = jax.tree.map(lambda x: x * np.float32(2.0**-11), PARAMS)


def slopes_of(critic, x, state):
    """By the recipe of the page: in float32."""

    def scaled_mean(x):
        return jamp.scale_loss(critic(x).mean(), state)

    return jamp.unscale(jax.grad(scaled_mean)(x), state) * len(x)


@jax.jit
def value_and_grad(state, data):
    """((loss, slopes), grads)"""

    def loss_fn(params):
        def critic(x):
            return CRITIC.apply({"params": params}, x)[:, 0]

        slopes = slopes_of(critic, data["mixed"], state)
        penalty = ((jnp.linalg.norm(slopes, axis=-1) - 1) ** 2).mean()
        apart = critic(data["fake"]).mean() - critic(data["real"]).mean()
        return apart + WEIGHT * penalty, slopes

    return jamp.scaled_value_and_grad(loss_fn, has_aux=True)(state)


def make(level, params=PARAMS, scale=2.0**8):
    state = jamp.initialize(params, SGD, level, verbosity=0)
    return with_scales(state, scale) if level in SCALED else state


# The oracle


def oracle(params, data):
    """(loss, gradients, slopes) of `value_and_grad`, in float64, by the chain rule."""
    wide = functools.partial(np.asarray, dtype=np.float64)
    params, data = jax.tree.map(wide, (params, data))
    first, second = params["layers_0"], params["layers_2"]
    v = second["kernel"][:, 0]

    hidden = np.tanh(data["mixed"] @ first["kernel"] + first["bias"])
    bend = 1 - hidden**2
    slopes = (bend * v) @ first["kernel"].T
    norms = np.sqrt((slopes**2).sum(-1, keepdims=True))
    loss = WEIGHT * ((norms - 1) ** 2).mean()

    back = WEIGHT * 2 * (norms - 1) / BATCH * slopes / norms  # d loss / d slopes
    across = back @ first["kernel"]
    d_z = across * v * (-2 * hidden * bend)
    d_kernel = back.T @ (bend * v) + data["mixed"].T @ d_z
    d_bias, d_v = d_z.sum(0), (across * bend).sum(0)
    for x, sign in ((data["fake"], 1), (data["real"], -1)):
        hidden = np.tanh(x @ first["kernel"] + first["bias"])
        loss += sign * (hidden @ v + second["bias"]).mean()
        d_z = sign * v * (1 - hidden**2) / BATCH
        d_kernel += x.T @ d_z
        d_bias += d_z.sum(0)
        d_v += sign * hidden.mean(0)
    grads = {
        "layers_0": {"kernel": d_kernel, "bias": d_bias},
        "layers_2": {"kernel": d_v[:, None], "bias": np.zeros(1)},
    }
    return loss, grads, slopes


def assert_near(got, expected, accuracy):
    """In units of the largest element, as half's errors come."""
    pairs = zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True)
    for (path, g), e in pairs:
        largest = max(np.abs(e).max(), 1e-30)
        error = np.abs(np.asarray(g, np.float64) - e).max() / largest
        assert error <= accuracy, (jax.tree_util.keystr(path), error)


@pytest.mark.parametrize("level", LEVELS)
def test_value_and_gradients_match_float64(level):
    for params, scale in ((PARAMS, 2.0**8), (FLAT, 2.0**14)):
        (loss, slopes), grads = value_and_grad(make(level, params, scale), DATA)
        tree, finite = grads.unscale()
        expected_loss, expected_grads, expected_slopes = oracle(params, DATA)
        assert finite
        assert (loss.dtype, slopes.dtype) == (jnp.float32, jnp.float32)
        np.testing.assert_allclose(loss, expected_loss, rtol=ACCURACY[level])
        assert_near(slopes, expected_slopes, ACCURACY[level])
        for layer in tree:
            if params is PARAMS:
                assert_near(tree[layer], expected_grads[layer], ACCURACY[level])
            elif level in SCALED:  # of the biases, almost all cancels
                kernels = (x[layer]["kernel"] for x in (tree, expected_grads))
                assert_near(*kernels, ACCURACY[level])
