"""Closures: the loss and its gradients again, as an optimizer asks for them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree

from jamp._core.dtypes import is_differentiable
from jamp._core.tree import is_traced
from jamp._scaling.rules import LossScaleRule, lowest_scale
from jamp._state.closure import rounded, with_gradient
from jamp.fp16_utils._state import FP16_OptimizerState, say

type Closure = Callable[[FP16_OptimizerState], Any]


def call_until_finite(
    closure: Closure, state: FP16_OptimizerState, rule: LossScaleRule
) -> tuple[Float[Array, ""], FP16_OptimizerState]:
    """Calls the closure, and again while its gradients overflow and the scale falls."""
    state = state.replace(first_closure_call_this_step=jnp.asarray(True))
    carry = _call(closure, state)
    if not rule.moves:
        return carry

    def goes_on(carry):
        state = carry[1]
        return state.overflow & (state.loss_scale > lowest_scale(rule))

    if is_traced(state.overflow):
        return jax.lax.while_loop(goes_on, lambda c: _call(closure, c[1]), carry)
    while goes_on(carry):
        say(
            carry[1].overflow,
            "OVERFLOW within closure! Skipping step, reducing loss scale to "
            f"{carry[1].loss_scale}",
        )
        carry = _call(closure, carry[1])
    return carry


def value_fn(
    closure: Closure, state: FP16_OptimizerState
) -> Callable[[PyTree], Float[Array, ""]]:
    """The loss at other masters, whose derivative the closure computes, scaled."""

    def value_and_grad(masters):
        at = state.replace(params=rounded(masters, state.params))
        loss, there = _call(closure, at)
        return loss, there.master_grads

    return with_gradient(value_and_grad)


def _call(closure: Closure, state: FP16_OptimizerState) -> Any:
    out = closure(state)
    if not (
        isinstance(out, tuple)
        and len(out) == 2
        and isinstance(out[1], FP16_OptimizerState)
    ):
        raise TypeError(
            "The closure must return (loss, state), as `optimizer.backward` does, got "
            f"{out!r}."
        )
    loss, state = out
    is_scalar = is_differentiable(loss) and jnp.shape(loss) == ()
    if not is_scalar or state.master_grads is None:
        raise TypeError(
            "The closure must call `optimizer.zero_grad` and `optimizer.backward`, and "
            f"return (loss, state) with the loss, a scalar; got the loss {loss!r}."
        )
    return loss, state.replace(first_closure_call_this_step=jnp.asarray(False))
