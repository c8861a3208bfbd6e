"""Where gradients come from, as far as the program that is being traced says.

`jax.value_and_grad` left in place of `jamp.scaled_value_and_grad` gives gradients that
look right: float32 ones at O1 and O4, of a loss that no scale and no level touched.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax

from jamp._autocast.jax_internals import equation_of
from jamp._core.dtypes import FLOAT32, is_half
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling.loss import HasLossScales
from jamp._scaling.unscaled import raw_of

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
_PRODUCTS = ("dot_general", "conv_general_dilated")


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
    scales = {id(x) for x in _before(_scales(state), _is_scalar)}
    values = _before(unknown, lambda x: id(x) not in scales and raw_of(x) is None)
    params = set(map(id, jax.tree.leaves(state.params)))
    if not any(id(x) in params for x in values):
        return
    if any(id(x) in scales or raw_of(x) is not None for x in values):
        return
    if any(rule.moves for rule in state.loss_scale_rules):
        warn(_UNSCALED.format(_WRITE), PrecisionWarning)
    elif state.properties.patch_functions and _is_float32_alone(values):
        level = state.properties.opt_level
        warn(_FLOAT32.format(level, _WRITE), PrecisionWarning)


def _scales(state: HasLossScales) -> list[Any]:
    return [scale_state.scale for scale_state in state.loss_scales]


def _is_scalar(x: Any) -> bool:
    """Whether a scale may be what one before it became: by clean or bad steps."""
    return getattr(x, "shape", None) == () and x.dtype == FLOAT32


def _before(values: Iterable[Any], follows: Any) -> list[Any]:
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
    inside = list(_inside(made))
    results = (v.aval for eqn in inside for v in eqn.outvars)
    is_product = any(e.primitive.name in _PRODUCTS for e in (*made, *inside))
    return is_product and not any(map(is_half, results))


def _inside(eqns: Iterable[Any]) -> Iterable[Any]:
    """The equations of the programs in equations."""
    for eqn in eqns:
        is_program = lambda x: hasattr(x, "eqns")  # noqa: E731
        for part in jax.tree.leaves(eqn.params, is_leaf=is_program):
            if is_program(part):
                yield from part.eqns
                yield from _inside(part.eqns)
