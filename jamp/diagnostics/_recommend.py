"""`recommend_scale` finds the loss scale at which a batch's gradients fit into half."""

import bisect
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jc
from jaxtyping import Array

from jamp._core.groups import Wrt
from jamp._core.tree import all_finite
from jamp.diagnostics._advice import overflows
from jamp.diagnostics._locate import find_causes
from jamp.diagnostics._step import function_first, matmul_dtype, trace_scaled_step

_LARGEST = 24  # apex's ceiling is 2**24
_MAX_LOST = 1e-3  # the share of gradients that may round to zero
_MARGIN = 3  # powers of two between the largest safe scale and the recommended one
_LOCATE = "`print(jamp.diagnostics.locate(loss_fn)(state, *args))` names the operation."


@function_first
def recommend_scale(
    loss_fn: Callable[..., Any], *, loss_id: int = 0, wrt: Wrt = None
) -> Callable[..., float]:
    """Recommends a loss scale for a batch, at the level of a state.

    In float16, it is an eighth of the largest power of two up to 2**24 at which no
    gradient overflows. It is larger if float16 would round more than 1 in 1,000
    gradients to zero. In bfloat16, which has the range of float32, it is 1. With
    `DynamicLossScale(init_scale=...)`, training then starts without skips. The scale
    may also be static. The function compiles the step once, and also runs it one
    operation at a time.

    Args:
        loss_fn: `(params, *args, **kwargs) -> loss`, or `(loss, aux)`, as in the step.
        loss_id: which of the state's loss scales to use.
        wrt: the groups to differentiate, as in the step.

    Returns:
        `f(state, *args, **kwargs) -> float`.

    Raises (when called):
        TypeError: `state` is not an AmpState, or arrays are traced.
        ValueError: the level does not compute in half.
        FloatingPointError: the loss or a gradient is not finite at any scale, or the
            forward pass overflows. `jnp.clip(x, -1, 1)` and `1 / x` may hide such an
            overflow from the loss.

    >>> import jamp, jax.numpy as jnp, optax
    >>> state = jamp.initialize(jnp.ones(4), optax.sgd(1.0), "O2", verbosity=0)
    >>> loss_fn = lambda w: 100 * w.sum(dtype="float32")
    >>> recommend_scale(loss_fn)(state)  # 100 * 512 < 65504
    64.0
    """

    def recommended(state, /, *args, **kwargs):
        call = ("recommend_scale", loss_fn, state, args, kwargs, loss_id, wrt)
        step = trace_scaled_step(*call)
        half = matmul_dtype(state.properties)
        if half is None:
            raise ValueError(
                f"A state at {state.properties.opt_level} does not compute in half: "
                "initialize one at your training's level, such as O2."
            )
        run = jax.jit(jc.jaxpr_as_fun(step.program))

        @functools.cache
        def outputs(power: int) -> list[Array]:
            return run(*(x for x, _ in step.inputs_at(2.0**power)))

        def overflow_at(power: int) -> bool:
            return not all_finite(outputs(power)[1:])

        def loses_digits(power: int) -> bool:
            return _share_lost(outputs(high)[1:], 2.0 ** (power - high)) > _MAX_LOST

        with jax.transfer_guard("allow"):
            _, found = find_causes(step, 1.0)
            hidden = next((x for x in found if overflows(x)), None)
            if hidden or not all_finite(outputs(0)[0]):
                where = f"{hidden.operation} at {hidden.source}" if hidden else "a NaN"
                raise FloatingPointError(
                    f"The forward pass overflows in {half} at any loss scale: {where}. "
                    f"{_LOCATE}"
                )
            if overflow_at(0):
                raise FloatingPointError(
                    f"A gradient is not finite in {half} at any loss scale. {_LOCATE}"
                )
            if half == jnp.bfloat16:
                return 1.0
            high = bisect.bisect_left(range(1, _LARGEST + 1), True, key=overflow_at)
            low = next((p for p in range(high) if not loses_digits(p)), high)
            return 2.0 ** max(low, high - _MARGIN, 0)

    return recommended


@jax.jit
def _share_lost(grads: list[Array], factor: float) -> Array:
    """Returns the share of nonzero gradients that become zero in float16."""
    sizes = [jnp.abs(g).astype(jnp.float32) for g in grads]
    least = jnp.float32(2.0**-25)  # half of the smallest float16
    lost = sum(jnp.sum((x > 0) & (x * factor <= least)) for x in sizes)
    return lost / jnp.maximum(1, sum(jnp.sum(x > 0) for x in sizes))
