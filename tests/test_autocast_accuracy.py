"""Losses, norms and softmaxes after a product: as accurate as in float32."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jamp
from tests.programs import evaluate, results

HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
RNG = np.random.default_rng(0)
ROWS, FEATURES, CLASSES = 64, 16, 12
X = RNG.normal(size=(ROWS, FEATURES)).astype(np.float32)
W = RNG.normal(size=(FEATURES, CLASSES)).astype(np.float32) * 2
LABELS = RNG.integers(0, CLASSES, ROWS)
ONE_HOT = np.eye(CLASSES, dtype=np.float32)[LABELS]


# Each is written once, for a namespace: NumPy in float64, and JAX.


def softmax(np, z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(np, z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def cross_entropy(np, z):
    shifted = z - z.max(-1, keepdims=True)
    return (np.log(np.exp(shifted).sum(-1)) - (shifted * ONE_HOT).sum(-1)).mean()


def without_safeguard(np, z):
    z = z / 4
    return -(ONE_HOT * (z - np.log(np.exp(z).sum(-1, keepdims=True)))).sum(-1).mean()


LOSSES = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "cross_entropy": cross_entropy,
    "without_safeguard": without_safeguard,
    "temperature": lambda np, z: cross_entropy(np, z / 0.7 + 0.25),
    "poisson": lambda np, z: (np.exp(z / 4) - ONE_HOT * z / 4).mean(),
    "squares": lambda np, z: ((z - ONE_HOT) ** 2).mean(),
}


def error(got, exact):
    return np.linalg.norm(np.asarray(got, np.float64) - exact)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_after_a_product_all_is_in_float32(loss):
    def as_is(z):
        return loss(jnp, z)

    def fn(w, x):
        losses = as_is, lambda z: as_is(z.astype(jnp.float32)), jax.jit(as_is)
        return [loss(x @ w) for loss in losses]

    def by_hand(half):
        """The exact product, rounded once: what a product in half gives at best."""
        logits = X.astype(half).astype(float) @ W.astype(half).astype(float)
        return as_is(logits.astype(half).astype(np.float32))

    exact = loss(np, X.astype(np.float64) @ W.astype(np.float64))
    got, at_best = evaluate(
        lambda w, x: (
            {half: jamp.autocast(fn, half)(w, x) for half in HALVES},
            {half: by_hand(dtype) for half, dtype in HALVES.items()},
        ),
        W,
        X,
    )
    for half in HALVES:
        for value in got[half]:
            assert error(value, exact) <= 2 * error(at_best[half], exact), half


# Of a batch that is classified right: each probability is about 0.997.
SURE = 8 * np.eye(CLASSES, dtype=np.float32) + W[:CLASSES] / 32
OF_LABEL = {
    "optax": optax.softmax_cross_entropy_with_integer_labels,
    "gather": lambda z, labels: jax.nn.logsumexp(z, -1) - z[jnp.arange(len(z)), labels],
}


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("loss", OF_LABEL.values(), ids=OF_LABEL)
def test_gradients_of_labels_that_are_nearly_certain(loss, half):
    """Found by training: the label's -1 and the softmax's 0.997 met in half."""
    labels, dtype = np.arange(3 * CLASSES) % CLASSES, HALVES[half]
    one_hot = np.eye(CLASSES)[labels]

    def gradients(w, round_off):
        z = round_off(one_hot @ round_off(w))
        cotangent = round_off((softmax(np, z) - one_hot) / len(labels))
        return round_off(one_hot.T @ cotangent), cotangent.sum(0)

    exact = gradients(SURE.astype(np.float64), lambda x: x)
    at_best = gradients(SURE, lambda x: x.astype(dtype).astype(np.float64))

    def fn(w, b):
        return loss(jnp.asarray(one_hot, jnp.float32) @ w + b, labels).mean()

    zero = jnp.zeros(CLASSES)
    got = jax.jit(jax.grad(jamp.autocast(fn, half), (0, 1)))(jnp.asarray(SURE), zero)
    for of_got, of_best, of_exact in zip(got, at_best, exact, strict=True):
        assert error(of_got, of_exact) <= 2 * error(of_best, of_exact)


# ---- norms of activations around 300, whose squares overflow float16

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


def l2_norm(np, y):
    return y / np.sqrt((y * y).sum(-1, keepdims=True))


def batch_norm(np, y):
    return (y - y.mean(0)) / np.sqrt(y.var(0) + 1e-5)


def applied(module):
    """The output of a module at its initial weights, and its other variables."""
    variables = module.init(jax.random.key(0), jnp.ones((32, 32)))
    return lambda y: module.apply(variables, y, mutable=["batch_stats"])


BATCH_NORM = nn.BatchNorm(use_running_average=False, momentum=0.0)
NORMS = {
    "rms_norm": (rms_norm, lambda y: rms_norm(jnp, y)),
    "layer_norm": (layer_norm, lambda y: layer_norm(jnp, y)),
    "layer_norm_in_one_pass": (layer_norm, lambda y: layer_norm_in_one_pass(jnp, y)),
    "batch_norm": (batch_norm, lambda y: batch_norm(jnp, y)),
    "l2_norm": (l2_norm, lambda y: l2_norm(jnp, y)),
    "nn.LayerNorm": (layer_norm, lambda y: applied(nn.LayerNorm())(y)[0]),
    "nn.RMSNorm": (rms_norm, lambda y: applied(nn.RMSNorm())(y)[0]),
    "nn.BatchNorm": (batch_norm, lambda y: applied(BATCH_NORM)(y)[0]),
    "standardize": (layer_norm, lambda y: jax.nn.standardize(y, epsilon=1e-6)),
}


@pytest.mark.parametrize("name", NORMS)
def test_norms_of_large_activations(name):
    formula, norm = NORMS[name]
    exact = formula(np, IMAGES.astype(float) @ MIX.astype(float))
    assert np.abs(IMAGES @ MIX).max() > 256  # so that squares overflow

    def fn(mix, x):
        return norm(x @ mix)

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


# ---- feeders


@pytest.mark.parametrize(
    ("fn", "names"),
    [
        (lambda y: jnp.exp(y - y.max()), ["sub"]),
        (lambda y: jnp.exp(-(y * 0.5 + 1.0)), ["neg", "mul", "add"]),
        (lambda y: jnp.square(y - y.mean()).sum(), ["sub"]),
        (lambda y: (y * y).sum(), ["mul"]),
        (lambda y: jnp.exp((y - 1.0).reshape(-1)[:3]), ["sub"]),
        (lambda y: jnp.log(jnp.abs(y) + 1.0) + jnp.exp(y - 1.0), ["add", "sub", "abs"]),
    ],
    ids=["max", "chain", "mean", "square", "moves", "log"],
)
def test_what_feeds_float32_runs_in_float32(fn, names):
    found = results(jamp.autocast(lambda w, x: fn(x @ w)), names, W, X)
    assert found and set(found) == {"float32"}


def test_what_feeds_an_exponential_and_a_product_is_rounded_for_the_product_alone():
    def fn(w, x):
        y = (x @ w) - 1.0
        return jnp.exp(y).sum() + (y @ w.T).sum()

    assert results(jamp.autocast(fn), ["sub"], W, X) == ["float32"]


def test_what_joins_two_products_is_half_unless_all_that_read_it_are_float32():
    def fn(w, x):
        y = (x @ w) + (2 * x @ w)
        return jnp.exp(y).sum() + (y @ w.T).sum()

    assert results(jamp.autocast(fn), ["add"], W, X)[0] == "float16"
    only_exp = jamp.autocast(lambda w, x: jnp.exp((x @ w) + (2 * x @ w)))
    assert results(only_exp, ["add"], W, X) == ["float32"]
