"""Test that a cast rounds floats and nothing else, for arbitrary trees and bits."""

import collections
import os

import jax
import ml_dtypes
import numpy as np
import pytest
from flax.core import freeze
from hypothesis import given, settings, strategies as st

import jamp
from tests.support.bits import assert_same_bits, bits

pytestmark = pytest.mark.slow

few = settings(max_examples=3000 if "JAMP_FUZZ" in os.environ else 10)
Pair = collections.namedtuple("Pair", "left right")
HALVES = {"O2": np.dtype("float16"), "O5": np.dtype(ml_dtypes.bfloat16)}

SHAPES = st.sampled_from([(), (1,), (3,), (2, 2), (0,)])
PATTERNS = st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4)


def from_bits(shape, patterns):
    """Returns any float32 numbers, including subnormals, inf and NaN payloads."""
    words = np.array(patterns, np.uint32)[: np.prod(shape, dtype=int)]
    return words.view(np.float32).reshape(shape)


FLOATS = st.builds(from_bits, SHAPES, PATTERNS)
OTHERS = st.sampled_from(
    [np.arange(3, dtype=np.int32), np.array([True]), np.array([1 + 2j], "F"), None]
)


def trees(leaves):
    names = st.sampled_from(["w", "kernel", "a b", "é"])
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(names, inner, max_size=3)
            | st.dictionaries(names, inner, min_size=1, max_size=2).map(freeze)
            | st.builds(Pair, inner, inner)
            | st.tuples(inner)
        ),
        max_leaves=6,
    )


def rounded(x, half):
    """Rounds to nearest even, clipped to the largest number."""
    largest = np.float32(ml_dtypes.finfo(half).max)
    with np.errstate(all="ignore"):
        return np.clip(x, -largest, largest).astype(half)


def assert_rounds(got, x, half):
    got, x = np.asarray(got), np.asarray(x)
    wanted = rounded(x, half)
    assert got.dtype == half and got.shape == x.shape
    flushed = np.abs(x) < 2.0**-126
    numbers = ~np.isnan(x)
    np.testing.assert_array_equal(np.isnan(got), ~numbers)
    same = got.view(np.uint16) == wanted.view(np.uint16)
    assert np.all(same | ~numbers | flushed & (np.abs(got) <= 2.0**-126)), (got, x)


@few
@given(trees(FLOATS | OTHERS), st.sampled_from(list(HALVES.values())))
def test_a_cast_rounds_floats_and_touches_nothing_else(tree, half):
    got = jamp.cast_model(tree, half)
    assert jax.tree.structure(got) == jax.tree.structure(tree)
    for x, y in zip(jax.tree.leaves(tree), jax.tree.leaves(got), strict=True):
        if x.dtype == np.float32:
            assert_rounds(y, x, half)
        else:
            assert y is x or bits(y) == bits(x) and y.dtype == x.dtype
    assert_same_bits(jamp.cast_model(got, half), got)
