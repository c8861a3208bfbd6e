"""What an `FP16_Optimizer` carries from step to step, and saves."""

from collections.abc import Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core.names import check_same, from_names, to_names
from jamp._core.tree import differentiable, is_traced, widen_tree
from jamp._scaling.rules import LossScaleState
from jamp.optimizers._masters import MasterWeightsState


class FP16_OptimizerState(flax.struct.PyTreeNode):  # noqa: N801, apex's name
    """State of `FP16_Optimizer`.

    Attributes:
        params: what the model consumes: half, and float32 where they were.
        opt_state: masters, and the state of the wrapped optimizer.
        model_grads: gradients times the loss scale since the last
            `update_master_grads`, in float32; None where dropped.
        master_grads: gradients since `zero_grad`, in float32; None where dropped.
        overflow: whether some of those are not finite, shape (), bool.
        first_closure_call_this_step: whether a closure is called for the first time in
            a step, shape (), bool.
        loss_scaler: the loss scale and its counters.
    """

    params: Any
    opt_state: MasterWeightsState
    model_grads: Any
    master_grads: Any
    overflow: Bool[Array, ""]
    first_closure_call_this_step: Bool[Array, ""]
    loss_scaler: LossScaleState

    @property
    def loss_scale(self) -> Float[Array, ""]:
        """The present loss scale, shape (), float32."""
        return self.loss_scaler.scale


def zeros(params: PyTree) -> PyTree:
    """Gradients of 0 in float32."""
    return jax.tree.map(jnp.zeros_like, widen_tree(differentiable(params)))


def added(before: PyTree | None, grads: PyTree) -> PyTree:
    """The sum of gradients; there may be none before."""
    return grads if before is None else jax.tree.map(jnp.add, before, grads)


def say(overflow: Bool[Array, ""], message: str) -> None:
    """Prints a message if there is an overflow, and not under `jit`."""
    if not is_traced(overflow) and overflow and jax.process_index() == 0:
        print(message)


def check_state(kind: type, state: object, call: str) -> None:
    """Raises unless a method of an optimizer was called with its state."""
    if not isinstance(state, kind):
        raise TypeError(
            f"FP16_Optimizer.{call} takes the state of `optimizer.init(params)` first, "
            f"got {type(state).__name__}."
        )


def checked_parts(
    saved: dict[str, PyTree], state_dict: Mapping[str, Any], alike: str
) -> dict[str, PyTree]:
    """The parts of a state as a state dict has them, once all of it has been checked.

    Args:
        saved: the parts of the present state, by the names that are written.
        state_dict: what was written.
        alike: what must be as in the run that did so.
    """
    if not isinstance(state_dict, Mapping):
        kind = type(state_dict).__name__
        raise TypeError(f"load_state_dict takes a mapping, got {kind}.")
    remedy = f"Nothing was loaded: wrap {alike} of the run that saved it."
    check_same(state_dict, jax.eval_shape(to_names, saved), "The state dict", remedy)
    return from_names(saved, state_dict)


def needed[T](grads: T | None) -> T:
    """The gradients; raises if there are none."""
    if grads is None:
        raise ValueError(
            "There are no gradients, after zero_grad(set_grads_to_None=True): call "
            "`loss, state = optimizer.backward(state, loss_fn, ...)` first."
        )
    return grads
