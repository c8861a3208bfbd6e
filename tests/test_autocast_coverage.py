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


class Run(NamedTuple):
    """By pass: the products of a construct, and what it returns for `inputs()`."""

    products: dict[str, list[Product]]
    values: dict[str, Any]


def run(name, cast):
    """All passes in one program, not optimised: here compiling takes all the time."""
    kinds = [kind for kind in PASSES if kind == "forward" or name not in FORWARD_ONLY]
    passes = {kind: jax.jit(PASSES[kind](name, cast)) for kind in kinds}
    traced = {kind: fn.trace(*inputs()) for kind, fn in passes.items()}
    together = jax.jit(lambda w, x: {kind: fn(w, x) for kind, fn in passes.items()})
    options = {"xla_backend_optimization_level": 0}
    compiled = together.lower(*inputs()).compile(compiler_options=options)
    products = {kind: products_of(t.jaxpr.jaxpr) for kind, t in traced.items()}
    return Run(products, compiled(*inputs()))


@functools.cache
def in_float32(name):
    return run(name, lambda fn: fn)


def distance(got, expected):
    """The largest relative error among the leaves, each as a whole."""
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), 1e-3)


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("name", TABLE)
def test_coverage(name, half):
    got = run(name, functools.partial(jamp.autocast, dtype=half))
    plain = in_float32(name)
    assert got.products.keys() == plain.products.keys()
    for kind, found in got.products.items():
        assert [p for p in found if (p.lhs, p.rhs) != (half, half)] == [], kind
        assert len(found) >= len(plain.products[kind]) > 0, kind

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
