"""What an `FP16_Optimizer` carries from step to step."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core.tree import differentiable, is_traced, widen_tree
from jamp._scaling.rules import LossScaleState
from jamp._scaling.scaled_grads import ScaledGrads
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
    model_grads: ScaledGrads | None
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


def zero_model_grads(params: PyTree, scale: Float[Array, ""]) -> ScaledGrads:
    """Scaled gradients of 0."""
    # A copy: a scale that occurred twice in the state could not be donated.
    scale = jnp.array(scale, copy=True)
    return ScaledGrads(tree=zeros(params), scale=scale, finite=jnp.asarray(True))


def say(overflow: Bool[Array, ""], message: str) -> None:
    """Prints a message if there is an overflow, and not under `jit`."""
    if not is_traced(overflow) and overflow and jax.process_index() == 0:
        print(message)
