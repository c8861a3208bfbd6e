"""Unscaled gradients, which are NaN after an overflow, and a table of their origins.

    half gradient g, scale s, finite f  ->  float32(g) * (1 / s) * (1 if f else NaN)

Sums, means, norms, clips, `sign` and optax chains keep the NaN, so `apply_gradients`
finds an overflow in gradients that the user has changed.

For each call, the table holds `finite`, so that `apply_gradients` does not check again,
and the half gradients, which a fused optimizer unscales in its own pass. If a leaf has
changed, `apply_gradients` checks all of them. The table changes only memory traffic,
and keeps no array alive.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from jamp._core.tree import is_traced


class Origin(NamedTuple):
    """The origin of all unscaled gradients of one call.

    Attributes:
        loss_id: the id of the loss.
        finite: whether the loss and all its gradients are finite, shape (), bool; None
            if the rule does not check, or the gradients have changed.
        scaled: by the id of a gradient, the gradient times the scale, in the dtype of
            its param; None if one is deleted, or the gradients have changed.
        scale: the loss scale, shape (), float32; None as `scaled`.
    """

    loss_id: int
    finite: Bool[Array, ""] | None = None
    scaled: dict[int, Array] | None = None
    scale: Float[Array, ""] | None = None


class _Call(NamedTuple):
    """Functions that return the parts of an Origin. Strong references would leak."""

    loss_id: int
    leaves: list[Callable[[], Any]]
    scaled: list[Callable[[], Any]]
    scale: Callable[[], Any]
    finite: Callable[[], Any]


# Maps the id of each leaf to its call, until the leaf is deleted.
_table: dict[int, _Call] = {}


def nan_unless(
    finite: Bool[Array, ""] | None,
    divided: Sequence[Array],
    grads: Sequence[Array],
    scale: Float[Array, ""],
    loss_id: int,
) -> list[Array]:
    """Multiplies unscaled gradients by NaN after an overflow, and fills the table.

    `finite` is None for a rule that does not check.
    """
    leaves = list(divided)
    if finite is not None:
        factor = lax.select(finite, np.float32(1), np.float32(np.nan))
        leaves = [lax.mul(x, lax.convert_element_type(factor, x.dtype)) for x in leaves]
    if leaves:
        rest = [
            weakref.ref(x) if is_traced(x) else lambda x=x: x for x in (scale, finite)
        ]
        # A reference to a deleted leaf calls `_table.pop(key, reference)`.
        own = [weakref.ref(x, partial(_table.pop, id(x))) for x in leaves]
        call = _Call(loss_id, own, list(map(weakref.ref, grads)), *rest)
        _table.update(dict.fromkeys(map(id, leaves), call))
    return leaves


def origin_of(leaves: Sequence[Any]) -> Origin | None:
    """Returns the origin of the first gradient of `nan_unless`, or None.

    The other parts are None unless these are all gradients of the call, in its order.
    """
    known = filter(None, map(_table.get, map(id, leaves)))
    if (call := next(known, None)) is None:
        return None
    if len(leaves) != len(call.leaves) or any(
        [ref() is not x for ref, x in zip(call.leaves, leaves, strict=True)]
    ):
        return Origin(call.loss_id)
    scale, finite = call.scale(), call.finite()
    scaled = {id(x): ref() for x, ref in zip(leaves, call.scaled, strict=True)}
    if scale is None or any([x is None for x in scaled.values()]):
        return Origin(call.loss_id, finite)
    return Origin(call.loss_id, finite, scaled, scale)
