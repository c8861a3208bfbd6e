"""amp_C's scale, axpby and l2norm in NumPy float64, from apex_semantics 9.3.

Imports neither JAX nor the library. Results stay float64: a test does the rounding.
"""

from collections.abc import Iterable
from typing import Literal

import numpy as np

from tests.oracles.steps import Leaves, float64, global_norm, norm


def scale(tree: Leaves, factor: float) -> tuple[list[np.ndarray], bool]:
    """tree * factor, and whether an input (not a product) is infinite or NaN."""
    x = float64(tree)
    with np.errstate(invalid="ignore"):  # inf * 0
        return [factor * leaf for leaf in x], _found_inf(x)


def axpby(
    a: float,
    x: Leaves,
    b: float,
    y: Leaves,
    *,
    check: Literal["both", "x", "y"] = "both",
) -> tuple[list[np.ndarray], bool]:
    """a * x + b * y, and whether a checked input is infinite or NaN."""
    x, y = float64(x), float64(y)
    checked = {"both": x + y, "x": x, "y": y}[check]
    with np.errstate(invalid="ignore"):  # inf - inf, inf * 0
        out = [a * i + b * j for i, j in zip(x, y, strict=True)]
    return out, _found_inf(checked)


def l2norm(
    tree: Leaves, *, per_tensor: bool = False, scale: float | None = None
) -> np.float64 | tuple[np.float64, list[np.float64]]:
    """The norm of tree / scale, with those of the leaves if `per_tensor`."""
    divisor = 1.0 if scale is None else scale
    x = [leaf / divisor for leaf in float64(tree)]
    return (
        (global_norm(x), [norm(leaf) for leaf in x]) if per_tensor else global_norm(x)
    )


def _found_inf(leaves: Iterable[np.ndarray]) -> bool:
    return not all(np.isfinite(leaf).all() for leaf in leaves)
