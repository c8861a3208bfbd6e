"""Checks of the loss scales and counters in a checkpoint."""

from collections.abc import Mapping
from typing import Any

import jax

from jamp._core.numbers import check_count, check_scale
from jamp._core.tree import path_string

_COUNTS = ("unskipped", "hysteresis", "consecutive_skips")


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
