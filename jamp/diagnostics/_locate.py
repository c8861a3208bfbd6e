"""`locate`: runs a batch that overflowed again, and finds the first operation."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jamp._core.devices import moves_constants
from jamp._core.groups import Wrt
from jamp._core.tree import path_string
from jamp._state.amp_state import AmpState
from jamp.diagnostics._advice import advice_for, scale_advice
from jamp.diagnostics._causes import first_location
from jamp.diagnostics._location import Location
from jamp.diagnostics._programs import RULES
from jamp.diagnostics._ranges import is_float, range_of
from jamp.diagnostics._replay import Context, Replay
from jamp.diagnostics._step import Step, StepFn, check_state, scaled_step, step_fn


def locate(
    loss_fn: Callable[..., Any],
    state: AmpState,
    *args: Any,
    loss_id: int = 0,
    wrt: Wrt = None,
    **kwargs: Any,
) -> Location:
    """Finds the operation that a batch's loss or gradients are not finite for.

    Runs `jamp.scaled_value_and_grad(loss_fn)(state, *args, **kwargs)` again, outside of
    `jit`, one operation at a time, forward and backward, at the state's level and loss
    scale. In order of execution, it names the first operation whose result is not
    finite while its operands are, of those that the loss or a gradient depends on.
    What is infinite on purpose, as a mask, and leaves no trace is passed over.

    It takes as long as a step does without compiling, and the memory of one; the
    training step stays as it is.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)`, as in the step.
            If the step runs under `shard_map`, a loss that calls `jax.shard_map`.
        state: the AmpState before the step, with concrete arrays. A skip leaves params
            as they were, so the state after it will do: then the scale is a lower one.
        *args: the rest of what `loss_fn` takes: the batch.
        loss_id: which of the state's loss scales to use.
        wrt: the groups to differentiate, as in the step.
        **kwargs: as `*args`.

    Returns:
        A `Location`: print it.

    Raises:
        TypeError: `state` is not an AmpState, or arrays are traced: called under `jit`.

    >>> import jamp, jax.numpy as jnp, optax
    >>> params = {"w": jnp.full((2, 2), 300.0)}
    >>> state = jamp.initialize(params, optax.sgd(1.0), "O2", verbosity=0)
    >>> def loss_fn(params):
    ...     return (params["w"] @ params["w"]).sum(dtype="float32")
    >>> found = locate(loss_fn, state)
    >>> print(found.operation, found.phase, found.operands[0], found.near)
    a matrix product forward float16[2, 2] in [300, 300] w
    """
    check_state(state, "locate")
    arguments = {"args": args, "kwargs": kwargs}
    return locate_step(step_fn(loss_fn, loss_id, wrt), state, arguments, loss_id)


@moves_constants
def locate_step(
    fn: StepFn, state: AmpState, arguments: dict[str, Any], loss_id: int
) -> Location:
    """`locate` of a function of a state and arguments."""
    step = scaled_step(fn, state, arguments, loss_id, "locate")
    with jax.debug_nans(False), jax.debug_infs(False):
        found = _run(step, step.scale)
        if found.finite:
            return found
        clean = None
        if step.scale > 1 and (found.phase == "backward" or math.isfinite(found.loss)):
            # Those that overflow at the least scale, too, do not for the scale.
            least = step.scale / 2 ** math.ceil(math.log2(step.scale))
            at_least = _run(step, least)
            if at_least.finite:
                clean = _cleanest(step.scale, least, lambda s: _run(step, s).finite)
            else:
                found = at_least
        if clean is None:
            advice = advice_for(found, _largest(state.params))
        else:
            moves = state.loss_scale_rules[loss_id].moves
            advice = scale_advice(step.scale, clean, moves)
    return dataclasses.replace(found, advice=advice)


def _run(step: Step, scale: float) -> Location:
    """What a run at a scale gave, without advice."""
    replay = Replay(RULES)
    given = [replay.argument(array, name) for array, name in step.values_at(scale)]
    loss, *grads = replay.run(step.program, given, Context())
    number, total = float(np.asarray(loss.array, np.float32)), len(step.paths)
    location = first_location(v.cause for v in (loss, *grads) if v.cause)
    if location is None:
        return Location(True, number, scale, total=total)
    # What only gradients need is of the backward pass, wherever JAX computes it.
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


def _cleanest(scale: float, least: float, is_clean: Callable[[float], bool]) -> float:
    """The largest of scale / 2**n that is clean, of which `least` is one."""
    few, many = 0, round(np.log2(scale / least))
    while many - few > 1:
        middle = (few + many) // 2
        few, many = (few, middle) if is_clean(scale / 2**middle) else (middle, many)
    return scale / 2**many


def _largest(params: PyTree) -> tuple[float, str]:
    """The largest absolute value of the params, and where it is."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    found = [(range_of(x).magnitude, path_string(p)) for p, x in leaves if is_float(x)]
    return max(found, default=(0.0, ""))
