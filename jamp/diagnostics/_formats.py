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
    """How many of some numbers that are not zero a format would lose."""

    zero: int  # those that would become zero
    subnormal: int  # those that would keep a part of their digits
    over: int  # those beyond the largest finite number


class Counts(NamedTuple):
    """Of some numbers, by format."""

    nonzero: int  # how many are neither zero nor NaN
    losses: dict[str, Loss]  # by the names of `FORMATS`

    def __add__(self, other: "Counts | None") -> "Counts":  # pyright: ignore[reportIncompatibleMethodOverride]
        if other is None:
            return self
        losses = {
            name: Loss(*map(operator.add, loss, other.losses[name]))
            for name, loss in self.losses.items()
        }
        return Counts(self.nonzero + other.nonzero, losses)


def counts_of(x: Array, factor: float = 1.0) -> Counts:
    """What each format would lose of a float array times a factor."""
    nonzero, losses = jax.tree.map(int, jax.device_get(_counts(x, factor)))
    return Counts(nonzero, losses)


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
    losses = {}
    for name in FORMATS:
        least, normal, most = (jnp.float32(limit) for limit in limits(name))
        zero = some & (size <= least)
        subnormal = some & (size > least) & (size < normal)
        losses[name] = Loss(*map(jnp.sum, (zero, subnormal, some & (size >= most))))
    return some.sum(), losses
