"""What an `FP16_Optimizer` carries from step to step, and saves."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core.dtypes import cast, is_half
from jamp._core.names import check_same, filled, named
from jamp._core.tree import differentiable, is_traced, merge, unshared, widen_tree
from jamp._scaling.incoming import check_scale_state
from jamp._scaling.rules import LossScaleState
from jamp.optimizers._masters import MasterWeightsState

_FLAGS = ("overflow", "first_closure_call_this_step")


class ModelGrads(NamedTuple):
    """Gradients of scaled losses, summed.

    Attributes:
        tree: the gradients times the loss scale, in float32.
        scale: the loss scale, shape (), float32.
        finite: whether all that were summed are finite, shape (), bool.
    """

    tree: PyTree
    scale: Float[Array, ""]
    finite: Bool[Array, ""]


class FP16_OptimizerState(flax.struct.PyTreeNode):  # noqa: N801, apex's name
    """State of `FP16_Optimizer`.

    Attributes:
        params: what the model consumes: half, and float32 where they were.
        opt_state: masters, and the state of the wrapped optimizer.
        model_grads: gradients times the loss scale since the last
            `update_master_grads`; None where dropped.
        master_grads: gradients since `zero_grad`, in float32; None where dropped.
        overflow: whether some of those are not finite, shape (), bool.
        first_closure_call_this_step: whether a closure is called for the first time in
            a step, shape (), bool.
        loss_scaler: the loss scale and its counters.
    """

    params: Any
    opt_state: MasterWeightsState
    model_grads: ModelGrads | None
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


def zero_model_grads(params: PyTree, scale: Float[Array, ""]) -> ModelGrads:
    """Scaled gradients of 0."""
    # A copy: a scale that occurred twice in the state could not be donated.
    return ModelGrads(zeros(params), jnp.array(scale, copy=True), jnp.asarray(True))


def added(sum_before: ModelGrads, grads: ModelGrads) -> ModelGrads:
    """The sum, in float32 and at the scale of `grads`."""
    # One, unless `set_loss_scale` was called between the two.
    ratio = grads.scale / sum_before.scale
    total = jax.tree.map(
        lambda a, b: a + b * ratio.astype(b.dtype),
        widen_tree(grads.tree),
        sum_before.tree,
    )
    return ModelGrads(total, grads.scale, grads.finite & sum_before.finite)


def say(overflow: Bool[Array, ""], message: str) -> None:
    """Prints a message if there is an overflow, and not under `jit`."""
    if not is_traced(overflow) and overflow and jax.process_index() == 0:
        print(message)


def check_state(kind: type, state: Any, call: str) -> None:
    """Raises unless a method of an optimizer was called with its state."""
    if not isinstance(state, kind):
        raise TypeError(
            f"FP16_Optimizer.{call} takes the state of `optimizer.init(params)` first, "
            f"got {type(state).__name__}."
        )


def check_state_dict(given: Any, expected: dict[str, Any], alike: str) -> None:
    """Raises unless `given` has the names, shapes and dtypes of `expected`."""
    if not isinstance(given, Mapping):
        raise TypeError(f"load_state_dict takes a mapping, got {type(given).__name__}.")
    remedy = f"Nothing was loaded: wrap {alike} of the run that saved it."
    check_same(given, expected, "The state dict", remedy)


def state_dict(state: FP16_OptimizerState, dynamic: bool) -> dict[str, Any]:
    """The state as nested dicts of arrays, without gradients."""
    return {
        "loss_scaler": named(state.loss_scaler),
        "dynamic_loss_scale": jnp.asarray(dynamic),
        **{name: getattr(state, name) for name in _FLAGS},
        "optimizer_state_dict": named(state.opt_state.inner_state),
        "fp32_from_fp16": named(state.opt_state.masters),
        "fp32_from_fp32": named(_own_masters(state.params)),
    }


def load_state_dict(
    state: FP16_OptimizerState, state_dict_: Mapping[str, Any], dynamic: bool
) -> FP16_OptimizerState:
    """The state with those values."""
    expected = jax.eval_shape(lambda s: state_dict(s, dynamic), state)
    check_state_dict(state_dict_, expected, "the optimizer and the params")
    if bool(state_dict_["dynamic_loss_scale"]) != dynamic:
        raise ValueError(
            f"The state dict is of dynamic_loss_scale={not dynamic}: construct "
            f"FP16_Optimizer(..., dynamic_loss_scale={not dynamic})."
        )
    check_scale_state("loss_scaler", state_dict_["loss_scaler"])
    masters = filled(state.opt_state.masters, state_dict_["fp32_from_fp16"])
    inner = filled(state.opt_state.inner_state, state_dict_["optimizer_state_dict"])
    own = filled(_own_masters(state.params), state_dict_["fp32_from_fp32"])

    def leaf(param, master, own_master):
        return cast(master, param.dtype) if is_half(param) else own_master

    params = jax.tree.map(leaf, differentiable(state.params), masters, own)
    loaded = state.replace(
        params=merge(params, state.params),
        opt_state=MasterWeightsState(masters, inner),
        loss_scaler=filled(state.loss_scaler, state_dict_["loss_scaler"]),
        **{name: filled(getattr(state, name), state_dict_[name]) for name in _FLAGS},
    )
    return unshared(loaded, (state, state_dict_))


def _own_masters(params: PyTree) -> Any:
    """The params that are their own masters, and holes where a half one is."""
    return jax.tree.map(
        lambda p: optax.MaskedNode() if is_half(p) else p, differentiable(params)
    )
