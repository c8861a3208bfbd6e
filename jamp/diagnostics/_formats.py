"""What part of an array a narrow float format would lose."""

import functools
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from jamp.diagnostics._ranges import Array

FORMATS = {
    "float16": np.float16,
    "bfloat16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
}


class Loss(NamedTuple):
    """How many of some numbers that are not zero a format would lose.

    Attributes:
        zero: those that would become zero.
        subnormal: those that would keep a part of their digits.
        over: those beyond the largest finite number.
    """

    zero: int
    subnormal: int
    over: int


class Counts(NamedTuple):
    """Of some numbers, by format.

    Attributes:
        nonzero: how many are neither zero nor NaN.
        losses: by the names of `FORMATS`.
    """

    nonzero: int
    losses: dict[str, Loss]

    def __add__(self, other: "Counts") -> "Counts":  # pyright: ignore[reportIncompatibleMethodOverride]
        pairs = {name: (loss, other.losses[name]) for name, loss in self.losses.items()}
        losses = {name: Loss(*map(operator.add, *pair)) for name, pair in pairs.items()}
        return Counts(self.nonzero + other.nonzero, losses)


def counts_of(x: Array, factor: float = 1.0) -> Counts:
    """What each format would lose of a float array times a factor."""
    nonzero, *losses = np.asarray(_counts(x, factor)).tolist()
    rows = zip(FORMATS, np.reshape(losses, (-1, 3)).tolist(), strict=True)
    return Counts(nonzero, {name: Loss(*row) for name, row in rows})


@functools.cache
def limits(name: str) -> tuple[float, float, float]:
    """Half the smallest number of a format, its smallest normal one, its largest one.

    What is at most half the smallest rounds to zero; what is less than half a step
    beyond the largest rounds to that.
    """
    info: Any = ml_dtypes.finfo(FORMATS[name])
    largest = float(info.max)
    step = largest - float(np.nextafter(info.max, info.dtype.type(0)))
    return float(info.smallest_subnormal) / 2, float(info.tiny), largest + step / 2


@jax.jit
def _counts(x, factor):
    size = jnp.abs(x).astype(jnp.float32) * jnp.float32(factor)
    some = (size > 0) & ~jnp.isnan(size)
    found = [some.sum()]
    for name in FORMATS:
        least, normal, most = (jnp.float32(limit) for limit in limits(name))
        zero = some & (size <= least)
        subnormal = some & (size > least) & (size < normal)
        found += [zero.sum(), subnormal.sum(), (some & (size >= most)).sum()]
    return jnp.stack(found)
