"""Test the launcher on the CPU, where an emulator finds races and bad accesses."""

import dataclasses
import functools
import itertools
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import Job, Options, Results, run
from pallas_kernels.mosaic import launch as launcher
from tests.pallas_kernels import kernels
from tests.pallas_kernels.kernels import BF16, F16, F32

pytestmark = pytest.mark.slow

INTERPRET = Options(backend="interpret")
# Sizes around a warpgroup, and around one, two and four blocks.
SIZES = (128, 129, 255, 1023, 1024, 1025, 1152, 2047, 2048 + 127, 4095, 4096, 4097)


@pytest.fixture(autouse=True)
def no_races(capsys):
    """Fails on races, which JAX 0.11 prints and newer versions raise."""
    yield
    assert "RACE" not in capsys.readouterr().out


def test_no_kernel_has_a_custom_jvp():
    # Mosaic on JAX 0.11 cannot lower one. This case joins, splits and rounds.
    case = kernels.CASES["narrow adam, split, bf16"]
    call = functools.partial(case.call, INTERPRET)
    assert "custom_jvp" not in str(jax.make_jaxpr(call)(*case.make((200,))))


def launch(job, leaves) -> Results:
    return jax.jit(lambda: run(job, leaves, INTERPRET))()


def integers(shape, dtype, seed):
    """Returns integers, whose sums are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(-8, 9, shape), dtype)


@pytest.mark.parametrize(
    "shapes",
    [
        [(n,) for n in SIZES[::-1]],  # launches sort them
        [(1025,)],
        # XLA steps leaves below 128 elements, which would leave threads idle.
        [(), (0,), (3, 0, 5), (127,), (2, 3, 5, 7), (1031,)],
        [(128 + 50 * (k % 3),) for k in range(70)],  # more than fit in a launch
    ],
    ids=lambda shapes: str(shapes[:4]),
)
def test_leaves_of_all_sizes(shapes):
    # LAMB has two passes, sums per leaf and half copies. SGD has two kernels.
    for name in ("lamb, copied, bf16", "sgd, copied, bf16"):
        case = kernels.CASES[name]
        args = case.make(shapes)
        found, wanted = (
            jax.jit(functools.partial(case.call, options))(*args)
            for options in (INTERPRET, Options(backend="xla"))
        )
        kernels.assert_close(found, wanted)


def test_other_dtypes_go_through_xla():
    with jax.enable_x64(True):
        x = jnp.arange(300, dtype=jnp.float64) + 2.0**-40
        assert not launcher.fits({"x": x})
        job = Job(lambda numbers, tag, c: {"x": c["x"] * 2})
        results = run(job, [{"x": x}, {"x": jnp.ones(300, F32)}], INTERPRET)
        assert results[0][0]["x"].dtype == jnp.float64
        np.testing.assert_array_equal(results[0][0]["x"], 2 * np.asarray(x))
        assert (results[0][1]["x"] == 2).all()


# Reductions write no leaf, so their blocks are larger.
READS = Job(
    lambda numbers, tag, c: {"sum": c["x"], "max": jnp.abs(c["x"])},
    reductions={"sum": "sum", "max": "max"},
)
READ_SIZES = (127, 128, 129, 1025, 4095, 4096, 4097, 8191, 8192, 8192 + 255)
READ_SIZES += (9000,) * 3


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
def test_reductions_of_each_leaf(dtype):
    """Checks sums and maxima of each leaf and of all. Three leaves have one size."""
    leaves = [{"x": integers(n, dtype, k)} for k, n in enumerate(READ_SIZES)]
    sums, largest = (
        [f(np.asarray(x["x"], np.float64)) for x in leaves]
        for f in (np.sum, lambda x: abs(x).max())
    )
    reductions = launch(READS, leaves)[1]
    np.testing.assert_array_equal(reductions["sum"], sums)
    np.testing.assert_array_equal(reductions["max"], largest)
    if dtype == BF16:
        totals = launch(dataclasses.replace(READS, totals=True), leaves)[1]
        assert totals["sum"].shape == totals["max"].shape == ()
        assert totals["sum"] == sum(sums) and totals["max"] == max(largest)


def touched(n, block, vec):
    """Returns the windows of each grid step as (start, size, vec, seen)."""
    steps = max(n // block, 1)
    if n % block == 0:
        return [[(k * block, block, vec, 0)] for k in range(steps)]
    last = [
        (w.index.start, w.size, w.vec, w.seen)
        for w in launcher._last_windows(n, block, vec)
    ]
    return [[(k * block, block, vec, 0)] for k in range(steps - 1)] + [last]


@hypothesis.given(
    st.integers(128, 40_000), st.sampled_from([1024, 4096]), st.sampled_from([4, 8])
)
@hypothesis.example(128, 1024, 4).via("the least")
@hypothesis.example(4096 + 127, 4096, 8).via("a remainder of less than a warpgroup")
def test_windows_cover_a_leaf_once(n, block, vec):
    counted = np.zeros(n, int)
    owner = np.full(n, -1)
    for step, windows in enumerate(touched(n, block, vec)):
        for start, size, width, seen in windows:
            assert 0 <= start and start + size <= n
            # All threads access 16 or 8 aligned bytes, or single elements.
            assert size % (width * launcher.WARPGROUP) == 0
            assert width == 1 or start % width == 0
            counted[start + seen : start + size] += 1
            # Steps run in any order, so they must not overlap.
            assert set(owner[start : start + size]) <= {-1, step}
            owner[start : start + size] = step
    assert (counted == 1).all()


@hypothesis.given(
    st.lists(st.sampled_from([128, 130, 768, 4096, 2**20]), max_size=300),
    st.integers(1, 9),
)
@hypothesis.example([768, 2**20] * 150, 5).via("10 launches, 8 of them of two kinds")
def test_chunks_have_every_leaf_once_and_group_equal_sizes(sizes, columns):
    chunks = launcher.chunks(sizes, columns)
    assert sorted(itertools.chain(*chunks)) == list(range(len(sizes)))
    most = max(map(len, chunks), default=1)
    assert all(chunks) and most * columns <= 160
    assert len(chunks) == math.ceil(len(sizes) / min(64, 160 // columns))
    # Less than one launch of leaves per size may be in mixed or partial launches.
    mixed = [c for c in chunks if len({sizes[k] for k in c}) > 1 or len(c) < most]
    assert sum(map(len, mixed)) <= len(set(sizes)) * most


def test_which_leaves_fit_a_kernel():
    def fits(n, dtype):
        return launcher.fits({"x": jax.ShapeDtypeStruct((n,), dtype)})

    assert not fits(0, F32) and not fits(127, F32) and fits(128, F32)
    assert all(fits(1000, d) for d in (F16, BF16, F32, jnp.uint16))
    assert not any(fits(1000, d) for d in (jnp.int32, jnp.int8, jnp.uint32))
    assert fits(2**31 - 1, BF16)  # int32 still counts the elements
    assert not fits(2**31, BF16) and not fits(2**40, BF16)
    narrow, wide = (jax.ShapeDtypeStruct((300,), d) for d in (BF16, jnp.int32))
    assert not launcher.fits({"x": narrow, "y": wide})
