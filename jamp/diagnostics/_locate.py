"""`locate`: runs a batch that overflowed again, and finds the first operation."""

import bisect
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jamp._core.devices import moves_constants
from jamp._core.groups import Wrt
from jamp._core.tree import differentiable, path_string
from jamp._state.amp_state import AmpState
from jamp.diagnostics._advice import advice_for, scale_advice
from jamp.diagnostics._location import Location, first_location, range_of
from jamp.diagnostics._programs import replayed
from jamp.diagnostics._step import Step, scaled_step


@moves_constants
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
    step = scaled_step("locate", loss_fn, state, args, kwargs, loss_id, wrt)
    found = _location_at(step, step.scale)
    if found.finite:
        return found
    if step.scale > 1 and (found.phase == "backward" or math.isfinite(found.loss)):
        halvings = math.ceil(math.log2(step.scale))
        at_least = _location_at(step, step.scale / 2**halvings)
        if at_least.finite:
            n = bisect.bisect(
                range(1, halvings),
                False,
                key=lambda n: _location_at(step, step.scale / 2**n).finite,
            )
            moves = state.loss_scale_rules[loss_id].moves
            advice = scale_advice(step.scale, step.scale / 2 ** (n + 1), moves)
            return dataclasses.replace(found, advice=advice)
        # What overflows at the least scale, too, does not for the scale.
        found = at_least
    return dataclasses.replace(found, advice=advice_for(found, _largest(state.params)))


def _location_at(step: Step, scale: float) -> Location:
    """What a run at a scale gave, without advice."""
    loss, *grads = replayed(step, scale)
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


def _largest(params: PyTree) -> tuple[float, str]:
    """The largest absolute value of the params, and where it is."""
    leaves = jax.tree.leaves_with_path(differentiable(params))
    with jax.debug_infs(False):
        found = [(range_of(x).magnitude, path_string(path)) for path, x in leaves]
    return max(found, default=(0.0, ""))
