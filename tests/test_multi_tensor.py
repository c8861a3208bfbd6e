"""jamp.multi_tensor against amp_C in float64: results, flags, errors."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jamp import multi_tensor
from tests.mixed_leaves import BACKENDS, BF16, F16, F32, FAST, SHAPES
from tests.oracles import multi_tensor as oracle

DTYPES = [F16, BF16, F32]
# Half a unit in the last place, for a result rounded from float32; two roundings there.
ROUNDING = {F16: 2.0**-11, BF16: 2.0**-8, F32: 2.0**-23}
# A sum of squares of 8192 numbers, by blocks or not, and a root.
SUM = 2.0**-20


def leaves(dtypes=DTYPES, seed=0, shapes=SHAPES):
    """Every shape, in dtypes that take turns."""
    rng = np.random.default_rng(seed)
    return [
        np.asarray(rng.normal(size=shape), np.float32).astype(dtypes[k % len(dtypes)])
        for k, shape in enumerate(shapes)
    ]


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=FAST)
def compiled(function, options, *args):
    return function(*args, **dict(options))


def call(function, *args, **options):
    arrays = [jax.tree.map(jnp.asarray, x) for x in args]
    return compiled(function, tuple(options.items()), *arrays)


def assert_rounded(got: Any, want: Any, dtypes: Any) -> None:
    for x, y, dtype in zip(got, want, dtypes, strict=True):
        assert (x.dtype, x.shape) == (dtype, y.shape)
        rtol = ROUNDING[jnp.dtype(dtype).type]
        np.testing.assert_allclose(np.float64(np.float32(x)), y, rtol, 1e-6)


# Every shape meets every dtype in the course of the turns.
TURNS = {str(k): [*DTYPES[k:], *DTYPES[:k]] for k in range(3)}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turn", TURNS)
def test_scale(turn, backend):
    tree = leaves(TURNS[turn])
    got, found_inf = call(multi_tensor.scale, tree, 1 / 3, backend=backend)
    want, flag = oracle.scale(tree, 1 / 3)
    assert_rounded(got, want, [x.dtype for x in tree])
    assert (found_inf.dtype, found_inf.shape) == (jnp.bool_, ())
    assert bool(found_inf) is flag is False


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turn", TURNS)
def test_axpby(turn, backend):
    x, y = leaves(TURNS[turn]), leaves(TURNS["1"], seed=1)
    got, found_inf = call(multi_tensor.axpby, 0.3, x, -1.7, y, backend=backend)
    want, flag = oracle.axpby(0.3, x, -1.7, y)
    assert_rounded(got, want, [leaf.dtype for leaf in y])
    assert (found_inf.dtype, found_inf.shape) == (jnp.bool_, ())
    assert bool(found_inf) is flag is False


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("turn, divisor", [("0", None), ("1", 3.0), ("2", 1024.0)])
def test_l2norm(turn, divisor, backend):
    tree = leaves(TURNS[turn])
    options: dict[str, Any] = {"backend": backend}
    if divisor is not None:
        options["scale"] = divisor
    total, each = call(multi_tensor.l2norm, tree, per_tensor=True, **options)
    want, wants = oracle.l2norm(tree, per_tensor=True, scale=divisor)
    norms = {"each": (each, wants), "total": ([total], [want])}
    if divisor == 3.0:  # the total alone, for which partial results are added up
        norms["alone"] = [call(multi_tensor.l2norm, tree, **options)], [want]
    for x, y in (pair for got in norms.values() for pair in zip(*got, strict=True)):
        assert (x.dtype, x.shape) == (F32, ())
        np.testing.assert_allclose(np.float64(x), y, SUM)
    assert total > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_many_leaves(backend):
    """55 small ones: concatenated, or not."""
    tree = leaves(DTYPES, shapes=[(5,), (), (0,), (2, 3), (31,)] * 11)
    got, found_inf = call(multi_tensor.scale, tree, 2.0, backend=backend)
    assert_rounded(got, oracle.scale(tree, 2.0)[0], [x.dtype for x in tree])
    assert not found_inf
    tree[-1][-1] = np.nan
    assert call(multi_tensor.scale, tree, 2.0, backend=backend)[1]
    assert np.isnan(call(multi_tensor.l2norm, tree, backend=backend))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["scale", "axpby"])
def test_results_of_another_dtype(name, dtype):
    tree = leaves()
    if name == "scale":
        got, _ = call(multi_tensor.scale, tree, 0.7, dtype=dtype)
        want, _ = oracle.scale(tree, 0.7)
    else:
        got, _ = call(multi_tensor.axpby, 0.7, tree, 1.1, tree, dtype=dtype)
        want, _ = oracle.axpby(0.7, tree, 1.1, tree)
    assert_rounded(got, want, [dtype] * len(tree))


def test_products_are_those_of_float32():
    # 300 * 300 is beyond float16, a third of it is not; 1/3 is not rounded to half.
    tree = [np.float16([300.0, 1.0]), np.ones(2, ml_dtypes.bfloat16)]
    got, _ = call(multi_tensor.axpby, 300.0, tree, -200.0, tree)
    np.testing.assert_array_equal(np.float32(got[0]), [30000, 100])
    got, _ = call(multi_tensor.scale, tree, 1 / 3, dtype=F32)
    np.testing.assert_allclose(got[1], 1 / 3, 2.0**-23)


BAD = [np.inf, -np.inf, np.nan]
# Leaves that kernels take and that they do not, in whole blocks and not.
SIZES = [1, 127, 128, 1024 + 1, 4096 * 2 + 130]


def spoiled(tree: Any, leaf: int, place: float, bad: float) -> Any:
    tree = [x.copy() for x in tree]
    tree[leaf][round(place * (tree[leaf].size - 1))] = bad
    return tree


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_bad_element_is_found_wherever_it_is(dtype, backend):
    tree = leaves([dtype], shapes=[(n,) for n in SIZES])
    places = [(k, place) for k in range(len(SIZES)) for place in (0, 0.5, 1)]
    if backend == "interpret":  # takes long; the first, the middle and the last
        places = [(2, 0), (3, 1), (4, 0.5), (4, 1), (1, 1)]
    for n, (leaf, place) in enumerate(places):
        bad = spoiled(tree, leaf, place, BAD[n % 3])
        got, found_inf = call(multi_tensor.scale, bad, 0.5, backend=backend)
        assert found_inf, (leaf, place)
        want = oracle.scale(bad, 0.5)[0]
        np.testing.assert_array_equal(np.isnan(got[leaf]), np.isnan(want[leaf]))
        assert np.sum(~np.isfinite(np.float32(got[leaf]))) == 1
    assert not call(multi_tensor.scale, tree, 0.5, backend=backend)[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("check", ["both", "x", "y"])
def test_axpby_looks_where_it_is_told_to(check, backend):
    good = leaves([F32, F16], shapes=[(5,), (129,)])
    for n, (in_x, in_y) in enumerate([(0, 0), (1, 0), (0, 1), (1, 1)]):
        x = spoiled(good, n % 2, 1, BAD[n % 3]) if in_x else good
        y = spoiled(good, 1 - n % 2, 0, BAD[n % 3]) if in_y else good
        _, found_inf = call(
            multi_tensor.axpby, 1, x, 1, y, check=check, backend=backend
        )
        assert bool(found_inf) is oracle.axpby(1, x, 1, y, check=check)[1]


@pytest.mark.parametrize("backend", BACKENDS)
def test_only_inputs_are_looked_at(backend):
    """Not the product, nor its rounding; but an infinite input is, times 0 too."""
    big = [np.full(130, 60000, np.float16), np.full(3, 60000, np.float16)]
    got, found_inf = call(multi_tensor.scale, big, 2.0, backend=backend)
    assert np.isinf(np.float32(got[0])).all() and not found_inf
    got, found_inf = call(multi_tensor.axpby, 1.0, big, 1.0, big, backend=backend)
    assert np.isinf(np.float32(got[1])).all() and not found_inf
    bad = spoiled(big, 0, 0.5, np.inf)
    assert call(multi_tensor.axpby, 0.0, bad, 1.0, big, backend=backend)[1]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", BAD)
def test_norms_are_not_finite_where_an_element_is_not(bad, backend):
    tree = spoiled(leaves([F16], shapes=[(5,), (129,)]), 1, 1, bad)
    total, each = call(multi_tensor.l2norm, tree, per_tensor=True, backend=backend)
    assert not np.isfinite(total) and not np.isfinite(each[1])
    assert np.isfinite(each[0])
    assert np.isnan(total) == np.isnan(bad)


def test_norms_of_what_squares_out_of_half():
    tree = [np.full(4, 60000, np.float16), np.full(4, 2.0**-24, np.float16)]
    _, each = call(multi_tensor.l2norm, tree, per_tensor=True)
    np.testing.assert_allclose(each, [120000, 2.0**-23], 1e-6)


def test_trees_keep_their_structure():
    tree = {"a": (jnp.ones(3), None), "b": [jnp.ones((), F16)]}
    for got in [
        multi_tensor.scale(tree, 2)[0],
        multi_tensor.axpby(1, tree, 1, tree)[0],
        multi_tensor.l2norm(tree, per_tensor=True)[1],
    ]:
        assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert multi_tensor.scale(tree, 2)[0]["b"][0].dtype == F16


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("tree", [{}, [], None, {"a": jnp.zeros((0, 3))}], ids=str)
def test_nothing_is_finite_and_has_norm_zero(tree, backend):
    got, found_inf = multi_tensor.scale(tree, 2.0, backend=backend)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    assert (found_inf.dtype, bool(found_inf)) == (jnp.bool_, False)
    assert not multi_tensor.axpby(1.0, tree, 2.0, tree, backend=backend)[1]
    total, each = multi_tensor.l2norm(tree, per_tensor=True, backend=backend)
    assert total == multi_tensor.l2norm(tree, backend=backend) == 0
    assert total.dtype == F32
    assert jax.tree.structure(each) == jax.tree.structure(tree)


def test_numbers_may_be_traced():
    tree = leaves([F32], shapes=[(5,)])
    f = jax.jit(lambda a, x: multi_tensor.axpby(a, x, 2 * a, x)[0])
    np.testing.assert_allclose(f(2.0, tree)[0], 6 * tree[0], 1e-6)
    g = jax.jit(lambda a, x: multi_tensor.l2norm(x, scale=a))
    np.testing.assert_allclose(g(4.0, tree), oracle.l2norm(tree, scale=4.0), 1e-6)


ONES = {"w": {"kernel": jnp.ones(3)}}


@pytest.mark.message
@pytest.mark.parametrize("leaf", [jnp.ones(2, jnp.int32), jnp.ones(2, bool), 1.0, "x"])
def test_leaves_are_arrays_of_floats(leaf):
    tree = {"w": {"kernel": leaf}}
    for call in [
        lambda: multi_tensor.scale(tree, 2.0),
        lambda: multi_tensor.axpby(1.0, tree, 1.0, tree),
        lambda: multi_tensor.l2norm(tree),
    ]:
        with pytest.raises(TypeError, match=r"(?s)'w'.*'kernel'"):
            call()


@pytest.mark.message
@pytest.mark.parametrize(
    "y", [{"w": {}}, {"w": {"kernel": jnp.ones(4)}}, {"w": jnp.ones(3)}], ids=str
)
def test_axpby_takes_two_trees_of_one_structure(y):
    with pytest.raises(ValueError, match="w"):
        multi_tensor.axpby(1.0, ONES, 1.0, y)


@pytest.mark.message
@pytest.mark.parametrize("check", ["a", "", None, 0])
def test_axpby_names_what_check_may_be(check):
    with pytest.raises(ValueError, match=f"(?s)'both'.*{check!r}"):
        multi_tensor.axpby(1.0, ONES, 1.0, ONES, check=check)


@pytest.mark.message
def test_an_unknown_backend_is_an_error():
    for call in [
        lambda: multi_tensor.scale(ONES, 2.0, backend="cuda"),
        lambda: multi_tensor.axpby(1.0, ONES, 1.0, ONES, backend="cuda"),
        lambda: multi_tensor.l2norm(ONES, backend="cuda"),
    ]:
        with pytest.raises(ValueError, match="(?s)mosaic.*cuda"):
            call()
