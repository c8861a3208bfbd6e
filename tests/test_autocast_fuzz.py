"""Random programs: autocast raises on none, and changes no type and no integer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

import jamp
from tests.programs import evaluate
from tests.random_programs import PROGRAMS, run

ERROR = {"float16": 0.03, "bfloat16": 0.25}  # of values of a few units

pytestmark = pytest.mark.standard_promotion

shapes = st.tuples(st.integers(1, 4), st.integers(1, 4))
dtypes = st.sampled_from(["float32", "float32", "float32", "bfloat16", "float16"])
inputs = st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=3)


def arrays(specs):
    rng = np.random.default_rng(len(specs))
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape, dtype in specs]


def close(got, expected, atol):
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    if jnp.issubdtype(got.dtype, jnp.integer):
        np.testing.assert_array_equal(got, expected)
        return
    got, expected = (np.asarray(x, np.float32) for x in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=atol, atol=atol)


@settings(max_examples=30, suppress_health_check=list(HealthCheck))
@given(
    program=PROGRAMS,
    specs=inputs,
    half=st.sampled_from(list(ERROR)),
    promote=st.sampled_from(["widest", "narrowest"]),
)
def test_random_programs(program, specs, half, promote):
    cast = functools.partial(jamp.autocast, dtype=half, promote=promote)
    ints = [jnp.array([2, 0, 3]), jnp.array([1])]

    def fn(floats):
        return run(program, floats, ints)

    def loss(fn, floats):
        return sum(jnp.sin(y.astype(jnp.float32)).sum() for y in fn(floats)[0])

    def both(fn, floats):
        return fn(floats), jax.grad(functools.partial(loss, fn))(floats)

    floats = arrays(specs)
    expected = evaluate(functools.partial(both, fn), floats)
    got = evaluate(functools.partial(both, cast(fn)), floats)
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    jax.tree.map(functools.partial(close, atol=ERROR[half]), got[0], expected[0])
    for g, e in zip(*map(jax.tree.leaves, (got[1], expected[1])), strict=True):
        assert (g.shape, g.dtype) == (e.shape, e.dtype)
        assert np.isfinite(np.asarray(g, np.float32)).all()
