"""Test that norms and a softmax are as accurate as in float32."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jamp
from tests.support.programs import evaluate

pytestmark = pytest.mark.slow

HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
RNG = np.random.default_rng(0)
FEATURES, CLASSES = 16, 12


def softmax(np, z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def error(got, exact):
    return np.linalg.norm(np.asarray(got, np.float64) - exact)


def test_a_softmax_gradient_cancels_a_constant_along_a_row():
    """If rounded probabilities do not sum to 1, `64 * (1 - sum)` remains."""
    scores = RNG.integers(-2, 3, (CLASSES, CLASSES)).astype(np.float64)
    values = 64 + RNG.integers(-1, 2, (CLASSES, 1)) / 2  # exact in bfloat16

    def fn(w):
        return (jax.nn.softmax(jnp.eye(CLASSES) @ w) @ jnp.float32(values)).sum()

    p, g = softmax(np, scores), values.T
    exact = p * (g - (p * g).sum(-1, keepdims=True))
    got = jax.jit(jax.grad(jamp.autocast(fn, "bfloat16")))(jnp.float32(scores))
    assert error(np.asarray(got, float), exact) < 0.02


# Norms of activations around 300, whose squares overflow float16.
IMAGES = RNG.normal(size=(32, FEATURES)).astype(np.float32)
MIX = RNG.normal(size=(FEATURES, 32)).astype(np.float32) * 75  # products around 300


def layer_norm(np, y):
    mean = y.mean(-1, keepdims=True)
    return (y - mean) / np.sqrt(((y - mean) ** 2).mean(-1, keepdims=True) + 1e-6)


def layer_norm_in_one_pass(np, y):
    mean, square = y.mean(-1, keepdims=True), (y * y).mean(-1, keepdims=True)
    return (y - mean) / np.sqrt(square - mean * mean + 1e-6)


def rms_norm(np, y):
    return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)


def batch_norm(np, y):
    return (y - y.mean(0)) / np.sqrt(y.var(0) + 1e-5)


@pytest.mark.parametrize(
    "norm", [rms_norm, layer_norm, layer_norm_in_one_pass, batch_norm]
)
def test_norms_of_large_activations(norm):
    exact = norm(np, IMAGES.astype(float) @ MIX.astype(float))
    assert np.abs(IMAGES @ MIX).max() > 256  # so that squares overflow

    def fn(mix, x):
        return norm(jnp, x @ mix)

    def value_and_grad(fn, mix, x):
        def loss(mix):
            y = fn(mix, x)
            return (y.ravel() * jnp.cos(jnp.arange(1024.0))).sum(), y

        grads, value = jax.grad(loss, has_aux=True)(mix)
        return value, grads

    fns = {half: jamp.autocast(fn, half) for half in HALVES} | {"float32": fn}
    found = evaluate(
        lambda mix, x: {name: value_and_grad(f, mix, x) for name, f in fns.items()},
        MIX,
        IMAGES,
    )
    _, expected = found.pop("float32")
    for half, (got, grads) in found.items():
        eps = float(jnp.finfo(half).eps)
        assert np.isfinite(got).all() and grads.dtype == jnp.float32
        assert error(got, exact) <= 2 * eps * np.linalg.norm(exact)
        assert error(grads, expected) <= 16 * eps * np.linalg.norm(expected)


@pytest.mark.parametrize("half", HALVES)
def test_a_call_reads_the_digits_that_its_caller_does(half):
    """A norm and a matmul read a value. JAX jits `var`, but not `mean`."""

    def norms(np, y):
        spread = np.exp(np.arange(32.0) / 8)  # so that the second norm changes it
        normal = batch_norm(np, y) * spread
        mean, var = normal.mean(-1, keepdims=True), normal.var(-1, keepdims=True)
        return (normal - mean) / np.sqrt(var + 1e-5), normal

    def fn(mix, x):
        y, normal = norms(jnp, x @ mix)
        return y, normal @ mix.T

    got, _ = evaluate(jamp.autocast(fn, half), MIX, IMAGES)
    x, mix = (a.astype(HALVES[half]).astype(float) for a in (IMAGES, MIX))
    exact, _ = norms(np, (x @ mix).astype(HALVES[half]).astype(float))
    assert error(got, exact) <= 1e-5 * np.linalg.norm(exact)
