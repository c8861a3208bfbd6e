"""Unscaled gradients, which are NaN after an overflow, and a table of their origins.

    half gradient g, scale s, finite f  ->  float32(g) * (1 / s) * (1 if f else NaN)

Sums, means, norms, clips, `sign` and optax chains keep the NaN, so `apply_gradients`
finds an overflow in gradients that the user has changed.

For each leaf, the table holds the flag, so that `apply_gradients` does not check again,
and the half gradient, which a fused optimizer unscales in its own pass. A changed leaf
is not in the table. The table changes only memory traffic, and keeps no array alive.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core.dtypes import FLOAT32, is_differentiable
from jamp._core.tracers import ancestors, equation_of
from jamp._core.tree import is_traced
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling.rules import HasLossScales

_NO_SCALE = (
    "The gradients are computed from the params without the loss scale, which is "
    "dynamic: small gradients underflow in half. Write "
    "`jamp.scaled_value_and_grad(loss_fn)(state, ...)`, or `jamp.scale_loss` before "
    "`jax.grad` and `jamp.unscale` after it. Pass loss_scale=1 to jamp.initialize if "
    "the whole loss is float32."
)


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


def are_unscaled(grads: Sequence[Any], scale: Any) -> bool:
    """Returns whether gradients are unscaled, or traced from unscaled gradients.

    Args:
        grads: leaves.
        scale: the loss scale, or None if it is constant. Gradients that depend on it
            may be scaled, although they depend on unscaled gradients too.
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


def warn_without_scale(grads: Sequence[Any], state: HasLossScales) -> None:
    """Warns if a traced program computes gradients from params without the scale."""
    others = [x for x in grads if raw_of(x) is None and equation_of(x) is not None]
    if not others or not any(rule.moves for rule in state.loss_scale_rules):
        return
    # In a program of several steps, a scale is computed from earlier scales.
    is_scale = lambda x: getattr(x, "shape", None) == () and x.dtype == FLOAT32  # noqa: E731
    now = [scale_state.scale for scale_state in state.loss_scales]
    scales = set(map(id, ancestors(now, is_scale)))
    is_scaled = lambda x: id(x) in scales or raw_of(x) is not None  # noqa: E731
    found = ancestors(others, lambda x: not is_scaled(x))
    params = set(map(id, jax.tree.leaves(state.params)))
    if any(id(x) in params for x in found) and not any(map(is_scaled, found)):
        warn(_NO_SCALE, PrecisionWarning)
