"""The state dict of an `FP16_Optimizer`: apex's keys, and all that a resume needs."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jamp._core.dtypes import cast, is_half
from jamp._core.names import check_same, filled, named
from jamp._core.tree import differentiable, merge, unshared
from jamp._scaling.incoming import check_scale_state
from jamp.fp16_utils._state import FP16_OptimizerState
from jamp.optimizers._masters import MasterWeightsState

_FLAGS = ("overflow", "first_closure_call_this_step")


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
    if not isinstance(state_dict_, Mapping):
        raise TypeError(
            f"load_state_dict takes a mapping, got {type(state_dict_).__name__}."
        )
    expected = jax.eval_shape(lambda s: state_dict(s, dynamic), state)
    check_same(
        state_dict_,
        expected,
        "The state dict",
        "Nothing was loaded: wrap the optimizer and the params of the run that saved "
        "it.",
    )
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


def _own_masters(params: Any) -> Any:
    """The params that are their own masters, and holes where a half one is."""
    return jax.tree.map(
        lambda p: optax.MaskedNode() if is_half(p) else p, differentiable(params)
    )
