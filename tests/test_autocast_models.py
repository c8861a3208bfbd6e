"""Models of four libraries, unchanged, on scikit-learn's digits under autocast."""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import Array
from sklearn import datasets

import jamp
from tests.models import CNN
from tests.programs import evaluate, products

STEPS, BATCH = 50, 32
SCALE = 2.0**7  # a static loss scale: small gradients stay above float16's floor


class Model(NamedTuple):
    """A model as a function of its parameters, and of other state that it updates."""

    params: Any
    state: Any
    apply: Callable[[Any, Any, Array], tuple[Array, Any]]


@functools.cache
def digits():
    """Images of 8 x 8 between 0 and 1: shuffled, then in batches."""
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[: STEPS * BATCH]
    images = (images[order] / 16).astype(np.float32).reshape(STEPS, BATCH, 8, 8)
    return images, labels[order].reshape(STEPS, BATCH).astype(np.int32)


def linen(module: nn.Module, shape: Callable = lambda x: x) -> Model:
    example = shape(jnp.zeros((BATCH, 8, 8)))
    variables = jax.jit(module.init)(jax.random.key(0), example)
    params = variables["params"]
    state = {k: v for k, v in variables.items() if k != "params"}

    def apply(params, state, x):
        variables = {"params": params, **state}
        return module.apply(variables, shape(x), mutable=list(state))

    return Model(params, state, apply)


def linen_cnn():
    """Conv, BatchNorm, relu, with shortcuts."""
    return linen(CNN((4, 8), 1), lambda x: x[..., None])


class Block(nn.Module):
    """The body of nn.scan: attention and an MLP behind LayerNorms."""

    @nn.compact
    def __call__(self, x, _):
        x = x + nn.MultiHeadDotProductAttention(2)(nn.LayerNorm()(x))
        y = nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))
        return x + nn.Dense(8)(y), None


