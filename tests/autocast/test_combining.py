"""Test operations that hold a function of single numbers, such as `x.at[i].apply`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.support.near import distance
from tests.support.programs import walk

W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)) / 3, jnp.float32)

# JAX traces these functions for float32 numbers.
COMBINING = {
    "double": lambda h: h.at[:, :2].apply(lambda v: 2.0 * v),
    "exp": lambda h: h.at[:, :2].apply(jnp.exp),
    "of constants": lambda h: h.at[0].apply(lambda v: v * np.float32(1.5) + 1),
    "gelu": lambda h: h.at[0].apply(jax.nn.gelu),
    "where": lambda h: h.at[0].apply(lambda v: jnp.where(v > 0, v, 0.1 * v)),
    "add": lambda h: h.at[0].add(1.0),
    "set": lambda h: h.at[0].set(1.0),
    "max": lambda h: h.at[0].max(0.1),
    "multiply": lambda h: h.at[0].multiply(3.0),
    "segments": lambda h: jax.ops.segment_prod(h, jnp.arange(8) // 2, 4),
    "reduce": lambda h: lax.reduce(h, 0.0, lambda a, b: a + 2 * b, (0,)),
    "reduce two": lambda h: lax.reduce(
        (h, lax.broadcasted_iota(jnp.int32, h.shape, 1)),
        (-jnp.inf, 0),
        lambda a, b: (jnp.maximum(a[0], b[0]), a[1] + b[1]),
        (1,),
    )[0],
    "windows": lambda h: lax.reduce_window(h, 0.0, jnp.hypot, (2, 2), (1, 1), "SAME"),
    "ufunc": lambda h: jnp.frompyfunc(lambda a, b: a * b + 1.0, 2, 1).reduce(h, axis=0),
    "solve": lambda h: lax.custom_linear_solve(lambda v: 2 * v, h, lambda f, b: b / 2),
}


@pytest.mark.parametrize("name", COMBINING)
def test_functions_of_single_numbers_run_in_any_dtype(name):
    fn = COMBINING[name]
    marks = jamp.half_function, jamp.promote_function, jamp.float_function
    expected = fn(W @ W)
    for region in (fn, *(mark(fn) for mark in marks)):
        for promote in ("widest", "narrowest"):
            half = jamp.autocast(lambda w, f=region: f(w @ w), promote=promote)
            for run in (half, jax.jit(half)):
                assert distance(run(W), expected) < 2.0**-8


def test_a_scatter_keeps_half_and_its_function_computes_in_float32():
    half = jamp.autocast(lambda w: (w @ w).at[0].apply(lambda v: v + 1e-4 - v))
    np.testing.assert_allclose(half(W)[0], 1e-4, rtol=1e-3)
    eqns = walk(jax.make_jaxpr(half)(W).jaxpr)
    (scatter,) = [eqn for eqn in eqns if eqn.primitive.name == "scatter"]
    assert scatter.outvars[0].aval.dtype == jnp.float16
