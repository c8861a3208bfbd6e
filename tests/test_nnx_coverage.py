"""The table of autocast's coverage again, with NNX models: what is cast, and kept."""

import warnings

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jamp.nnx
import tests.constructs_custom  # noqa: F401, which enters its own
from tests.constructs import OPAQUE, TABLE, N
from tests.programs import products_of

SHAPES = 2 * [jax.ShapeDtypeStruct((N, N), jnp.float32)]


class Model(nnx.Module):
    """A construct of the table, and a count of its calls."""

    def __init__(self, name, w):
        self.construct = TABLE[name](lambda fn: fn)
        self.w = nnx.Param(w)
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls.set_value(self.calls.get_value() + 1)
        return self.construct(self.w.get_value(), x)


call = jamp.nnx.autocast(lambda model, x: model(x))


def factors(jaxpr):
    return sorted((p.lhs, p.rhs) for p in products_of(jaxpr.jaxpr))


@pytest.mark.parametrize("name", TABLE)
def test_a_model_runs_what_its_function_runs(name):
    def by_nnx(w, x):
        model = Model(name, w)
        return call(model, x), model.calls.get_value()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jaxpr, (out, calls) = jax.make_jaxpr(by_nnx, return_shape=True)(*SHAPES)
        assert all(OPAQUE.get(name, "-") in str(w.message) for w in caught)
        fn = TABLE[name](jamp.autocast)
        expected, shapes = jax.make_jaxpr(fn, return_shape=True)(*SHAPES)
    assert factors(jaxpr) == factors(expected)
    assert {dtype for pair in factors(jaxpr) for dtype in pair} == {"float16"}
    assert jax.tree.map(str, out) == jax.tree.map(str, shapes)
    assert (calls.shape, calls.dtype) == ((), jnp.int32)


@pytest.mark.parametrize("name", ["scan", "custom_vjp", "remat"])
def test_what_a_model_counts_is_right(name):
    model, step = Model(name, jnp.eye(N)), nnx.jit(call)
    for _ in range(2):
        step(model, jnp.ones((N, N)))
    assert model.calls.get_value() == 2
