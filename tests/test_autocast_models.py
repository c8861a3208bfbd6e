"""Models of four libraries, unchanged, on scikit-learn's digits under autocast."""

import functools
import importlib

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from sklearn import datasets

import jamp
from tests.models import CNN
from tests.programs import evaluate, products

STEPS, BATCH = 50, 32
SCALE = 2.0**7  # a static loss scale: small gradients stay above float16's floor


@functools.cache
def digits():
    """Images of 8 x 8 between 0 and 1: shuffled, then in batches."""
    images, labels = datasets.load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))[: STEPS * BATCH]
    images = (images[order] / 16).astype(np.float32).reshape(STEPS, BATCH, 8, 8)
    return images, labels[order].reshape(STEPS, BATCH).astype(np.int32)


# Each makes the params of a model, other state that it updates, and a function
# `apply(params, state, images) -> logits, state`.


def linen(module):
    state = dict(jax.jit(module.init)(jax.random.key(0), jnp.zeros((BATCH, 8, 8))))
    params = state.pop("params")

    def apply(params, state, x):
        return module.apply({"params": params, **state}, x, mutable=list(state))

    return params, state, apply


def linen_cnn():
    """Conv, BatchNorm, relu, with shortcuts."""
    return linen(nn.Sequential([lambda x: x[..., None], CNN((4, 8), 1)]))


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
        axes = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        x, _ = nn.scan(nn.remat(Block), **axes, length=2)()(x, None)
        return nn.Dense(10)(nn.LayerNorm()(x).mean(1))


def linen_transformer():
    return linen(ScannedTransformer())


def nnx_transformer():
    rngs = nnx.Rngs(0)
    layers = (
        nnx.Linear(8, 8, rngs=rngs),
        nnx.LayerNorm(8, rngs=rngs),
        nnx.MultiHeadAttention(2, 8, rngs=rngs, decode=False),
        nnx.BatchNorm(8, rngs=rngs),
        nnx.Linear(8, 16, rngs=rngs),
        nnx.gelu,
        lambda x: x.mean(1),
        nnx.Linear(16, 10, rngs=rngs),
    )
    graph, params, state = nnx.split(nnx.Sequential(*layers), nnx.Param, ...)

    def apply(params, state, x):
        model = nnx.merge(graph, params, state, copy=True)
        return model(x), nnx.split(model, nnx.Param, ...)[2]

    return params, state, apply


def haiku_recurrent():
    hk = importlib.import_module("haiku")

    def forward(x):
        x = hk.Conv2D(4, 3)(x[..., None])
        x = hk.BatchNorm(True, True, 0.9)(x, is_training=True)
        x = jax.nn.relu(x).reshape(BATCH, 8, -1)
        core = hk.GRU(16)
        y, _ = hk.dynamic_unroll(core, x, core.initial_state(BATCH), time_major=False)
        return hk.Linear(10)(hk.LayerNorm(-1, True, True)(y[:, -1]))

    model = hk.transform_with_state(forward)
    params, state = jax.jit(model.init)(jax.random.key(0), jnp.zeros((BATCH, 8, 8)))
    return params, state, lambda params, state, x: model.apply(params, state, None, x)


def equinox_transformer():
    eqx = importlib.import_module("equinox")
    keys = jax.random.split(jax.random.key(0), 3)
    modules = {
        "norm": eqx.nn.LayerNorm(8),
        "attention": eqx.nn.MultiheadAttention(2, 8, key=keys[0]),
        "mlp": eqx.nn.MLP(8, 8, 16, 1, key=keys[1]),
        "head": eqx.nn.Linear(64, 10, key=keys[2]),
    }
    params, static = eqx.partition(modules, eqx.is_array)

    def apply(params, state, x):
        m = eqx.combine(params, static)

        def one(x):
            y = jax.vmap(m["norm"])(x)
            x = x + m["attention"](y, y, y)
            return m["head"]((x + jax.vmap(m["mlp"])(x)).ravel())

        return jax.vmap(one)(x), state

    return params, (), apply


# With rates slow enough that rounding does not make another path, and yet it learns.
MODELS = {
    "linen_cnn": (linen_cnn, 0.2),
    "linen_transformer": (linen_transformer, 0.02),
    "nnx_transformer": (nnx_transformer, 0.02),
    "haiku": (haiku_recurrent, 0.02),
    "equinox": (equinox_transformer, 0.02),
}


@pytest.mark.standard_promotion  # Flax and Haiku add half to integers and weak floats
@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_in_float32_with_every_product_in_half(name):
    if name in ("haiku", "equinox"):
        pytest.importorskip(name)
    make, rate = MODELS[name]
    params, state, apply = make()
    tx = optax.sgd(rate, momentum=0.9)

    def loss_fn(params, state, x, y):
        logits, state = apply(params, state, x)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, y)
        return losses.mean() * SCALE, state

    def train(loss_fn):
        """The losses of all steps, and params and state after them."""

        def step(carry, batch):
            params, state, opt_state = carry
            grad = jax.value_and_grad(loss_fn, has_aux=True)
            (loss, state), grads = grad(params, state, *batch)
            grads = jax.tree.map(lambda g: g / SCALE, grads)
            updates, opt_state = tx.update(grads, opt_state, params)
            carry = optax.apply_updates(params, updates), state, opt_state
            return carry, loss / SCALE

        carry = params, state, tx.init(params)
        return jax.jit(lambda *batches: jax.lax.scan(step, carry, batches))

    plain = train(loss_fn)
    # The compiler takes the time: what is trained in float16 is traced in bfloat16.
    for half in ("bfloat16", "float16"):
        cast = train(jamp.autocast(loss_fn, half))
        found = products(cast, *digits())
        assert len(found) >= len(products(plain, *digits())) > 6
        assert [p for p in found if (p.lhs, p.rhs) != (half, half)] == []
    (carry, losses), (got_carry, got) = (evaluate(f, *digits()) for f in (plain, cast))
    assert jax.tree.map(jax.typeof, got_carry) == jax.tree.map(jax.typeof, carry)
    assert losses[-10:].mean() < 0.9 * losses[:5].mean()  # it learns
    np.testing.assert_allclose(got[0], losses[0], rtol=0.01)
    np.testing.assert_allclose(got[-10:].mean(), losses[-10:].mean(), rtol=0.01)
