"""Test `store_remainder=True`, which stores 16 bits beside each bfloat16 param."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jamp
from pallas_kernels import join, split_float32

BF16 = ml_dtypes.bfloat16
LARGEST = 0x7F7F7FFF  # of the float32 numbers that do not round to infinity
SGD = optax.sgd(1.0)
stored = functools.partial(jamp.master_weights, store_remainder=True)


# Zero, denormals, the smallest normal, 1 and the next number, the largest of a binade
# and of all, infinity, NaNs and an ordinary number.
HIGHS = [0, 1, 0x7F, 0x80, 0x3F80, 0x3F81, 0x40FF, 0x7F7E, 0x7F7F, 0x7F80]
HIGHS += [0x7F81, 0x7FC0, 0x7FFF, 0x3DE1]
LOWS = np.arange(2**16, dtype=np.uint32)


def upper_bits(x):
    return np.asarray(x).view(np.uint16)


def test_split_and_join_are_exact_for_all_lower_halves():
    uppers = np.uint32([upper | sign for upper in HIGHS for sign in (0, 0x8000)])
    u = (uppers[:, None] << 16) | LOWS
    x = u.view(np.float32)
    high, low, joined = map(np.asarray, jax.jit(there_and_back)(x))
    assert (high.dtype, low.dtype, joined.dtype) == (BF16, np.uint16, np.float32)
    magnitude = u & 0x7FFFFFFF
    finite = magnitude <= LARGEST
    np.testing.assert_array_equal(joined.view(np.uint32)[finite], u[finite])
    # Rounds to nearest, ties away from zero.
    rounded = ((u.astype(np.uint64) + 0x8000) >> 16).astype(np.uint16)
    np.testing.assert_array_equal(upper_bits(high)[finite], rounded[finite])
    np.testing.assert_array_equal(low[finite], (u & 0xFFFF)[finite])
    with np.errstate(over="ignore", invalid="ignore"):
        nearest = x.astype(BF16)
    decided = finite & (u & 0xFFFF != 0x8000)
    assert (upper_bits(high) == upper_bits(nearest))[decided].all()
    # Numbers that would round to infinity become the largest.
    beyond = ~finite & (magnitude <= 0x7F800000)
    clamped = np.copysign(np.uint32(LARGEST).view(np.float32), x)
    np.testing.assert_array_equal(joined[beyond], clamped[beyond])
    assert np.isfinite(high.astype(np.float32)[beyond]).all()
    # NaNs become one NaN.
    nan = np.isnan(x)
    assert np.isnan(joined[nan]).all() and np.isnan(high.astype(np.float32)[nan]).all()
    assert set(upper_bits(high)[nan] & 0x7FFF) == {0x7FC0} and not low[nan].any()


def there_and_back(x):
    high, low = split_float32(x)
    return high, low, join(high, low)


def test_other_params_are_refused():
    half, wide = {"v": jnp.ones(1, BF16), "w": jnp.ones(1, "f2")}, {"w": jnp.ones(1)}
    float16 = r"bfloat16.*\['w'\].*float16.*O5"
    for call, text in [
        (lambda: stored(SGD).init(half), float16),
        (lambda: stored(SGD).init(wide), "bfloat16.*float32.*cast"),
        (lambda: jamp.initialize(wide, SGD, "O2", store_remainder=True), float16),
    ]:
        with pytest.raises(ValueError, match=f"store_remainder.*{text}"):
            call()
