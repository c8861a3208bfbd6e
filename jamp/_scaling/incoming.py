"""Loss scales and counters from elsewhere: could training have come to them?"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jamp._core.tree import is_traced, path_string
from jamp._scaling.rules import LARGEST_SCALE, SMALLEST_SCALE, LossScaleRule

_COUNTS = ("unskipped", "hysteresis", "consecutive_skips")


def check_scale_state(
    where: str, entry: Mapping[str, Any], rule: LossScaleRule | None = None
) -> None:
    """Raises for a scale that makes NaN of the params, and for what is not a count.

    Args:
        where: what `entry` is called: "loss_scaler0".
        entry: the fields of a LossScaleState by name; the scale also as "loss_scale".
        rule: that it is for; None if that is another's.
    """
    for name, value in entry.items():
        if name in ("scale", "loss_scale"):
            check_scale_value(f"{where}/{name}", value)
        elif name in _COUNTS:
            check_count(f"{where}/{name}", value)
    most = getattr(rule, "hysteresis", None)
    value = entry.get("hysteresis")
    if most is not None and is_known(value) and max(_numbers(value)) > most:
        raise ValueError(
            f"{where}/hysteresis is {value}, more than the {most} of the state's rule: "
            f"pass loss_scale=jamp.DynamicLossScale(hysteresis=...) to jamp.initialize "
            f"as the run that saved it did, or set the value to {most}."
        )


def check_counters(names: Mapping[str, Any]) -> None:
    """Raises if `step` or `skipped_steps`, of a state by names, is not a count."""
    counters = {name: names[name] for name in ("step", "skipped_steps")}
    for path, value in jax.tree_util.tree_leaves_with_path(counters):
        check_count(path_string(path), value)


def check_scale_value(where: str, value: Any) -> None:
    """Raises unless `value` is a loss scale."""
    if not is_known(value):
        return
    if not all(SMALLEST_SCALE <= x <= LARGEST_SCALE for x in _numbers(value)):
        raise ValueError(
            f"{where} must be a finite number between 2**-126 and 2**126, got "
            f"{value!r}."
        )


def check_count(where: str, value: Any) -> None:
    """Raises unless `value` is a whole number of at least 0."""
    if is_known(value) and any(x < 0 or x % 1 for x in _numbers(value)):
        raise ValueError(f"{where} must be a count, got {value!r}.")


def is_known(value: object) -> bool:
    """Whether there is a value to look at, and not the shape of one alone."""
    return not is_traced(value) and not isinstance(value, jax.ShapeDtypeStruct)


def _numbers(value: Any) -> list[float]:
    """Those of an ensemble's members, whose states `jax.vmap` made; else one."""
    members = np.ravel(value) if getattr(value, "ndim", 0) else [value]
    return list(map(number, members))


def number(value: Any) -> float:
    """A number of Python or a scalar array; else -1, which nothing accepts."""
    if isinstance(value, bool | str | bytes):
        return -1.0
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return -1.0
