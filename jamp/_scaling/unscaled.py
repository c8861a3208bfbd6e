"""Gradients divided by the loss scale, and NaN after an overflow; a table of them.

    half gradient g, scale s, finite f  ->  float32(g) * (1 / s) * (1 if f else NaN)

An overflow so survives what people do with gradients (sums, means, norms, clips, `sign`
and any optax chain), and `apply_gradients` finds it in whatever it gets.

A table remembers, for each leaf, the flag, so that `apply_gradients` does not check
again, and the half gradient, which a fused optimizer unscales while it steps. A leaf
that changed is not in the table. Only the number of bytes depends on the table, and it
keeps nothing alive.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from jamp._autocast.tracers import ancestors, equation_of
from jamp._core.dtypes import FLOAT32, is_differentiable
from jamp._core.tree import is_traced
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling.rules import HasLossScales

_NO_SCALE = (
    "The gradients are computed from the params without the loss scale, which is "
    "dynamic: small gradients are lost in half. Write "
    "`jamp.scaled_value_and_grad(loss_fn)(state, ...)`, or `jamp.scale_loss` before "
    "`jax.grad` and `jamp.unscale` after it. Pass loss_scale=1 to jamp.initialize if "
    "the whole loss is float32."
)


class Raw(NamedTuple):
    """The origin of an unscaled gradient.

    Attributes:
        loss_id: the loss that it is for.
        grad: the gradient times the scale, in the dtype of its param; None if gone.
        scale: what it was divided by, shape (), float32.
        finite: whether the loss and all its gradients are finite, shape (), bool; None
            if the rule does not check.
    """

    loss_id: int
    grad: Array | None
    scale: Float[Array, ""]
    finite: Bool[Array, ""] | None


# By the id of a leaf: the leaf, whether the rule checks, and functions that return the
# rest. They hold tracers weakly: a strong reference would keep their trace alive.
_table: dict[int, tuple[Callable[[], Any], bool, int, list[Callable[[], Any]]]] = {}


def nan_unless(
    finite: Bool[Array, ""] | None,
    divided: PyTree,
    grads: PyTree,
    scale: Float[Array, ""],
    loss_id: int,
) -> PyTree:
    """Multiplies divided gradients by NaN after an overflow, and remembers `grads`.

    `finite` is None for a rule that does not check.
    """
    factor = None
    if finite is not None:
        factor = lax.select(finite, np.float32(1), np.float32(np.nan))
    leaves, structure = jax.tree.flatten(divided)
    for i, (leaf, grad) in enumerate(zip(leaves, jax.tree.leaves(grads), strict=True)):
        if factor is not None and is_differentiable(leaf):
            leaves[i] = lax.mul(leaf, lax.convert_element_type(factor, leaf.dtype))
        if isinstance(grad, jax.Array) and is_differentiable(grad):
            _remember(leaves[i], Raw(loss_id, grad, scale, finite))
    return structure.unflatten(leaves)


def _remember(leaf: Array, raw: Raw) -> None:
    key = id(leaf)
    flags = raw.scale, raw.finite
    held = [weakref.ref(x) if is_traced(x) else lambda x=x: x for x in flags]
    parts = [weakref.ref(raw.grad), *held]
    own = weakref.ref(leaf, lambda _: _table.pop(key, None))
    _table[key] = own, raw.finite is not None, raw.loss_id, parts


def raw_of(leaf: object) -> Raw | None:
    """The origin of a gradient, if `nan_unless` made this very array."""
    own, checks, loss_id, parts = _table.get(id(leaf), (lambda: None, False, 0, ()))
    if leaf is None or own() is not leaf:
        return None
    grad, scale, finite = [part() for part in parts]
    if scale is None or (checks and finite is None):
        return None
    return Raw(loss_id, grad, scale, finite)


def are_unscaled(grads: Sequence[Any], scale: Any) -> bool:
    """Whether jamp unscaled the gradients, or those that they are computed from.

    Args:
        grads: leaves.
        scale: the loss scale; None if it is a constant. Gradients that a traced program
            computes from it may be scaled although they read unscaled ones too.
    """
    if any(raw_of(x) is not None for x in grads):
        return True
    if not is_traced(scale):
        return False
    own = [x for x in grads if getattr(x, "_trace", None) is scale._trace]
    found = ancestors(own, lambda x: x is not scale and raw_of(x) is None)
    is_scaled = any(x is scale for x in found)
    return not is_scaled and any(raw_of(x) is not None for x in found)


def still_scaled(grads: PyTree, skips: bool) -> tuple[PyTree, Float[Array, ""] | None]:
    """The gradients before the division, and the scale; else `grads` and None.

    They lack the NaN of an overflow, so they need a step that skips after one.
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


def warn_without_scale(grads: Sequence[Any], state: HasLossScales) -> None:
    """Warns if a traced program computes gradients of params without the scale."""
    others = [x for x in grads if raw_of(x) is None and equation_of(x) is not None]
    if not others or not any(rule.moves for rule in state.loss_scale_rules):
        return
    # The scale of a later step of the same program is computed from earlier scales.
    is_scale = lambda x: getattr(x, "shape", None) == () and x.dtype == FLOAT32  # noqa: E731
    now = [scale_state.scale for scale_state in state.loss_scales]
    scales = set(map(id, ancestors(now, is_scale)))
    is_scaled = lambda x: id(x) in scales or raw_of(x) is not None  # noqa: E731
    found = ancestors(others, lambda x: not is_scaled(x))
    params = set(map(id, jax.tree.leaves(state.params)))
    if any(id(x) in params for x in found) and not any(map(is_scaled, found)):
        warn(_NO_SCALE, PrecisionWarning)
