"""Checks of the numbers that callers and checkpoints give for scales and counts."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jamp._core.tree import is_traced, path_string

# In this range, a scale and its reciprocal are normal float32 numbers. A scale of 0
# never recovers (apex issues 834 and 930), and XLA flushes subnormal numbers to zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
_COUNTS = ("unskipped", "hysteresis", "consecutive_skips")


def number(value: Any, text: bool = False) -> float:
    """Converts a number or a scalar array to a float, and other objects to NaN.

    It converts a string such as "128.0" only if `text` is set.
    """
    if isinstance(value, bool | bytes | type) or (isinstance(value, str) and not text):
        return math.nan
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def is_scale(value: float) -> bool:
    """Returns whether float32 can represent both a loss scale and its reciprocal."""
    return SMALLEST_SCALE <= value <= LARGEST_SCALE


def check_scale(name: str, value: Any) -> None:
    """Raises unless a loss scale, or each scale of an ensemble, is in range."""
    if not all(map(is_scale, numbers_in(value))):
        limits = "a finite number between 2**-126 and 2**126"
        raise ValueError(f"`{name}` must be {limits}, got {value!r}.")


def check_count(name: str, value: Any, least: int = 0) -> None:
    """Raises unless a count, or each count of an ensemble, is a whole number."""
    if not all(least <= x < math.inf and x % 1 == 0 for x in numbers_in(value)):
        raise ValueError(
            f"`{name}` must be an integer of at least {least}, got {value!r}."
        )


def numbers_in(value: Any) -> list[float]:
    """Returns the numbers of an array. A tracer or a shape has none."""
    if is_traced(value) or isinstance(value, jax.ShapeDtypeStruct):
        return []
    is_ensemble = getattr(value, "ndim", 0)
    return [number(x) for x in (np.ravel(value) if is_ensemble else [value])]


def check_scale_state(where: str, entry: Mapping[str, Any]) -> None:
    """Raises if a scale is out of range, or a counter is not a count.

    `where` names the entry, such as "loss_scaler0".
    """
    for name, value in entry.items():
        if name in ("scale", "loss_scale"):
            check_scale(f"{where}/{name}", value)
        elif name in _COUNTS:
            check_count(f"{where}/{name}", value)


def check_counters(names: Mapping[str, Any]) -> None:
    """Raises if `step` or `skipped_steps` in the names of a state is not a count."""
    counters = {name: names[name] for name in ("step", "skipped_steps")}
    for path, value in jax.tree_util.tree_leaves_with_path(counters):
        check_count(path_string(path), value)
