"""Masks: which leaves decay."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

type Mask = PyTree | Callable[[PyTree], PyTree] | None


@dataclasses.dataclass(frozen=True)
class MaskByValue:
    """A mask by value, so that a transformation with one can be hashed."""

    leaves: tuple[bool, ...]
    structure: Any

    def __call__(self, params: PyTree) -> PyTree:
        del params
        return jax.tree.unflatten(self.structure, self.leaves)


def bools_like(params: PyTree, mask: PyTree) -> list[bool]:
    """A bool for each leaf of the params, from a mask like them or a prefix of it.

    Raises:
        ValueError: the mask has another structure.
        TypeError: a leaf of the mask is not a bool.
    """
    try:
        leaves = jax.tree.leaves(jax.tree.broadcast(mask, params))
    except ValueError as error:
        raise ValueError(
            f"mask must be a tree of bools like the params, or a prefix of it: {error}"
        ) from None
    return list(map(checked_bool, leaves))


def checked_bool(leaf: Any) -> bool:
    """A leaf of a mask, if it is a bool."""
    if not isinstance(leaf, bool | np.bool_):
        raise TypeError(f"mask must hold bools, got {leaf!r}.")
    return bool(leaf)
