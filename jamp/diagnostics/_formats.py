"""What part of an array a narrow float format would lose."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

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

    def __add__(self, other: "Loss") -> "Loss":  # pyright: ignore[reportIncompatibleMethodOverride]
        return Loss(*(a + b for a, b in zip(self, other, strict=True)))


class Counts(NamedTuple):
    """Of some numbers, by format.

    Attributes:
        nonzero: how many are neither zero nor NaN.
        losses: by the names of `FORMATS`.
    """

    nonzero: int
    losses: dict[str, Loss]

    def __add__(self, other: "Counts") -> "Counts":  # pyright: ignore[reportIncompatibleMethodOverride]
        losses = {name: self.losses[name] + other.losses[name] for name in FORMATS}
        return Counts(self.nonzero + other.nonzero, losses)


NOTHING = Counts(0, dict.fromkeys(FORMATS, Loss(0, 0, 0)))


def counts_of(x: Any, factor: float = 1.0) -> Counts:
    """What each format would lose of a float array times a factor."""
    nonzero, *losses = np.asarray(_counts(x, factor)).reshape(-1)
    rows = np.reshape(losses, (len(FORMATS), 3)).tolist()
    return Counts(
        int(nonzero), {n: Loss(*r) for n, r in zip(FORMATS, rows, strict=True)}
    )


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
