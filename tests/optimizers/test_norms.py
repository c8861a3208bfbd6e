"""Test pallas_kernels' norms and finite check against float64, on both backends."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Options, found_inf, norm
from tests.support.programs import FAST

pytestmark = pytest.mark.slow

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32
BACKENDS = ["xla", "interpret"]
each_backend = pytest.mark.parametrize("backend", BACKENDS)
# Leaves below and above a kernel's minimum, in whole and partial blocks.
SHAPES = [(), (0,), (127,), (3, 50), (1024 + 1,), (4096 * 2 + 130,)]


def leaves():
    rng, dtypes = np.random.default_rng(0), (F16, BF16, F32)
    normal = (np.asarray(rng.normal(size=shape), np.float32) for shape in SHAPES)
    return [x.astype(dtypes[k % 3]) for k, x in enumerate(normal)]


@functools.partial(jax.jit, static_argnums=1, compiler_options=FAST)
def measured(leaves, backend):
    """Returns all norms of x and of x / 3, and whether an element is not finite."""
    options = Options(unscale=jnp.float32(1 / 3), backend=backend)
    norms = {
        (order, per_leaf, one is not None): norm(
            leaves, order, per_leaf=per_leaf, options=one or Options(backend=backend)
        )
        for order in (2, math.inf)
        for per_leaf in (False, True)
        for one in (None, options)
    }
    return norms, found_inf(leaves, options=Options(backend=backend))


@each_backend
def test_norms_match_float64(backend):
    xs = leaves()
    norms, bad = measured(xs, backend)
    wide = [np.abs(np.float64(np.float32(x))) for x in xs]
    wanted = {
        2: np.array([np.sqrt((x**2).sum()) for x in wide]),
        math.inf: np.array([x.max(initial=0) for x in wide]),
    }
    for (order, per_leaf, divided), got in norms.items():
        want = wanted[order] / (3 if divided else 1)
        if not per_leaf:
            want = want.max() if order != 2 else np.sqrt((want**2).sum())
        assert got.dtype == F32
        np.testing.assert_allclose(np.float64(got), want, 2.0**-20)
    assert not bad


@each_backend
def test_one_bad_element_is_found_wherever_it_is(backend):
    """The norms of the leaf and of all leaves become inf or NaN."""
    places = [(k, at) for k, shape in enumerate(SHAPES) for at in (0, 0.5, 1) if k != 1]
    for n, (leaf, at) in enumerate(places):
        xs, value = leaves(), [np.inf, -np.inf, np.nan][n % 3]
        xs[leaf].reshape(-1)[round(at * (xs[leaf].size - 1))] = value
        norms, bad = measured(xs, backend)
        assert bad, (leaf, at)
        for (_, per_leaf, _), got in norms.items():
            hit = [False] * len(xs)
            hit[leaf] = True
            assert (~np.isfinite(got) == (hit if per_leaf else True)).all(), (leaf, at)
            assert np.isnan(got).any() == np.isnan(value)


def test_what_overflows_once_divided_is_found_and_nothing_is_finite():
    big = [jnp.full(13, 3e38)]  # apex's sum of them overflows
    assert not found_inf(big)
    assert found_inf(big, options=Options(unscale=jnp.float32(8)))
    for backend in BACKENDS:
        assert norm([], options=Options(backend=backend)) == 0
        assert not found_inf([], options=Options(backend=backend))
