"""The table of the levels."""

from typing import Any

import numpy as np

from jamp._policy.levels import LEVELS

_PROPERTIES = (
    "cast_model_type",
    "patch_functions",
    "patch_functions_type",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)


def table() -> str:
    """Each property at each level, as `initialize` takes them.

    >>> print(table().splitlines()[0])
    property              O0       O1       O2       O3       O4        O5
    """
    rows = [("property", *LEVELS)]
    for name in _PROPERTIES:
        values = (getattr(level, name) for level in LEVELS.values())
        rows.append((name, *map(_word, values)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True))
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)


def _word(value: Any) -> str:
    if value is None or value is False:
        return "-"
    if value is True:
        return "yes"
    if isinstance(value, str | float | int):
        return f"{value:g}" if isinstance(value, float) else str(value)
    return np.dtype(value).name
