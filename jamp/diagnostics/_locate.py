"""`locate`: replays a batch that overflowed, and finds the first operation."""

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jamp._core.groups import Wrt
from jamp.diagnostics._advice import advice_for, scale_advice
from jamp.diagnostics._location import Location
from jamp.diagnostics._programs import replay_step
from jamp.diagnostics._replay import first_location
from jamp.diagnostics._step import Step, function_first, trace_scaled_step


@function_first
def locate(
    loss_fn: Callable[..., Any], *, loss_id: int = 0, wrt: Wrt = None
) -> Callable[..., Location]:
    """Finds the operation that makes a batch's loss or gradients not finite.

    It runs `jamp.scaled_value_and_grad(loss_fn)(state, *args, **kwargs)` again, outside
    of `jit`, one operation at a time, forward and backward, at the state's level and
    loss scale. It names the first operation, in order of execution, whose result is not
    finite although its operands are, among those that the loss or a gradient depends
    on. It passes over infinities that are intended, such as those of a mask.

    It takes the time of a step without compilation, and the memory of a step.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)`, as in the step.
        loss_id: which of the state's loss scales to use.
        wrt: the groups to differentiate, as in the step.

    Returns:
        `f(state, *args, **kwargs) -> Location`: print it. `state` is the AmpState
        before the step. The state after it works too, because a skipped step keeps the
        params; its scale is lower.

    Raises (when called):
        TypeError: `state` is not an AmpState, or arrays are traced.

    >>> import jamp, jax.numpy as jnp, optax
    >>> params = {"w": jnp.full((2, 2), 300.0)}
    >>> state = jamp.initialize(params, optax.sgd(1.0), "O2", verbosity=0)
    >>> def loss_fn(params):
    ...     return (params["w"] @ params["w"]).sum(dtype="float32")
    >>> found = locate(loss_fn)(state)
    >>> print(found.operation, found.phase, found.operands[0], found.near)
    a matmul forward float16[2, 2] in [300, 300] w
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
        halvings = math.ceil(math.log2(step.scale))
        at = lambda n: _location_at(step, step.scale / 2**n)  # noqa: E731
        lowest = at(halvings)
        if lowest.finite:
            tries = range(1, halvings)
            n = 1 + bisect.bisect(tries, False, key=lambda n: at(n).finite)
            advice = scale_advice(step.scale, step.scale / 2**n, scale_moves)
            return dataclasses.replace(found, advice=advice)
        found = lowest  # it overflows at any scale: report the cause at scale 1
    return dataclasses.replace(found, advice=advice_for(found))


def _location_at(step: Step, scale: float) -> Location:
    """The location at a loss scale, without advice."""
    loss, *grads = replay_step(step, scale)
    number, total = float(np.asarray(loss.array, np.float32)), len(step.paths)
    location = first_location(v.cause for v in (loss, *grads) if v.cause)
    if location is None:
        return Location(number, scale, total=total)
    # JAX computes some residuals of the backward pass in the forward pass.
    is_late = location.phase == "forward" and loss.cause is None
    bad = (path for path, g in zip(step.paths, grads, strict=True) if g.cause)
    return dataclasses.replace(
        location,
        loss=number,
        scale=scale,
        phase="backward" if is_late else location.phase,
        params=tuple(bad),
        total=total,
    )
