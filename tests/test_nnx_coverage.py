"""The table of autocast's coverage again, with NNX models: what is cast, and kept."""

import functools
import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jamp.nnx
import tests.constructs_custom  # noqa: F401, which enters its own
from tests.constructs import OPAQUE, TABLE, N
from tests.programs import products_of

W = X = jax.ShapeDtypeStruct((N, N), jnp.float32)


class Model(nnx.Module):
    """A construct of the table, and a count of its calls."""

    def __init__(self, name, w):
        self.construct = TABLE[name](lambda fn: fn)
        self.w = nnx.Param(w)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.construct(self.w.get_value(), x)


def by_nnx(name, w, x):
    """What the model gives back, and its count."""
    model = Model(name, w)
    out = jamp.nnx.autocast(lambda model, x: model(x))(model, x)
    return out, model.calls.get_value()


def traced(fn):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxpr, shapes = jax.make_jaxpr(fn, return_shape=True)(W, X)
    return products_of(jaxpr.jaxpr), shapes, [str(w.message) for w in caught]


@pytest.mark.parametrize("name", TABLE)
def test_a_model_runs_what_its_function_runs(name):
    products, (out, calls), warned = traced(functools.partial(by_nnx, name))
    expected, shapes, _ = traced(TABLE[name](jamp.autocast))
    key = functools.partial(map, lambda p: (p.lhs, p.rhs))
    assert sorted(key(products)) == sorted(key(expected))
    assert {dtype for pair in key(products) for dtype in pair} == {"float16"}
    assert jax.tree.map(str, out) == jax.tree.map(str, shapes)
    assert (calls.shape, calls.dtype) == ((), jnp.int32)
    assert all(OPAQUE.get(name, "-") in message for message in warned)


@pytest.mark.parametrize("name", ["scan", "custom_vjp", "remat"])
def test_what_a_model_counts_is_right(name):
    assert name in TABLE
    model = Model(name, jnp.eye(N))
    call = nnx.jit(jamp.nnx.autocast(lambda model, x: model(x)))
    for _ in range(2):
        call(model, jnp.ones((N, N)))
    assert model.calls.get_value() == 2
