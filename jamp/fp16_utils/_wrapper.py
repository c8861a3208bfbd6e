"""Code that both FP16_Optimizers share: settings, `backward` and checkpoints."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core import tree as trees
from jamp._core.dtypes import is_half
from jamp._core.names import check_same, from_names, to_names
from jamp._core.warnings import UnusedOptionWarning, warn
from jamp._scaling.incoming import check_scale_state
from jamp._scaling.loss import grad_of_scaled
from jamp._scaling.rules import LossScaleRule, LossScaleState
from jamp._state.closure import rounded
from jamp._state.new_state import init_group
from jamp._state.step import Group, step, wide_group
from jamp.optimizers._masters import MasterWeights, MasterWeightsState


class WrapperState(flax.struct.PyTreeNode):
    """The fields that both states have; subclasses describe them."""

    params: Any
    opt_state: Any
    model_grads: Any
    overflow: Bool[Array, ""]
    loss_scaler: LossScaleState

    @property
    def loss_scale(self) -> Float[Array, ""]:
        """The loss scale, shape (), float32."""
        return self.loss_scaler.scale


class Wrapper:
    """An optimizer that holds settings, and whose methods take a state first.

    `_configure` of a subclass sets `optimizer` and `rule`.
    """

    state_class: ClassVar[type]
    optimizer: MasterWeights
    rule: LossScaleRule

    def __init__(
        self: Any,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ):
        unused = "static_loss_scale" if static_loss_scale != 1.0 else None
        if not dynamic_loss_scale:
            unused = None if dynamic_loss_args is None else "dynamic_loss_args"
        if unused:
            text = f"{unused} has no effect with {dynamic_loss_scale=}."
            warn(text, UnusedOptionWarning)
        self.dynamic_loss_scale: bool = bool(dynamic_loss_scale)
        self.verbose: bool = verbose
        self._configure(init_optimizer, static_loss_scale, dynamic_loss_args)

    def _init(self, params: PyTree, **fields: Any) -> Any:
        group = init_group(self.optimizer, params, params)
        fields |= {"params": group.params, "opt_state": group.opt_state}
        fields |= {"overflow": jnp.asarray(False), "loss_scaler": self.rule.init()}
        return trees.copy_shared(self.state_class(**fields), params)

    def backward(
        self,
        state: Any,
        loss_fn: Callable[..., Any],
        *args: Any,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Adds the gradients of `loss_fn(params, *args, **kwargs)` times the scale.

        Returns:
            `(loss, state)`, or `((loss, aux), state)` with `has_aux`; the loss
            unscaled, in float32.
        """
        self._check(state)
        held, checks = (state.params, state.loss_scale), self.rule.checks
        value, grads = grad_of_scaled(
            loss_fn, *held, args, kwargs, has_aux, checks=checks
        )
        return value, state.replace(model_grads=self._sum(state.model_grads, grads))

    def _sum(self, before: PyTree | None, grads: PyTree) -> PyTree:
        return grads if before is None else jax.tree.map(jnp.add, before, grads)

    def _stepped(self, state: Any, grads: PyTree, clean: Any, **args: Any) -> Any:
        group = step(self._group(state), grads, clean=clean, update_args=args)
        return state.replace(params=group.params, opt_state=group.opt_state)

    def _group(self, state: Any) -> Group:
        return Group(self.optimizer, state.opt_state, state.params)

    def master_params(self, state: Any) -> PyTree:
        """The params in float32: masters, and those that are their own."""
        self._check(state)
        return wide_group(self._group(state))

    def state_dict(self, state: Any) -> dict[str, Any]:
        """A checkpoint by apex's names, without gradients: save after `step`."""
        self._check(state)
        return to_names(self._saved(state))

    def _saved(self, state: Any) -> dict[str, PyTree]:
        params = trees.differentiable(state.params)
        return {
            "loss_scaler": state.loss_scaler,
            "dynamic_loss_scale": jnp.asarray(self.dynamic_loss_scale),
            "overflow": state.overflow,
            "optimizer_state_dict": state.opt_state.inner_state,
            "fp32_from_fp16": state.opt_state.masters,
            "fp32_from_fp32": jax.tree.map(lambda p: None if is_half(p) else p, params),
        }

    def load_state_dict(self, state: Any, state_dict: Mapping[str, Any]) -> Any:
        """The state with the values of a `state_dict`, and params rounded from them.

        Raises:
            ValueError: a name, shape or dtype differs, or the kind of loss scale.
        """
        self._check(state)
        saved = self._saved(state)
        names = jax.eval_shape(to_names, saved)
        remedy = "Nothing was loaded: wrap the optimizer and params of the saved run."
        check_same(state_dict, names, "The state dict", remedy)
        parts = from_names(saved, state_dict)
        check_scale_state("loss_scaler", parts["loss_scaler"]._asdict())
        if parts.pop("dynamic_loss_scale") != self.dynamic_loss_scale:
            other = f"dynamic_loss_scale={not self.dynamic_loss_scale}"
            raise ValueError(f"The state dict was saved with {other}: construct so.")
        masters = parts.pop("fp32_from_fp16")
        wide = trees.merge(parts.pop("fp32_from_fp32"), masters)
        inner_state = parts.pop("optimizer_state_dict")
        parts["opt_state"] = MasterWeightsState(masters, inner_state)
        parts["params"] = rounded(wide, state.params)
        return trees.copy_shared(state.replace(**parts), (state, state_dict))

    def _check(self, state: object) -> None:
        if not isinstance(state, self.state_class):
            raise TypeError(
                f"Methods of {type(self).__name__} take the state that "
                f"`optimizer.init(params)` returned, got {type(state).__name__}."
            )


def check_dtypes(params: PyTree, allowed: Iterable[Any]) -> list[str]:
    """A line per leaf with dtype and shape; raises unless the dtypes are allowed."""
    lines = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        dtype = getattr(leaf, "dtype", type(leaf).__name__)
        if dtype not in allowed:
            raise TypeError(
                f"Wrapped parameters must be {' or '.join(map(str, allowed))}. "
                f"Received params{jax.tree_util.keystr(path)}: {dtype}."
            )
        lines.append(f"FP16_Optimizer received {dtype} with {jnp.shape(leaf)}")
    return lines


def needed[T](grads: T | None) -> T:
    """The gradients; raises if there are none."""
    if grads is None:
        raise ValueError(
            "There are no gradients: call `loss, state = optimizer.backward(state, "
            "loss_fn, ...)` first."
        )
    return grads


def say(overflow: Bool[Array, ""] | bool, message: str) -> None:
    """Prints a message on overflow, except under `jit`."""
    if not trees.is_traced(overflow) and overflow and jax.process_index() == 0:
        print(message)
