"""Short texts of arrays and trees, for what `print` shows."""

from collections import Counter
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jamp._core.tree import is_traced


def shown(tree: PyTree) -> str:
    """Scalars as values; as dtype and shape where there is none to read."""
    return str(jax.tree.map(_Raw, tree)).replace("'", "")


def counted(tree: PyTree) -> str:
    """How many numbers a tree holds, by dtype: `"1,024 float16, 64 float32"`."""
    counts: Counter[str] = Counter()
    for x in jax.tree.leaves(tree):
        counts[str(getattr(x, "dtype", type(x).__name__))] += int(np.size(x))
    return ", ".join(f"{n:,} {dtype}" for dtype, n in counts.most_common()) or "none"


class _Raw:
    """A leaf that prints as its value."""

    def __init__(self, x: Any):
        self.x = x

    def __repr__(self) -> str:
        x = self.x
        if is_traced(x) or not getattr(x, "is_fully_addressable", False):
            return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else str(x)
        return str(x.item() if x.size == 1 else np.asarray(x))
