"""`redo_on_overflow`: the same batch again at a lower loss scale, inside `jit`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jamp._core.compat import varying_axes
from jamp._core.warnings import UnusedOptionWarning, warn
from jamp._scaling.rules import LossScaleRule, LossScaleState


class _Attempt(NamedTuple):
    out: Any
    finite: Bool[Array, ""]
    scale_state: LossScaleState
    count: Int[Array, ""]


def check_redo(redo_on_overflow: Any) -> None:
    """Raises unless it is a number of times."""
    number = redo_on_overflow
    if isinstance(number, bool) or not isinstance(number, int) or number < 0:
        raise ValueError(
            "redo_on_overflow must be an integer of at least 0, how often to retry a "
            f"batch at most, got {number!r}."
        )


def redoes(rule: LossScaleRule, times: int) -> bool:
    """Whether to redo: a static scale has nowhere to go, and says so."""
    if times and not rule.moves:
        warn(
            f"redo_on_overflow={times} has no effect: the loss scale is static. Pass "
            "loss_scale='dynamic' to jamp.initialize, or leave it out.",
            UnusedOptionWarning,
        )
    return times > 0 and rule.moves


def until_finite[T](
    attempt: Callable[[LossScaleState], tuple[T, Bool[Array, ""]]],
    rule: LossScaleRule,
    scale_state: LossScaleState,
    times: int,
) -> tuple[T, Bool[Array, ""], LossScaleState]:
    """Repeats `attempt` until its gradients are finite, at most `times` times.

    Returns:
        The last output, whether it is finite, and the state it was computed in.
    """
    program, shapes = jax.make_jaxpr(attempt, return_shape=True)(scale_state)
    # A loop that begins with nothing, so that the program is there once, not twice.
    zeros = [_zeros(aval) for aval in program.out_avals]
    out, finite = jax.tree.unflatten(jax.tree.structure(shapes), zeros)

    def goes_on(last: _Attempt):
        can_fall = last.scale_state.scale > rule.floor
        again = ~last.finite & (last.count <= times) & can_fall
        return (last.count == 0) | again

    def body(last: _Attempt):
        lowered = rule.lowered(last.scale_state)
        state = jax.tree.map(
            lambda x, low: jnp.where(last.count == 0, x, low), last.scale_state, lowered
        )
        return _Attempt(*attempt(state), state, last.count + 1)

    begun = _Attempt(out, finite, scale_state, jnp.zeros((), jnp.int32))
    last = jax.lax.while_loop(goes_on, body, begun)
    return last.out, last.finite, last.scale_state


def check_aux_of_redo(aux: Any) -> None:
    """Raises a TypeError for a leaf that a loop cannot carry."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        if not hasattr(leaf, "dtype") and not isinstance(leaf, int | float | complex):
            raise TypeError(
                "With redo_on_overflow the loss function runs in a `lax.while_loop`, "
                "so its aux must be arrays: "
                f"aux{jax.tree_util.keystr(path)} is {leaf!r}."
            )


def _zeros(aval: Any) -> Array:
    zeros = jax.lax.full(aval.shape, 0, aval.dtype)
    axes = tuple(varying_axes(aval))
    return jax.lax.pcast(zeros, axes, to="varying") if axes else zeros
