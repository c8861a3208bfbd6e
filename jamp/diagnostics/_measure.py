"""Measures the difference between an array and the right array."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jamp._core.dtypes import is_differentiable
from jamp.diagnostics._replay import Array

_BLOCK = 1 << 14  # numbers at a time, so that wide copies stay in the cache
_EXPONENT = 0x7F800000  # the bits of a float32's power of two


class Difference(NamedTuple):
    """The difference from the right array, for a row of `compare`."""

    error: float
    ulps: float = 0.0
    overflow: float = 0.0
    underflow: float = 0.0


@np.errstate(all="ignore")
def measure(a: Array, b: Array, half: Any, *, is_fp8: bool = False) -> Difference:
    """Compares an array with the right one, which may be wider.

    It ignores infinities in both arrays and the lowest numbers of masks. It removes the
    scale of an fp8 array, a power of two.
    """
    a, b = np.asarray(a), np.asarray(b)
    if not is_differentiable(b):
        return Difference(float(np.mean(a != b)))
    size, limits = max(b.size, 1), jnp.finfo(half)
    lowest = 0.0 if np.iscomplexobj(b) else float(np.min(b, initial=0))
    factor, sizes = 1.0, (norm(a), norm(b)) if is_fp8 else (0.0, 0.0)
    if min(sizes) > 0:
        factor = 2.0 ** round(math.log2(sizes[1] / sizes[0]))
    gaps = total = ulps = 0.0
    overflow = underflow = 0
    for x, y in zip(_blocks(a), _blocks(b), strict=True):
        x = x if factor == 1 else x * np.float32(factor)
        gap = np.abs(x - y)
        if lowest < -1e3 or not np.isfinite(gap).all():
            is_right = np.isfinite(y)
            good = np.isfinite(x) & is_right
            overflow += np.count_nonzero(is_right & ~np.isfinite(x))
            good &= (y > lowest / 2) | (lowest >= -1e3)
            x, y, gap = (np.where(good, z, 0) for z in (x, y, gap))
        if not x.all():
            underflow += np.count_nonzero((x == 0) & (y != 0))
        right = np.abs(y)
        floor = np.maximum(right, limits.tiny).astype(np.float32).view(np.int32)
        ulps = max(ulps, float(np.max(gap / (floor & _EXPONENT).view(np.float32))))
        gaps, total = gaps + _square(gap), total + _square(right)
    error = math.sqrt(gaps / total) if total else 0.0
    return Difference(
        error=math.inf if overflow else error,
        ulps=ulps / float(limits.eps),
        overflow=overflow / size,
        underflow=underflow / size,
    )


def norm(x: Array) -> float:
    """Returns the norm of the finite numbers of an array."""
    sizes = (np.abs(block) for block in _blocks(np.asarray(x)))
    return math.sqrt(sum(_square(size[np.isfinite(size)]) for size in sizes))


def _square(x: np.ndarray) -> float:
    if not 1e-30 < (found := np.vdot(x, x)) < np.inf:
        found = np.vdot(x.astype(np.float64), x)  # float32 squares would overflow
    return float(found)


def _blocks(x: np.ndarray) -> Iterator[np.ndarray]:
    """Returns the numbers of an array, in float32 or wider."""
    flat, dtype = x.reshape(-1), x.dtype if x.dtype.itemsize > 2 else np.float32
    for i in range(0, flat.size, _BLOCK):
        yield flat[i : i + _BLOCK].astype(dtype, copy=False)
