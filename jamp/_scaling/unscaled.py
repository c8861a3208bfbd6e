"""Gradients divided by the loss scale, all NaN after an overflow; and a memory of them.

    half gradient g, scale s, all finite f  ->  float32(g) * (1 / s) * (1 if f else NaN)

So an overflow survives what people do with gradients: sums, means, norms, clips, `sign`
and any optax chain, and `apply_gradients` finds it in whatever it gets.

Of a leaf that comes to it unchanged, a table remembers the flag, so that nobody looks
twice, and the half gradient, which a fused optimizer unscales on its way. Nothing but
bytes depends on the table, and it keeps nothing alive.

`jax.value_and_grad` left in place of `jamp.scaled_value_and_grad` gives gradients that
look right: float32 ones at O1 and O4, of a loss that no scale and no level touched. Of
those the program that is being traced says where they come from.
"""

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, PyTree

from jamp._autocast.fp8 import is_product
from jamp._autocast.tracers import equation_of
from jamp._core.dtypes import FLOAT32, is_differentiable, is_half
from jamp._core.tree import is_traced
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling.rules import HasLossScales


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


# ---- gradients that jamp did not unscale

_UNSCALED = (
    "The gradients are computed of the params, and the loss scale, which is dynamic, "
    "has no part in it: in half, small ones are lost. {}, or `jamp.scale_loss` before "
    "`jax.grad` and `jamp.unscale` after it; loss_scale=1 if all of it is float32."
)
_FLOAT32 = (
    "The gradients are computed of the params in float32 alone, and the level is {}. "
    "{}, or call `state.apply_fn` in place of `model.apply`."
)
_WRITE = "Write `jamp.scaled_value_and_grad(loss_fn)(state, ...)`"


def warn_of_plain_gradients(grads: Sequence[Any], state: HasLossScales) -> None:
    """Warns of gradients of the params that were not scaled, or not computed in half.

    Args:
        grads: leaves. Those that jamp unscaled are known; the others are followed to
            what they were computed of, if one program computes all of it.
        state: that they are for.
    """
    unknown = [x for x in grads if raw_of(x) is None]
    if not unknown:
        return
    scales = [scale_state.scale for scale_state in state.loss_scales]
    scales = {id(x) for x in computed_of(scales, _is_scalar)}
    values = computed_of(unknown, lambda x: id(x) not in scales and raw_of(x) is None)
    params = set(map(id, jax.tree.leaves(state.params)))
    if not any(id(x) in params for x in values):
        return
    if any(id(x) in scales or raw_of(x) is not None for x in values):
        return
    if any(rule.moves for rule in state.loss_scale_rules):
        warn(_UNSCALED.format(_WRITE), PrecisionWarning)
    else:
        warn_of_float32_gradients(unknown, state)


def warn_of_float32_gradients(grads: PyTree, state: HasLossScales) -> None:
    """Warns of gradients of the params, at a level that casts, of which nothing is
    half."""
    params = set(map(id, jax.tree.leaves(state.params)))
    values = computed_of(jax.tree.leaves(grads), lambda x: id(x) not in params)
    of_params = any(id(x) in params for x in values)
    if state.properties.patch_functions and of_params and _is_float32_alone(values):
        level = state.properties.opt_level
        warn(_FLOAT32.format(level, _WRITE), PrecisionWarning)


def _is_scalar(x: Any) -> bool:
    """Whether a scale may be what one before it became: by clean or bad steps."""
    return getattr(x, "shape", None) == () and x.dtype == FLOAT32


def computed_of(values: Iterable[Any], follows: Callable[[Any], bool]) -> list[Any]:
    """Values, and what those were computed of that are to be followed."""
    seen: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        eqn = equation_of(x)
        if eqn is not None and follows(x):
            waiting += eqn.invars
    return list(seen.values())


def _is_float32_alone(values: Sequence[Any]) -> bool:
    """Whether there are products among what made values, and nothing is half."""
    if any(map(is_half, values)):
        return False
    made = [eqn for x in values if (eqn := equation_of(x)) is not None]
    inside = list(_equations_in(made))
    results = (v.aval for eqn in inside for v in eqn.outvars)
    has_product = any(map(is_product, (*made, *inside)))
    return has_product and not any(map(is_half, results))


def _equations_in(eqns: Iterable[Any]) -> Iterable[Any]:
    """The equations of the programs in equations."""
    for eqn in eqns:
        is_program = lambda x: hasattr(x, "eqns")  # noqa: E731
        for part in jax.tree.leaves(eqn.params, is_leaf=is_program):
            if is_program(part):
                yield from part.eqns
                yield from _equations_in(part.eqns)
