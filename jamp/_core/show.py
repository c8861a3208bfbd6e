"""Short texts about trees, for `print` and for errors."""

from collections import Counter
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jamp._core.dtypes import is_half
from jamp._core.tree import path_string


def format_values(tree: PyTree) -> str:
    """Formats the numbers in a tree, and tracers by dtype and shape."""

    def leaf(x):
        if not hasattr(x, "dtype"):  # `state.replace(step=0)`
            return x
        try:
            return np.asarray(x, x.dtype).tolist()
        except (TypeError, RuntimeError):  # traced; donated or on other hosts
            return f"{x.dtype}{list(x.shape)}"

    return str(jax.tree.map(leaf, tree)).replace("'", "")


def short_repr(thing: object) -> str:
    """Returns the `repr`, or the class where the `repr` has many lines."""
    text = repr(thing)
    return text if "\n" not in text else f"{type(thing).__name__}(...)"


def kind(thing: object) -> str:
    """Returns the class with its article: `"an AmpState"`, `"a dict"`."""
    name = type(thing).__name__
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}"


def format_shapes(tree: PyTree) -> str:
    """Formats arguments by dtype and shape: `"float32[8, 4], {'w': float32[4]}"`."""

    def leaf(x):
        return f"{x.dtype}{list(x.shape)}" if hasattr(x, "dtype") else short_repr(x)

    return str(jax.tree.map(leaf, tree)).replace("'", "")[1:-1]


def format_counts(tree: PyTree) -> str:
    """Counts the numbers in a tree by dtype: `"1,024 float16, 64 float32"`."""
    counts: Counter[str] = Counter()
    for x in jax.tree.leaves(tree):
        counts[str(x.dtype)] += x.size
    return ", ".join(f"{n:,} {dtype}" for dtype, n in counts.most_common()) or "none"


def summary(title: str, state: Any, params: PyTree, opt_state: PyTree) -> str:
    """Summarizes a state, or an object with the same fields, in a few lines."""
    level = state.properties.opt_level or "no level: enabled=False"
    small = [
        path_string(path)
        for path, x in jax.tree_util.tree_leaves_with_path(params)
        if is_half(x) and x.size == 1
    ]
    more = ", ..." if len(small) > 6 else ""
    names = f"half and scalar: {', '.join(small[:6])}{more} (see keep_fp32)"
    return "\n  ".join(
        (
            f"{title} at {level}",
            f"params: {format_counts(params)}",
            f"optimizer state: {format_counts(opt_state)}",
            f"step: {format_values(state.step)}, "
            f"skipped: {format_values(state.skipped_steps)}",
            f"loss scale: {format_values(state.loss_scale)}",
            *([names] if small else ()),
        )
    )