class ScannedTransformer(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8)(x) + self.param("place", nn.initializers.normal(), (8, 8))
        layers = nn.scan(
            nn.remat(Block),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        x, _ = layers()(x, None)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


class LSTM(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.RNN(nn.OptimizedLSTMCell(16))(x)[:, -1])


def linen_transformer():
    """nn.scan over nn.remat."""
    return linen(ScannedTransformer())


def linen_lstm():
    return linen(LSTM())


class Encoder(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Linear(8, 8, rngs=rngs)
        self.norm = nnx.LayerNorm(8, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False)
        self.batch_norm = nnx.BatchNorm(8, rngs=rngs)
        self.up = nnx.Linear(8, 16, rngs=rngs)
        self.down = nnx.Linear(16, 8, rngs=rngs)
        self.head = nnx.Linear(8, 10, rngs=rngs)

    def __call__(self, x):
        x = self.embed(x)
        x = x + self.attention(self.norm(x))
        x = x + self.down(nnx.gelu(self.up(self.batch_norm(x))))
        return self.head(x.mean(1))


def nnx_transformer():
    graph, params, state = nnx.split(Encoder(nnx.Rngs(0)), nnx.Param, ...)

    def apply(params, state, x):
        model = nnx.merge(graph, params, state, copy=True)
        y = model(x)
        return y, nnx.split(model, nnx.Param, ...)[2]

    return Model(params, state, apply)


def haiku_recurrent():
    hk = importlib.import_module("haiku")

    def forward(x):
        x = hk.Conv2D(4, 3)(x[..., None])
        x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
        x = jax.nn.relu(x).reshape(x.shape[0], 8, -1)
        core = hk.GRU(16)
        y, _ = hk.dynamic_unroll(
            core, x, core.initial_state(x.shape[0]), time_major=False
        )
        return hk.Linear(10)(hk.LayerNorm(-1, True, True)(y[:, -1]))

    model = hk.transform_with_state(forward)
    params, state = jax.jit(model.init)(jax.random.key(0), jnp.zeros((BATCH, 8, 8)))

    def apply(params, state, x):
        return model.apply(params, state, None, x)

    return Model(params, state, apply)


def equinox_transformer():
    eqx = importlib.import_module("equinox")
    keys = jax.random.split(jax.random.key(0), 4)
    modules = {
        "embed": eqx.nn.Linear(8, 8, key=keys[0]),
        "norm": eqx.nn.LayerNorm(8),
        "attention": eqx.nn.MultiheadAttention(2, 8, key=keys[1]),
        "mlp": eqx.nn.MLP(8, 8, 16, 1, key=keys[2]),
        "head": eqx.nn.Linear(64, 10, key=keys[3]),
    }
    params, static = eqx.partition(modules, eqx.is_array)

    def apply(params, state, x):
        m = eqx.combine(params, static)

        def one(x):
            x = jax.vmap(m["embed"])(x)
            y = jax.vmap(m["norm"])(x)
            x = x + m["attention"](y, y, y)
            return m["head"]((x + jax.vmap(m["mlp"])(x)).ravel())

        return jax.vmap(one)(x), state

    return Model(params, (), apply)


MODELS = {
    "linen_cnn": linen_cnn,
    "linen_transformer": linen_transformer,
    "linen_lstm": linen_lstm,
    "nnx_transformer": nnx_transformer,
    "haiku": haiku_recurrent,
    "equinox": equinox_transformer,
}
# Slow enough that rounding does not make another path, fast enough to learn.
RATES = {"linen_cnn": 0.1, "linen_lstm": 0.1}
HALVES = ("float16", "bfloat16")

# Flax and Haiku add half and integers or weak floats as NumPy would.
pytestmark = pytest.mark.standard_promotion


@functools.cache
def model(name):
    if name in ("haiku", "equinox"):
        pytest.importorskip(name)
    with jax.numpy_dtype_promotion("standard"):
        return MODELS[name]()


def loss_fn(name, cast):
    made = model(name)

    def loss(params, state, x, y):
        logits, state = made.apply(params, state, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean() * SCALE, state

    return cast(loss)


@functools.cache
def trained(name, half):
    """The mean loss of the last ten of fifty steps, and the types of all params."""
    cast = functools.partial(jamp.autocast, dtype=half) if half else lambda fn: fn
    grad = jax.value_and_grad(loss_fn(name, cast), has_aux=True)
    tx = optax.sgd(RATES.get(name, 0.02), momentum=0.9)

    def step(carry, batch):
        params, state, opt_state = carry
        (loss, state), grads = grad(params, state, *batch)
        grads = jax.tree.map(lambda g: g / SCALE, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), state, opt_state), loss / SCALE

    params, state, _ = model(name)

    def train(params, state, images, labels):
        carry = params, state, tx.init(params)
        return jax.lax.scan(step, carry, (images, labels))

    carry, losses = evaluate(train, params, state, *digits())
    return losses, jax.tree.map(lambda x: (x.shape, x.dtype), carry[:2])


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_every_product_is_in_half(name, half):
    params, state, _ = model(name)
    images, labels = digits()
    args = params, state, images[0], labels[0]
    loss = loss_fn(name, functools.partial(jamp.autocast, dtype=half))
    grad = jax.grad(loss, has_aux=True)
    for fn in (loss, grad):
        found = products(fn, *args)
        assert len(found) > 2
        assert [p for p in found if (p.lhs, p.rhs) != (half, half)] == []


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_after_fifty_steps_is_that_of_float32(name, half):
    (got, types), (expected, plain_types) = trained(name, half), trained(name, None)
    assert types == plain_types
    assert expected[-10:].mean() < 0.9 * expected[:5].mean()  # it learns
    np.testing.assert_allclose(got[-10:].mean(), expected[-10:].mean(), rtol=0.01)
    np.testing.assert_allclose(got[0], expected[0], rtol=0.01)
