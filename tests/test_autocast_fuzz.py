"""Random programs: autocast raises on none, and changes no type and no integer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st

import jamp
from tests.programs import evaluate
from tests.random_programs import EVERY, PROGRAMS, run

ERROR = {"float16": 0.03, "bfloat16": 0.25}  # of values of a few units

shapes = st.tuples(st.integers(1, 4), st.integers(1, 4))
dtypes = st.sampled_from(["float32", "float32", "float32", "bfloat16", "float16"])


@pytest.mark.standard_promotion
@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(
    program=PROGRAMS,
    specs=st.lists(st.tuples(shapes, dtypes), min_size=1, max_size=3),
    half=st.sampled_from(list(ERROR)),
    promote=st.sampled_from(["widest", "narrowest"]),
)
@example(EVERY, 2 * [((4, 4), "float32")], "float16", "widest")
def test_random_programs(program, specs, half, promote):
    rng = np.random.default_rng(len(specs))
    floats = [jnp.asarray(rng.normal(size=shape), dtype) for shape, dtype in specs]

    def fn(floats):
        return run(program, floats, [jnp.array([2, 0, 3]), jnp.array([1])])

    def both(fn, floats):
        """All values, and gradients of all floats."""

        def loss(floats):
            return sum(jnp.sin(y.astype(jnp.float32)).sum() for y in fn(floats)[0])

        return fn(floats), jax.grad(loss)(floats)

    def close(got, expected):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        exact = jnp.issubdtype(got.dtype, jnp.integer)
        got, expected = (np.asarray(x, np.float32) for x in (got, expected))
        atol = 0 if exact else ERROR[half]
        np.testing.assert_allclose(got, expected, rtol=atol, atol=atol)

    def finite(got, expected):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        assert np.isfinite(np.asarray(got, np.float32)).all()

    cast = jamp.autocast(fn, half, promote=promote)
    values, grads = evaluate(functools.partial(both, fn), floats)
    got_values, got_grads = evaluate(functools.partial(both, cast), floats)
    jax.tree.map(close, got_values, values)
    jax.tree.map(finite, got_grads, grads)
