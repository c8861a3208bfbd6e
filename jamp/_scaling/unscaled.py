"""Gradients divided by the loss scale, all NaN after an overflow; and a memory of them.

    half gradient g, scale s, all finite f  ->  float32(g) * (1 / s) * (1 if f else NaN)

So an overflow survives what people do with gradients: sums, means, norms, clips, `sign`
and any optax chain, and `apply_gradients` finds it in whatever it gets.

Of a leaf that comes to it unchanged, a table remembers the flag, so that nobody looks
twice, and the half gradient, which a fused optimizer unscales on its way. Nothing but
bytes depends on the table, and it keeps nothing alive.
"""

import functools
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
    """What an unscaled gradient was made of.

    Attributes:
        loss_id: of which loss.
        grad: the gradient times the scale, in the dtype of its param; None if gone.
        scale: what it was divided by, shape (), float32.
        finite: whether all gradients of the loss are finite, shape (), bool; None if
            the rule does not check.
    """

    loss_id: int
    grad: Array | None
    scale: Float[Array, ""]
    finite: Bool[Array, ""] | None


def nan_unless(
    finite: Bool[Array, ""] | None,
    divided: PyTree,
    grads: PyTree,
    scale: Float[Array, ""],
    loss_id: int,
) -> PyTree:
    """Gradients divided by the scale; all NaN if one of them is not finite.

    Args:
        finite: whether all of them are finite; None for a rule that does not check.
        divided: the gradients in float32, divided by the scale.
        grads: what they were before, which is remembered of each leaf.
        scale: what they were divided by.
        loss_id: of which loss they are.
    """
    factor = None
    if finite is not None:
        factor = lax.select(finite, np.float32(1), np.float32(np.nan))
    leaves, structure = jax.tree.flatten(divided)
    for i, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
        if factor is not None and is_differentiable(leaf):
            leaves[i] = lax.mul(leaf, lax.convert_element_type(factor, leaf.dtype))
        if isinstance(grad, jax.Array):
            _remember(leaves[i], Raw(loss_id, grad, scale, finite))
    return structure.unflatten(leaves)


def raw_of(leaf: object) -> Raw | None:
    """What a gradient was made of, if it is the very array that `nan_unless` made."""
    entry = _table.get(id(leaf))
    if entry is None or entry.leaf() is not leaf:
        return None
    scale, finite = entry.scale(), entry.finite()
    if scale is None or (entry.checks and finite is None):
        return None
    return Raw(entry.loss_id, entry.grad(), scale, finite)


def still_scaled(grads: PyTree, skips: bool) -> tuple[PyTree, Float[Array, ""] | None]:
    """The gradients that a tree was made of, and what they were divided by.

    Else the tree and None: where a leaf is not known, or of another scale.

    Args:
        grads: unscaled gradients.
        skips: whether the step skips if they are not finite: only then may the NaN of
            an overflow be left out.
    """
    leaves, structure = jax.tree.flatten(grads)
    raws = [raw_of(leaf) for leaf in leaves]
    known = [raw for raw in raws if raw and raw.grad is not None]
    scales = {id(raw.scale): raw.scale for raw in known}
    checked = any(raw.finite is not None for raw in known)
    if len(known) < len(leaves) or len(scales) != 1 or (checked and not skips):
        return grads, None
    (scale,) = scales.values()
    return structure.unflatten([raw.grad for raw in known]), scale


class _Entry(NamedTuple):
    """A leaf and its `Raw`, by weak references.

    Strong ones of tracers would keep their trace, and with it all that it computes.
    """

    leaf: Callable[[], Any]
    loss_id: int
    grad: Callable[[], Any]
    scale: Callable[[], Any]
    finite: Callable[[], Any]
    checks: bool


_table: dict[int, _Entry] = {}  # by the id of the leaf


def _remember(leaf: Array, raw: Raw) -> None:
    key = id(leaf)
    scale, finite = (
        weakref.ref(x) if is_traced(x) else functools.partial(lambda x: x, x)
        for x in (raw.scale, raw.finite)
    )
    _table[key] = _Entry(
        leaf=weakref.ref(leaf, lambda _: _table.pop(key, None)),
        loss_id=raw.loss_id,
        grad=weakref.ref(raw.grad),
        scale=scale,
        finite=finite,
        checks=raw.finite is not None,
    )
