"""jamp.multi_tensor against amp_C in float64: results, flags, errors."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jamp.multi_tensor import axpby, l2norm, scale
from tests.optimizers.mixed_leaves import BACKENDS, BF16, F16, F32, FAST, SHAPES
from tests.oracles.steps import float64, global_norm, norm

DTYPES = [F16, BF16, F32]
# Half a unit in the last place, for a result rounded from float32; two roundings there.
ROUNDING = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-23}
# A sum of squares of 8192 numbers, by blocks or not, and a root.
SUM = 2.0**-20
each_backend = pytest.mark.parametrize("backend", BACKENDS)


class oracle:
    """amp_C in NumPy float64, from apex_semantics 9.3; a test does the rounding."""

    @staticmethod
    @np.errstate(invalid="ignore")  # inf * 0
    def scale(tree, factor):
        """And whether an input (not a product) is infinite or NaN."""
        x = float64(tree)
        return [factor * leaf for leaf in x], not all(map(is_finite, x))

    @staticmethod
    @np.errstate(invalid="ignore")  # inf - inf, inf * 0
    def axpby(a, x, b, y, check="both"):
        x, y = float64(x), float64(y)
        checked = {"both": x + y, "x": x, "y": y}[check]
        out = [a * i + b * j for i, j in zip(x, y, strict=True)]
        return out, not all(map(is_finite, checked))

    @staticmethod
    def l2norm(tree, scale=None):
        """Of all of tree / scale, and of each leaf."""
        x = [leaf / (scale or 1.0) for leaf in float64(tree)]
        return global_norm(x), [norm(leaf) for leaf in x]


def is_finite(leaf):
    return np.isfinite(leaf).all()


def leaves(turn=0, seed=0, shapes=SHAPES, dtypes=DTYPES):
    """Every shape, in dtypes that take turns: each meets each in the course of them."""
    rng = np.random.default_rng(seed)
    return [
        np.asarray(rng.normal(size=shape), np.float32).astype(
            dtypes[(k + turn) % len(dtypes)]
        )
        for k, shape in enumerate(shapes)
    ]


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=FAST)
def compiled(function, options, *args):
    return function(*args, **dict(options))


def call(function, *args, **options):
    arrays = [jax.tree.map(jnp.asarray, x) for x in args]
    return compiled(function, tuple(options.items()), *arrays)


def assert_results(results: Any, wanted: Any, dtypes: Any) -> None:
    """Trees rounded to these dtypes, and a flag."""
    (got, found_inf), (want, flag) = results, wanted
    for x, y, dtype in zip(got, want, dtypes, strict=True):
        assert (x.dtype, x.shape) == (dtype, y.shape)
        rtol = ROUNDING[jnp.dtype(dtype).type]
        np.testing.assert_allclose(np.float64(np.float32(x)), y, rtol, 1e-6)
    assert (found_inf.dtype, found_inf.shape) == (jnp.bool_, ())
    assert bool(found_inf) is flag is False


# A turn has each dtype; the emulator takes its time.
@pytest.mark.parametrize("turn, backend", [(0, "xla"), (2, "xla"), (1, "interpret")])
def test_results(turn, backend):
    shapes = [x for x in SHAPES if backend == "xla" or math.prod(x) > 127]  # kernels'
    x, y = leaves(turn, 0, shapes), leaves(1, 1, shapes)
    got = call(scale, x, 1 / 3, backend=backend)
    assert_results(got, oracle.scale(x, 1 / 3), [leaf.dtype for leaf in x])
    got = call(axpby, 0.3, x, -1.7, y, backend=backend)
    assert_results(got, oracle.axpby(0.3, x, -1.7, y), [leaf.dtype for leaf in y])
    divisor = [None, 3.0, 1024.0][turn]
    options = {} if divisor is None else {"scale": divisor}
    total, each = call(l2norm, x, per_tensor=True, backend=backend, **options)
    want, wants = oracle.l2norm(x, divisor)
    alone = total
    if turn == 1:  # for which partial results are added up
        alone = call(l2norm, x, backend=backend, **options)
    for got, wanted in zip([*each, total, alone], [*wants, want, want], strict=True):
        assert (got.dtype, got.shape) == (F32, ())
        np.testing.assert_allclose(np.float64(got), wanted, SUM)
    assert total > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_of_another_dtype(dtype):
    tree = leaves(shapes=SHAPES[:3])
    for results, want in [
        (call(scale, tree, 0.7, dtype=dtype), oracle.scale(tree, 0.7)),
        (
            call(axpby, 0.7, tree, 1.1, tree, dtype=dtype),
            oracle.axpby(0.7, tree, 1.1, tree),
        ),
    ]:
        assert_results(results, want, [dtype] * len(tree))


def test_products_and_sums_are_those_of_float32():
    # 300 * 300 is beyond float16, a third of it is not; 1/3 is not rounded to half.
    tree = [np.float16([300.0, 1.0]), np.ones(2, ml_dtypes.bfloat16)]
    got, _ = call(axpby, 300.0, tree, -200.0, tree)
    np.testing.assert_array_equal(np.float32(got[0]), [30000, 100])
    got, _ = call(scale, tree, 1 / 3, dtype=F32)
    np.testing.assert_allclose(got[1], 1 / 3, 2.0**-23)
    tree = [np.full(4, 60000, np.float16), np.full(4, 2.0**-24, np.float16)]
    _, each = call(l2norm, tree, per_tensor=True)
    np.testing.assert_allclose(each, [120000, 2.0**-23], 1e-6)


BAD = [np.inf, -np.inf, np.nan]
# Leaves that kernels take and that they do not, in whole blocks and not.
SIZES = [1, 127, 128, 1024 + 1, 4096 * 2 + 130]


def spoiled(tree: Any, leaf: int, place: float, bad: float) -> Any:
    tree = [x.copy() for x in tree]
    tree[leaf][round(place * (tree[leaf].size - 1))] = bad
    return tree


@pytest.mark.parametrize("dtype", [F16, F32])
def test_one_bad_element_is_found_wherever_it_is(dtype):
    """And makes the norm of its leaf, and of all, inf or NaN; as in test_launch."""
    tree = leaves(shapes=[(n,) for n in SIZES], dtypes=[dtype])
    places = [(k, place) for k in range(len(SIZES)) for place in (0, 0.5, 1)]
    for n, (leaf, place) in enumerate(places):
        bad = spoiled(tree, leaf, place, BAD[n % 3])
        got, found_inf = call(scale, bad, 0.5)
        assert found_inf, (leaf, place)
        want = oracle.scale(bad, 0.5)[0]
        np.testing.assert_array_equal(np.isnan(got[leaf]), np.isnan(want[leaf]))
        assert np.sum(~np.isfinite(np.float32(got[leaf]))) == 1
        total, each = call(l2norm, bad, per_tensor=True)
        assert [k for k, x in enumerate(each) if not np.isfinite(x)] == [leaf]
        assert not np.isfinite(total) and np.isnan(total) == np.isnan(BAD[n % 3])
    assert not call(scale, tree, 0.5)[1]


@each_backend
@pytest.mark.parametrize("check", ["both", "x", "y"])
def test_axpby_looks_where_it_is_told_to(check, backend):
    good = leaves(shapes=[(5,), (129,)], dtypes=[F32, F16])
    for n, (in_x, in_y) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        x = spoiled(good, n % 2, 1, BAD[n % 3]) if in_x else good
        y = spoiled(good, 1 - n % 2, 0, BAD[n % 3]) if in_y else good
        _, found_inf = call(axpby, 1, x, 1, y, check=check, backend=backend)
        assert bool(found_inf) is oracle.axpby(1, x, 1, y, check=check)[1]


@each_backend
def test_only_inputs_are_looked_at(backend):
    """Not the product, nor its rounding; but an infinite input is, times 0 too."""
    big = [np.full(130, 60000, np.float16), np.full(3, 60000, np.float16)]
    got, found_inf = call(scale, big, 2.0, backend=backend)
    assert np.isinf(np.float32(got[0])).all() and not found_inf
    got, found_inf = call(axpby, 1.0, big, 1.0, big, backend=backend)
    assert np.isinf(np.float32(got[1])).all() and not found_inf
    bad = spoiled(big, 0, 0.5, np.inf)
    assert call(axpby, 0.0, bad, 1.0, big, backend=backend)[1]


@each_backend
@pytest.mark.parametrize("tree", [{}, [], None, {"a": jnp.zeros((0, 3))}], ids=str)
def test_nothing_is_finite_and_has_norm_zero(tree, backend):
    got, found_inf = scale(tree, 2.0, backend=backend)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert (found_inf.dtype, bool(found_inf)) == (jnp.bool_, False)
    assert not axpby(1.0, tree, 2.0, tree, backend=backend)[1]
    total, each = l2norm(tree, per_tensor=True, backend=backend)
    assert total == l2norm(tree, backend=backend) == 0
    assert total.dtype == F32
    assert jax.tree.structure(each) == jax.tree.structure(tree)


ONES = {"w": {"kernel": jnp.ones(3)}}


@pytest.mark.message
def test_errors_say_where_and_what_may_be():
    for leaf in (jnp.ones(2, jnp.int32), 1.0):
        tree = {"w": {"kernel": leaf}}
        for f in (lambda x: scale(x, 2.0), lambda x: axpby(1.0, x, 1.0, x), l2norm):
            with pytest.raises(TypeError, match=r"(?s)'w'.*'kernel'"):
                f(tree)
    for y in ({"w": {}}, {"w": {"kernel": jnp.ones(4)}}):
        with pytest.raises(ValueError, match="w"):
            axpby(1.0, ONES, 1.0, y)
    with pytest.raises(ValueError, match="(?s)'both'.*'a'"):
        axpby(1.0, ONES, 1.0, ONES, check="a")
