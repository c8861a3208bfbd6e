"""The coverage table: every construct, forward and backward, in both halves."""

import functools
import warnings
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
import tests.constructs_custom  # noqa: F401, which enters its own
from tests.constructs import FORWARD_ONLY, OPAQUE, TABLE, N
from tests.programs import Product, products_of

HALVES = {"float16": 2.0**-10, "bfloat16": 2.0**-7}
ROUNDINGS = 8  # several in a row, in units of the last place

pytestmark = pytest.mark.filterwarnings("ignore::jamp.AutocastWarning")


def inputs():
    w, x = np.random.default_rng(0).normal(size=(2, N, N)).astype(np.float32)
    return jnp.asarray(w / 4), jnp.asarray(x)


def forward(name, cast):
    return TABLE[name](cast)


def backward(name, cast):
    """The gradients in both, with other cotangents for all floats that come out."""
    fn = TABLE[name](cast)

    def loss(w, x):
        leaves = [y for y in jax.tree.leaves(fn(w, x)) if y.dtype == jnp.float32]
        return sum((jnp.cos(jnp.arange(y.size)) * y.ravel()).sum() for y in leaves)

    def grads(w, x):
        with jax.numpy_dtype_promotion("standard"):
            return jax.grad(loss, (0, 1))(w, x)

    return grads


PASSES = {"forward": forward, "grad": backward}
CASES = [
    pytest.param(name, kind, id=f"{name}-{kind}")
    for name in TABLE
    for kind in PASSES
    if (name, kind) not in [(f, "grad") for f in FORWARD_ONLY]
]


class Run(NamedTuple):
    """The products of a function, and what it returns for `inputs()`."""

    products: list[Product]
    values: Any


def run(fn):
    """Compiles without optimisation: here compiling takes all the time."""
    traced = jax.jit(fn).trace(*inputs())
    options = {"xla_backend_optimization_level": 0}
    compiled = traced.lower().compile(compiler_options=options)
    return Run(products_of(traced.jaxpr.jaxpr), compiled(*inputs()))


@functools.cache
def in_float32(name, kind):
    return run(PASSES[kind](name, lambda fn: fn))


def distance(got, expected):
    """The largest relative error among the leaves, each as a whole."""
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-3)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize(("name", "kind"), CASES)
def test_coverage(name, kind, half):
    got = run(PASSES[kind](name, functools.partial(jamp.autocast, dtype=half)))
    plain = in_float32(name, kind)
    assert [p for p in got.products if (p.lhs, p.rhs) != (half, half)] == []
    assert len(got.products) >= len(plain.products) > 0

    got, expected = got.values, plain.values
    dtypes = functools.partial(jax.tree.map, lambda x: (x.shape, x.dtype))
    assert dtypes(got) == dtypes(expected)
    errors = jax.tree.map(distance, got, expected)
    assert max(jax.tree.leaves(errors)) <= ROUNDINGS * HALVES[half], errors


@pytest.mark.parametrize("name", TABLE)
def test_programs_pass_jaxs_checks_and_only_the_opaque_is_warned_of(name):
    with jax.enable_checks(True), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.make_jaxpr(PASSES["forward"](name, jamp.autocast))(*inputs())
    assert all(OPAQUE.get(name, "-") in str(w.message) for w in caught)
