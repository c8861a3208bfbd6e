"""`locate` replays a batch that overflowed, and finds the first operation."""

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np
from jax.extend import core as jc

from jamp._autocast.primitives import primitive_name
from jamp._core.dtypes import is_differentiable
from jamp._core.groups import Wrt
from jamp.diagnostics._location import (
    SCALE_TOO_HIGH,
    Location,
    advice_for,
    range_of,
    words_of,
)
from jamp.diagnostics._replay import Event, Value, not_finite, replay
from jamp.diagnostics._source import Site
from jamp.diagnostics._step import Step, function_first, trace_scaled_step

_ARITHMETIC = ("add", "div", "mul", "sub")


@function_first
def locate(
    loss_fn: Callable[..., Any], *, loss_id: int = 0, wrt: Wrt = None
) -> Callable[..., Location]:
    """Finds the operation that makes a batch's loss or gradients not finite.

    It runs `jamp.scaled_value_and_grad(loss_fn)(state, *args, **kwargs)` again, outside
    of `jit`, one operation at a time, forward and backward, at the state's level and
    loss scale. It names the first operation, in order of execution, that has finite
    operands and a result that is not finite. It looks only at operations that the loss
    or a gradient depends on, and ignores the infinities of masks.

    It takes the time of a step without compilation, and the memory of a step.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)`, as in the step.
        loss_id: which of the state's loss scales to use.
        wrt: the groups to differentiate, as in the step.

    Returns:
        `f(state, *args, **kwargs) -> Location`. Print the location. `state` is the
        AmpState before the step. The state after it works too, because a skip keeps the
        params; its scale is lower.

    Raises (when called):
        TypeError: `state` is not an AmpState, or arrays are traced.

    >>> import jamp, jax.numpy as jnp, optax
    >>> params = {"w": jnp.full((2, 2), 300.0)}
    >>> state = jamp.initialize(params, optax.sgd(1.0), "O2", verbosity=0)
    >>> def loss_fn(params):
    ...     return (params["w"] @ params["w"]).sum(dtype="float32")
    >>> found = locate(loss_fn)(state)
    >>> print(found.operation, found.phase, found.operands[0])
    a matmul forward float16[2, 2] in [300, 300]
    """

    def located(state, /, *args, **kwargs):
        call = ("locate", loss_fn, state, args, kwargs, loss_id, wrt)
        step = trace_scaled_step(*call)
        with jax.transfer_guard("allow"):
            moves = state.loss_scale_rules[loss_id].moves
            return _located(step, moves)

    return located


def _located(step: Step, scale_moves: bool) -> Location:
    found = _location_at(step, step.scale)
    if found.finite:
        return found
    if step.scale > 1 and (found.phase == "backward" or math.isfinite(found.loss)):
        lowest = _location_at(step, 1.0)
        if lowest.finite:
            return dataclasses.replace(found, advice=SCALE_TOO_HIGH[scale_moves])
        found = lowest  # an overflow at any scale: report the cause at scale 1
    return dataclasses.replace(found, advice=advice_for(found))


def _location_at(step: Step, scale: float) -> Location:
    """Returns the location at a loss scale, without advice."""
    (loss, *grads), _ = find_causes(step, scale)
    number, total = float(np.asarray(loss.array, np.float32)), len(step.paths)
    location = _first_location(v.note for v in (loss, *grads) if v.note)
    if location is None:
        return Location(number, scale, total=total)
    # JAX computes some residuals of the backward pass in the forward pass.
    is_late = location.phase == "forward" and not loss.note
    bad = (path for path, g in zip(step.paths, grads, strict=True) if g.note)
    return dataclasses.replace(
        location,
        loss=number,
        scale=scale,
        phase="backward" if is_late else location.phase,
        params=tuple(bad),
        total=total,
    )


@dataclasses.dataclass(frozen=True, eq=False)
class Cause:
    """The reason why a value is not finite. A finite value has the note False."""

    order: int  # in the order of execution
    has_nan: bool
    is_intended: bool  # whether masks cause all infinities
    location: Location | None = None  # None if the parents explain the value
    parents: tuple["Cause", ...] = ()


def find_causes(step: Step, scale: float) -> tuple[list[Value], list[Location]]:
    """Replays a step, and notes the causes.

    Returns:
        The loss and the gradients, and the locations of all operations that make
        infinities or NaN, in the order of execution.
    """
    found: list[Location] = []
    event = Event(None, [], [])
    with jax.debug_nans(False), jax.debug_infs(False):
        for order, event in enumerate(replay(step, scale, whole_loops=True)):
            for value in event.read:
                if value.note is None:
                    value.note = _cause_of_input(value, order)
            if event.site is None:
                continue
            for value in event.outs:
                value.note = _cause_of_result(event, event.site, value, order)
                if value.note and value.note.location:
                    found.append(value.note.location)
    return event.read, found


def _cause_of_input(value: Value, order: int) -> Cause | bool:
    """Returns the cause of an argument or a constant, which may be a mask."""
    nan, inf = not_finite(value.array)
    if not (nan or inf):
        return False
    name, x = value.path or "a constant", value.array
    found = Location(operation=name, phase="input", result=range_of(x))
    is_mask = not value.path or not bool((x == np.inf).any())
    return Cause(order, nan, is_mask and not nan, found)


def _cause_of_result(
    event: Event, site: Site, value: Value, order: int
) -> Cause | bool:
    nan, inf = not_finite(value.array)
    if not (nan or inf):
        return False
    parents = tuple(dict.fromkeys(v.note for v in event.read if v.note))
    if nan and any(p.has_nan for p in parents):  # NaN comes from NaN
        parents = tuple(p for p in parents if p.has_nan)
    if site.eqn.primitive.name in _ARITHMETIC and _has_inf_literal(site.eqn):
        parents = ()  # a constant beyond float16, such as 1e5, is not a mask
    from_masks, location = all(p.is_intended for p in parents), None
    if not parents or (nan and from_masks):
        location = location_of(event, site, value)
    intended = bool(parents) and from_masks and not nan
    return Cause(order, nan, intended, location, parents)


def _first_location(causes: Iterable[Cause]) -> Location | None:
    """Returns the first location among some causes and all their ancestors.

    Intended infinities come last, because most of them are harmless.
    """
    found: set[Cause] = set()
    waiting = list(causes)
    while waiting:
        if (cause := waiting.pop()) not in found:
            found.add(cause)
            waiting += cause.parents
    located = (cause for cause in found if cause.location)
    first = min(located, key=lambda c: (c.is_intended, c.order), default=None)
    return first.location if first else None


def _has_inf_literal(eqn: jc.JaxprEqn) -> bool:
    literals = [np.asarray(v.val) for v in eqn.invars if isinstance(v, jc.Literal)]
    return any(is_differentiable(x) and bool(np.isinf(x)) for x in literals)


def location_of(event: Event, site: Site, value: Value) -> Location:
    """Returns the location of an operation, without the loss and the gradients."""
    floats = [v for v in event.read if is_differentiable(v.array)]
    result, made_by = range_of(value.array), ""
    if event.moves and floats and (maker := floats[0].maker):
        line = f" at {maker.line}" if maker.line else ""
        made_by = f"`{primitive_name(maker.eqn)}`{line}"
    return Location(
        operation=words_of(site.eqn, result.dtype),
        primitive=primitive_name(site.eqn),
        phase=site.phase,
        source=site.line,
        module=site.module,
        loops=site.context.loops,
        operands=tuple(range_of(v.array) for v in floats),
        result=result,
        made_by=made_by,
    )
