"""Checks of the numbers that callers and checkpoints give for scales and counts."""

from typing import Any

import jax
import numpy as np

from jamp._core.tree import is_traced

# In this range, a scale and its reciprocal are normal numbers of float32. A scale of 0
# never recovers (apex issues 834 and 930), and XLA flushes a subnormal number to zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
_FLOAT32_MAX = float(np.finfo(np.float32).max)


def number(value: Any, text: bool = False) -> float:
    """Converts a number or a scalar array to a float, and anything else to NaN."""
    if isinstance(value, bool | bytes | type) or (isinstance(value, str) and not text):
        return float("nan")
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return float("nan")


def is_scale(value: float) -> bool:
    """Whether float32 can represent both a loss scale and its reciprocal."""
    return SMALLEST_SCALE <= value <= LARGEST_SCALE


def check_scale(name: str, value: Any, capped: bool = False) -> None:
    """Raises unless a value, or each value in the array of an ensemble, is in range.

    Shapes and tracers pass. If the scale is `capped` later, it may be larger.
    """
    if not is_known(value):
        return
    for x in map(number, _members(value)):
        if not (is_scale(x) or (capped and LARGEST_SCALE < x <= _FLOAT32_MAX)):
            limit = "3.4e38, float32's largest" if capped else "2**126"
            raise ValueError(
                f"`{name}` must be a finite number between 2**-126 and {limit}, got "
                f"{value!r}."
            )


def check_count(name: str, value: Any, least: int = 0) -> None:
    """Raises unless a value, or each value of an ensemble, is a whole number."""
    if not is_known(value):
        return
    for x in map(number, _members(value)):
        if not (least <= x < float("inf") and x % 1 == 0):
            raise ValueError(
                f"`{name}` must be an integer of at least {least}, got {value!r}."
            )


def is_known(value: object) -> bool:
    """Whether `value` has a value now, unlike a tracer or a shape."""
    return not is_traced(value) and not isinstance(value, jax.ShapeDtypeStruct)


def _members(value: Any) -> Any:
    return np.ravel(value) if getattr(value, "ndim", 0) else [value]
