"""Test every construct, forward and backward, in both half dtypes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.support.constructs import FORWARD_ONLY, TABLE, N
from tests.support.near import assert_near
from tests.support.programs import evaluate, products

TOLERANCE = 8 * 2.0**-10  # several roundings in a row
W, X = np.random.default_rng(0).normal(size=(2, N, N)).astype(np.float32)
W /= 4


def both_passes(name, cast):
    """Returns a function that returns a construct's results and both gradients."""
    fn = cast(name) if callable(name) else TABLE[name](cast)

    def loss(w, x):
        leaves = [y for y in jax.tree.leaves(fn(w, x)) if y.dtype == jnp.float32]
        factors = [jnp.cos(jnp.arange(y.size)).reshape(y.shape) for y in leaves]
        return sum((c * y).sum() for c, y in zip(factors, leaves, strict=True))

    def both(w, x):
        if name in FORWARD_ONLY:
            return fn(w, x)
        with jax.numpy_dtype_promotion("standard"):
            grads = jax.grad(loss, (0, 1))(w, x)
        return fn(w, x), grads

    return jax.jit(both)


@pytest.mark.parametrize("name", TABLE)
def test_coverage(name):
    # In a `jit`, JAX removes the products of a custom derivative that nothing reads.
    plain = both_passes(name, jax.jit)
    count = len(products(plain, W, X))
    for half in ("bfloat16", "float16"):
        fn = both_passes(name, functools.partial(jamp.autocast, dtype=half))
        with jax.enable_checks(True):
            found = products(fn, W, X)
        assert len(found) >= count > 0
        assert [p for p in found if (p.lhs, p.rhs) != (half, half)] == []
    assert_near(evaluate(fn, W, X), evaluate(plain, W, X), TOLERANCE)
