"""Unscaled gradients, which are NaN after an overflow, and a table of their origins.

    half gradient g, scale s, finite f  ->  float32(g) * (1 / s) * (1 if f else NaN)

Sums, means, norms, clips, `sign` and optax chains keep the NaN, so `apply_gradients`
finds an overflow in gradients that the user has changed.

For each leaf, the table holds the flag, so that `apply_gradients` does not check again,
and the half gradient, which a fused optimizer unscales in its own pass. A changed leaf
is not in the table. The table changes only memory traffic, and keeps no array alive.
"""

import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core.dtypes import is_differentiable
from jamp._core.tree import is_traced


class Raw(NamedTuple):
    """The origin of an unscaled gradient.

    Attributes:
        loss_id: the id of the loss.
        grad: the scaled gradient in the dtype of its param; None if it is deleted.
        scale: the loss scale, shape (), float32.
        finite: whether the loss and all its gradients are finite, shape (), bool; None
            if the rule does not check.
    """

    loss_id: int
    grad: Array | None
    scale: Float[Array, ""]
    finite: Bool[Array, ""] | None


# By the id of a leaf: a weak reference to it, whether the rule checks, the loss_id, and
# functions that return the rest. A strong reference would keep a trace alive.
_table: dict[int, tuple[Callable[[], Any], bool, int, list[Callable[[], Any]]]] = {}


def nan_unless(
    finite: Bool[Array, ""] | None,
    divided: PyTree,
    grads: PyTree,
    scale: Float[Array, ""],
    loss_id: int,
) -> PyTree:
    """Multiplies unscaled gradients by NaN after an overflow, and fills the table.

    `finite` is None for a rule that does not check.
    """
    factor = None
    if finite is not None:
        factor = lax.select(finite, np.float32(1), np.float32(np.nan))
    flags = (scale, finite)
    held = [weakref.ref(x) if is_traced(x) else lambda x=x: x for x in flags]
    leaves, structure = jax.tree.flatten(divided)
    for i, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
        if factor is not None and is_differentiable(leaf):
            leaves[i] = lax.mul(leaf, lax.convert_element_type(factor, leaf.dtype))
        if isinstance(grad, jax.Array) and is_differentiable(grad):
            key = id(leaves[i])
            own = weakref.ref(leaves[i], lambda _, key=key: _table.pop(key, None))
            parts = [weakref.ref(grad), *held]
            _table[key] = own, finite is not None, loss_id, parts
    return structure.unflatten(leaves)


def raw_of(leaf: object) -> Raw | None:
    """Returns the origin of a gradient that `nan_unless` returned, or None."""
    own, checks, loss_id, parts = _table.get(id(leaf), (lambda: None, False, 0, ()))
    if leaf is None or own() is not leaf:
        return None
    grad, scale, finite = [part() for part in parts]
    if scale is None or (checks and finite is None):
        return None
    return Raw(loss_id, grad, scale, finite)


def still_scaled(grads: PyTree, skips: bool) -> tuple[PyTree, Float[Array, ""] | None]:
    """Returns the scaled gradients and the scale, or `grads` and None if unknown.

    After an overflow, some scaled gradients are finite, so the step needs its own skip.
    """
    leaves, structure = jax.tree.flatten(grads)
    raws = [raw_of(leaf) for leaf in leaves]
    known = [raw for raw in raws if raw and raw.grad is not None]
    scales = {id(raw.scale): raw.scale for raw in known}
    checked = any([raw.finite is not None for raw in known])
    if len(known) < len(leaves) or len(scales) != 1 or (checked and not skips):
        return grads, None
    (scale,) = scales.values()
    return structure.unflatten([raw.grad for raw in known]), scale
