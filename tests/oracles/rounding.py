"""The hash of step, leaf and element, and stochastic rounding, in NumPy.

Imports neither JAX nor jamp. The hash is lowbias32 (github.com/skeeto/hash-prospector),
to which the numbers are added one after the other. The rounding compares distances to
the bfloat16 below and above, in float64.
"""

from typing import Any

import numpy as np

TWO_32 = 2**32


def lowbias32(x: Any) -> np.ndarray:
    """Hashes in 64 bits, where no product wraps."""
    x = (np.asarray(x, np.uint64) + np.uint64(0x9E3779B9)) % TWO_32
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = x ^ x // np.uint64(2**shift)
        x = x * np.uint64(factor) % TWO_32
    return x ^ x // np.uint64(2**16)


def random_16(step: int, leaf: int, elements: np.ndarray, place: int) -> np.ndarray:
    """Returns 16 bits per element; places: moments 0 and 1, the weight 2."""
    hashed = lowbias32(lowbias32(step) + np.uint64(leaf))
    hashed = lowbias32(hashed + np.asarray(elements, np.uint64))
    if place == 2:
        hashed = lowbias32(hashed)
    return hashed // 2**16 if place == 1 else hashed % 2**16


def rounded(x: np.ndarray, random: np.ndarray) -> np.ndarray:
    """Rounds float32 to bfloat16, and returns float64.

    It rounds away from zero if the discarded fraction plus `random` reaches one.
    """
    x = np.asarray(x, np.float32).astype(np.float64)
    largest = float.fromhex("0x1.fep127")
    size = np.abs(np.where(np.isfinite(x), x, 0))
    exponent = np.maximum(np.frexp(size)[1] - 1, -126)
    unit = np.ldexp(1.0, exponent - 7)
    below = np.floor(size / unit) * unit
    gone = (size - below) / unit * 65536
    near = np.minimum(below + np.where(gone + random >= 65536, unit, 0), largest)
    return np.copysign(np.where(np.isfinite(x), near, np.abs(x)), x)
