"""Losses, norms and softmaxes after a product: as accurate as in float32."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jamp
from tests.programs import evaluate, walk

HALVES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
RNG = np.random.default_rng(0)
ROWS, FEATURES, CLASSES = 64, 16, 12
X = RNG.normal(size=(ROWS, FEATURES)).astype(np.float32)
W = RNG.normal(size=(FEATURES, CLASSES)).astype(np.float32) * 2
LABELS = RNG.integers(0, CLASSES, ROWS)
ONE_HOT = np.eye(CLASSES, dtype=np.float32)[LABELS]


# Each is written once, for a namespace: NumPy in float64, and JAX.


def cross_entropy(np, z):
    shifted = z - z.max(-1, keepdims=True)
    return (np.log(np.exp(shifted).sum(-1)) - (shifted * ONE_HOT).sum(-1)).mean()


def cross_entropy_without_safeguard(np, z):
    z = z / 4
    return -(ONE_HOT * (z - np.log(np.exp(z).sum(-1, keepdims=True)))).sum(-1).mean()


def softmax(np, z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def log_softmax(np, z):
    z = z - z.max(-1, keepdims=True)
    return z - np.log(np.exp(z).sum(-1, keepdims=True))


def focal(np, z):
    p = (softmax(np, z) * ONE_HOT).sum(-1)
    return (-((1 - p) ** 2) * np.log(p + 1e-6)).mean()


def gaussian_log_likelihood(np, z):
    mean, log_std = z[:, :6], z[:, 6:] / 8
    error = (ONE_HOT[:, :6] - mean) / np.exp(log_std)
    return (-0.5 * error**2 - log_std - 0.5 * np.log(2 * np.pi)).sum(-1).mean()


def binary_log_likelihood(np, z):
    zero = np.zeros_like(z)
    terms = np.maximum(z, zero) - z * ONE_HOT + np.log1p(np.exp(-np.abs(z)))
    return terms.mean()


def mean_squares(np, z):
    return ((z - ONE_HOT) ** 2).mean()


def poisson_log_likelihood(np, z):
    return (np.exp(z / 4) - ONE_HOT * z / 4).mean()


def entropy(np, z):
    p = softmax(np, z)
    return -(p * np.log(p + 1e-9)).sum(-1).mean()


def kl(np, z):
    p, q = log_softmax(np, z), log_softmax(np, z[:, ::-1])
    return (np.exp(p) * (p - q)).sum(-1).mean()


def temperature(np, z):
    return cross_entropy(np, z / 0.7 + 0.25)


LOSSES = (
    cross_entropy,
    cross_entropy_without_safeguard,
    softmax,
    log_softmax,
    focal,
    gaussian_log_likelihood,
    binary_log_likelihood,
    mean_squares,
    poisson_log_likelihood,
    entropy,
    kl,
    temperature,
)


def logits(half):
    """The exact product, rounded to half: what a product in half gives at best."""
    return (X.astype(half).astype(float) @ W.astype(half).astype(float)).astype(half)


@functools.cache
def same_code_on_rounded_logits(loss, half):
    """In float32; its error against float64 is what rounding the logits costs."""
    z = logits(HALVES[half]).astype(np.float32)
    value = evaluate(lambda z: loss(jnp, z), z)
    return np.asarray(value, np.float64)


@pytest.mark.parametrize("upcast", ["as is", "astype", "jit"])
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda f: f.__name__)
def test_after_a_product_all_is_in_float32(loss, half, upcast):
    def fn(w, x):
        z = x @ w
        if upcast == "astype":
            z = z.astype(jnp.float32)
        value = functools.partial(loss, jnp)
        return jax.jit(value)(z) if upcast == "jit" else value(z)

    exact = loss(np, X.astype(np.float64) @ W.astype(np.float64))
    at_best = np.linalg.norm(same_code_on_rounded_logits(loss, half) - exact)
    got = evaluate(jamp.autocast(fn, half), W, X)
    assert np.linalg.norm(np.asarray(got, np.float64) - exact) <= 2 * at_best


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(
    "loss",
    [
        lambda z: optax.softmax_cross_entropy_with_integer_labels(z, LABELS).mean(),
        lambda z: optax.softmax_cross_entropy(z, ONE_HOT).mean(),
        lambda z: optax.sigmoid_binary_cross_entropy(z, ONE_HOT).mean(),
        lambda z: optax.huber_loss(z, ONE_HOT).mean(),
        lambda z: jax.nn.logsumexp(z, -1).mean(),
        lambda z: jax.nn.log_softmax(z)[:, 0].mean(),
        lambda z: jax.nn.softplus(z).mean(),
        lambda z: jnp.linalg.norm(z, axis=-1).mean(),
        lambda z: jnp.std(z),
    ],
    ids="integers one_hot sigmoid huber lse log_softmax softplus norm std".split(),
)
def test_losses_of_libraries(loss, half):
    """With gradients: against the same in float32 on logits rounded by hand."""

    def fn(w, x):
        return loss(x @ w)

    def by_hand(w, x):
        dtype = HALVES[half]
        return loss((x.astype(dtype) @ w.astype(dtype)).astype(jnp.float32))

    got = evaluate(jax.value_and_grad(jamp.autocast(fn, half)), W, X)
    expected = evaluate(jax.value_and_grad(by_hand), jnp.asarray(W), X)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-6)
    scale = np.abs(expected[1]).max()
    eps = 4 * float(jnp.finfo(half).eps)
    np.testing.assert_allclose(got[1], expected[1], atol=eps * scale)


# ---- norms of activations around 300, whose squares overflow float16

IMAGES = RNG.normal(size=(32, FEATURES)).astype(np.float32)
MIX = RNG.normal(size=(FEATURES, 32)).astype(np.float32) * 75  # products around 300


def rms_norm(np, y):
    return y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-6)


def rms_norm_by_product(np, y):
    return y / np.sqrt((y * y).mean(-1, keepdims=True) + 1e-6)


def layer_norm(np, y):
    mean = y.mean(-1, keepdims=True)
    return (y - mean) / np.sqrt(((y - mean) ** 2).mean(-1, keepdims=True) + 1e-6)


def layer_norm_in_one_pass(np, y):
    mean, square = y.mean(-1, keepdims=True), (y * y).mean(-1, keepdims=True)
    return (y - mean) / np.sqrt(square - mean * mean + 1e-6)


def batch_norm(np, y):
    return (y - y.mean(0)) / np.sqrt(y.var(0) + 1e-5)


def l2_norm(np, y):
    return y / np.sqrt((y * y).sum(-1, keepdims=True))


NORMS = {
    "rms_norm": (rms_norm, None),
    "rms_norm_by_product": (rms_norm_by_product, None),
    "layer_norm": (layer_norm, None),
    "layer_norm_in_one_pass": (layer_norm_in_one_pass, None),
    "batch_norm": (batch_norm, None),
    "l2_norm": (l2_norm, None),
    "nn.LayerNorm": (layer_norm, nn.LayerNorm()),
    "nn.RMSNorm": (rms_norm, nn.RMSNorm()),
    "nn.BatchNorm": (batch_norm, nn.BatchNorm(use_running_average=False)),
    "nn.GroupNorm": (layer_norm, nn.GroupNorm(num_groups=1)),
    "jax.nn.standardize": (
        functools.partial(layer_norm),
        lambda y: jax.nn.standardize(y, epsilon=1e-6),
    ),
}


def applied(name):
    formula, module = NORMS[name]
    if module is None:
        return functools.partial(formula, jnp)
    if not isinstance(module, nn.Module):
        return module
    variables = module.init(jax.random.key(0), jnp.ones((32, 32)))
    return lambda y: module.apply(variables, y, mutable=["batch_stats"])[0]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", NORMS)
def test_norms_of_large_activations(name, half):
    norm = applied(name)
    formula = NORMS[name][0]
    exact = formula(np, IMAGES.astype(float) @ MIX.astype(float))
    assert np.abs(IMAGES @ MIX).max() > 256  # so that squares overflow

    def fn(mix, x):
        return norm(x @ mix)

    got = evaluate(jamp.autocast(fn, half), MIX, IMAGES)
    assert np.isfinite(got).all()
    eps = float(jnp.finfo(half).eps)
    assert np.linalg.norm(got - exact) <= 2 * eps * np.linalg.norm(exact)

    def loss(mix, x):
        return (fn(mix, x).ravel() * jnp.cos(jnp.arange(1024.0))).sum()

    grads = evaluate(jax.grad(jamp.autocast(loss, half)), MIX, IMAGES)
    expected = evaluate(jax.grad(loss), MIX, IMAGES)
    assert grads.dtype == jnp.float32
    error = np.linalg.norm(grads - expected) / np.linalg.norm(expected)
    assert error <= 16 * eps


@pytest.mark.parametrize("half", HALVES)
def test_batch_norm_gives_back_the_dtype_of_its_input(half):
    """What follows it reads half: relu, the shortcut, and what is kept of them."""
    model = nn.BatchNorm(use_running_average=False)
    variables = model.init(jax.random.key(0), jnp.ones((32, 32)))

    def fn(mix, x):
        y = model.apply(variables, x @ mix, mutable=["batch_stats"])[0]
        return jax.nn.relu(y) @ mix.T

    jaxpr = jax.make_jaxpr(jamp.autocast(fn, half))(MIX, IMAGES).jaxpr
    found = [e.outvars[0].aval for e in walk(jaxpr) if e.primitive.name == "max"]
    assert [str(y.dtype) for y in found if y.shape == (32, 32)] == [half]


def test_running_statistics_of_large_activations():
    model = nn.BatchNorm(use_running_average=False, momentum=0.0)
    variables = model.init(jax.random.key(0), jnp.ones((32, 32)))

    def fn(mix, x):
        return model.apply(variables, x @ mix, mutable=["batch_stats"])[1]

    got = jamp.autocast(fn)(MIX, IMAGES)["batch_stats"]
    exact = IMAGES.astype(float) @ MIX.astype(float)
    assert got["var"].dtype == got["mean"].dtype == jnp.float32
    np.testing.assert_allclose(got["mean"], exact.mean(0), atol=0.2)
    np.testing.assert_allclose(got["var"], exact.var(0), rtol=4e-3)


# ---- feeders


def op_dtypes(fn, names, *args):
    jaxpr = jax.make_jaxpr(jamp.autocast(fn))(*args).jaxpr
    return [
        str(e.outvars[0].aval.dtype) for e in walk(jaxpr) if e.primitive.name in names
    ]


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
    found = op_dtypes(lambda w, x: fn(x @ w), names, W, X)
    assert found and set(found) == {"float32"}


def test_what_feeds_a_product_too_runs_in_half():
    def fn(w, x):
        y = (x @ w) - 1.0
        return jnp.exp(y).sum() + (y @ w.T).sum()

    assert op_dtypes(fn, ["sub"], W, X) == ["float16"]
