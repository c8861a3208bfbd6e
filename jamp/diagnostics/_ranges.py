"""What is in an array: its range, and how much of it is not finite."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

type Array = jax.Array | np.ndarray


class Range(NamedTuple):
    """The values of an array.

    Attributes:
        dtype: its dtype.
        shape: its shape.
        low: the least finite value; None if there is none.
        high: the greatest finite value; likewise.
        nans: how many are NaN.
        infs: how many are infinite.
    """

    dtype: str
    shape: tuple[int, ...]
    low: float | None
    high: float | None
    nans: int
    infs: int

    @property
    def magnitude(self) -> float:
        """The largest absolute value of the finite ones; 0 if there is none."""
        return max(abs(self.low or 0.0), abs(self.high or 0.0))

    def __str__(self) -> str:
        shape = ", ".join(map(str, self.shape))
        bad = [(self.nans, "NaN"), (self.infs, "inf")]
        parts = [f"{count:,} {word}" for count, word in bad if count]
        size = int(np.prod(self.shape))
        of = f" of {size:,}" if parts and size > 1 else ""
        counts = " and ".join(parts) + of if size > 1 or not parts else parts[0][2:]
        within = "" if self.low is None else f"in [{self.low:.4g}, {self.high:.4g}]"
        return f"{self.dtype}[{shape}] {', '.join(filter(None, (within, counts)))}"


def is_float(x: object) -> bool:
    """Whether it is an array that can hold inf and NaN."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.inexact)


def not_finite(x: object) -> tuple[bool, bool]:
    """Whether an array holds NaN, and whether it holds infinities."""
    nan, inf = np.asarray(_flags(x)) if is_float(x) else (False, False)
    return bool(nan), bool(inf)


def range_of(x: Array, shape: tuple[int, ...] | None = None) -> Range:
    """The range of a float array.

    Args:
        x: the array.
        shape: what to call its shape, if it is another than the user knows.
    """
    low, high, finite, nans, infs = _statistics(x)
    some = bool(finite)
    return Range(
        dtype=str(x.dtype),
        shape=np.shape(x) if shape is None else shape,
        low=float(low) + 0.0 if some else None,  # a zero without its sign
        high=float(high) + 0.0 if some else None,
        nans=int(nans),
        infs=int(infs),
    )


@jax.jit
def _flags(x):
    return jnp.stack([jnp.isnan(x).any(), jnp.isinf(x).any()])


@jax.jit
def _statistics(x):
    nan, inf = jnp.isnan(x), jnp.isinf(x)
    x = jnp.abs(x) if jnp.iscomplexobj(x) else x
    x = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    finite = ~(nan | inf)
    low = jnp.where(finite, x, jnp.inf).min(initial=jnp.inf)
    high = jnp.where(finite, x, -jnp.inf).max(initial=-jnp.inf)
    return low, high, finite.any(), nan.sum(), inf.sum()
