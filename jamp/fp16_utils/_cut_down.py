"""The cut-down `FP16_Optimizer`: all params half, in one flat buffer per group.

After apex/optimizers/fp16_optimizer.py of 2019. `AmpState` does more and with less to
call; `jamp.fp16_utils.FP16_Optimizer` takes any optimizer.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, Int, PyTree

from jamp._core import groups
from jamp._core.dtypes import FLOAT32, HALF_DTYPES
from jamp._core.groups import Key
from jamp._core.names import to_names
from jamp._core.numbers import check_count, check_scale
from jamp._core.tree import copy_shared, strong_array
from jamp._core.warnings import UnusedOptionWarning, warn
from jamp._scaling.loss import grad_of_scaled
from jamp._state.closure import rounded
from jamp._state.incoming import check_containers
from jamp.fp16_utils._scalers import (
    UNUSED,
    DynamicLossScaler,
    LossScaler,
    LossScalerState,
)
from jamp.fp16_utils._state import added, check_state, checked_parts, say
from jamp.optimizers._fused import FusedTransformation
from jamp.optimizers._masters import joined, parted
from pallas_kernels import norm

_DYNAMIC = DynamicLossScaler(2.0**16, scale_factor=2.0, scale_window=1000)


class FP16OptimizerState(flax.struct.PyTreeNode):
    """State of the cut-down `FP16_Optimizer`. Buffers come once per group.

    Attributes:
        fp16_flat: the params, half, shape (n,).
        fp32_flat: their masters, float32, shape (n,).
        opt_state: the state of the fused optimizer, whose moments are flat too.
        grads: gradients times the scale, half, shape (n,); None where there are none.
        overflow: whether the last step was skipped, shape (), bool.
        loss_scaler: scale, iteration, and that of the last overflow.
        specs: by group, the function from a buffer to its params. Static.
    """

    fp16_flat: Any
    fp32_flat: Any
    opt_state: Any
    grads: Any
    overflow: Bool[Array, ""]
    loss_scaler: LossScalerState
    specs: tuple[tuple[Key, Callable[[Array], Any]], ...] = flax.struct.field(
        pytree_node=False
    )

    @property
    def params(self) -> Any:
        """The params as the model has them, half."""
        flat = self.fp16_flat
        trees = {k: unravel(groups.get(flat, k)) for k, unravel in self.specs}
        return groups.pack(trees, flat)

    @property
    def loss_scale(self) -> Float[Array, ""]:
        """The present loss scale, shape (), float32."""
        return self.loss_scaler.cur_scale

    cur_scale = loss_scale

    @property
    def cur_iter(self) -> Int[Array, ""]:
        """How many steps there were, skipped ones too, shape (), int32."""
        return self.loss_scaler.cur_iter

    @property
    def last_overflow_iter(self) -> Int[Array, ""]:
        """The last step that was skipped, or -1, shape (), int32."""
        return self.loss_scaler.last_overflow_iter


class FP16_Optimizer:  # noqa: N801, apex's name
    """Loss scale and masters around a fused optimizer, on flat buffers.

    Unscaling, clipping, the step and the half copy are one pass over each buffer. A
    step whose gradients are not finite is skipped, under a static scale too. A dynamic
    scale starts at 2^16, halves on overflow but not below 1, and doubles each 1000
    steps without one. Methods work under `jit`, where no message is printed.

    >>> import jamp
    >>> optimizer = FP16_Optimizer(jamp.optimizers.fused_sgd(0.5), 64.0, verbose=False)
    >>> state = optimizer.init({"w": jnp.ones(2, jnp.float16)})
    >>> loss_fn = lambda params: (params["w"] ** 2).sum(dtype="float32")
    >>> loss, state = optimizer.backward(state, loss_fn)
    >>> state = optimizer.zero_grad(optimizer.step(state))
    >>> print(loss, state.params["w"], state.fp32_flat)
    2.0 [0. 0.] [0. 0.]
    """

    def __init__(
        self,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ):
        """Wraps a fused optimizer.

        Args:
            init_optimizer: one of `jamp.optimizers`, such as `fused_adam(legacy=True,
                max_grad_norm=1.0)`; or a list, tuple or dict of them, one per group.
            static_loss_scale: the loss scale.
            dynamic_loss_scale: whether it moves.
            dynamic_loss_args: refused, as by apex.
            verbose: whether overflows under a dynamic scale are printed.

        Raises:
            TypeError: an optimizer is not fused.
            SystemError: `dynamic_loss_args`.
            ValueError: the scale is not a number between 2^-126 and 2^126.
        """
        keys = groups.group_keys(init_optimizer)
        self._txs = groups.split(init_optimizer, keys)
        for tx in self._txs.values():
            if not isinstance(tx, FusedTransformation):
                raise TypeError(
                    "The cut-down FP16_Optimizer steps flat buffers with a fused "
                    f"optimizer of jamp.optimizers, got {tx!r}. For any other there "
                    "is jamp.fp16_utils.FP16_Optimizer."
                )
        if dynamic_loss_args is not None:
            raise SystemError("Do not support dynamic loss scale args for now.")
        if dynamic_loss_scale and static_loss_scale != 1.0:
            warn(UNUSED.format("static_loss_scale", False), UnusedOptionWarning)
        check_scale("static_loss_scale", static_loss_scale)
        self.optimizer = init_optimizer
        self.dynamic_loss_scale: bool = bool(dynamic_loss_scale)
        self.static_loss_scale: float = float(static_loss_scale)
        self._scaler = _DYNAMIC if dynamic_loss_scale else LossScaler(static_loss_scale)
        self.verbose = verbose

    def init(self, params: PyTree) -> FP16OptimizerState:
        """The state for a model.

        Args:
            params: trees of half params, in the container of the optimizers; each of
                one dtype.

        Returns:
            A state without gradients.

        Raises:
            TypeError: a leaf that is not half, or of another dtype than the first.
            ValueError: params in another container than the optimizers.
        """
        check_containers(params, self.optimizer)
        half, masters, begun, specs = {}, {}, {}, {}
        for key, tx in self._txs.items():
            tree = groups.get(params, key)
            _check_half(tree, "params" if key is None else f"params[{key!r}]")
            half[key], specs[key] = ravel_pytree(tree)
            masters[key] = half[key].astype(FLOAT32)
            begun[key] = tx.init(masters[key])
        return FP16OptimizerState(
            fp16_flat=groups.pack(half, params),
            fp32_flat=groups.pack(masters, params),
            opt_state=jax.tree.map(strong_array, groups.pack(begun, params)),
            grads=None,
            overflow=jnp.asarray(False),
            loss_scaler=self._scaler.init(),
            specs=tuple(specs.items()),
        )

    def backward(
        self,
        state: FP16OptimizerState,
        loss_fn: Callable[..., Any],
        *args: Any,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, FP16OptimizerState]:
        """Adds the gradients of a loss times the loss scale to `state.grads`, in half.

        Args, results, errors: as of `jamp.fp16_utils.FP16_Optimizer.backward`.
        """
        _check(state, "backward(state, loss_fn, ...)")
        value, grads = grad_of_scaled(
            loss_fn, state.params, state.loss_scale, args, kwargs, has_aux, checks=True
        )
        flat = {key: ravel_pytree(groups.get(grads, key))[0] for key in self._txs}
        flat = groups.pack(flat, state.fp16_flat)
        return value, state.replace(grads=added(state.grads, flat))

    def step(self, state: FP16OptimizerState, closure: object = None) -> Any:
        """Steps, or skips if a group's norm is not finite; and moves the scale.

        Args:
            state: the state.
            closure: not called, as in apex; a warning says so.

        Returns:
            The state.

        Raises:
            ValueError: there are no gradients.
        """
        _check(state, "step(state)")
        if closure is not None:
            message = "The cut-down FP16_Optimizer does not call a closure."
            warn(message, UnusedOptionWarning)
        if state.grads is None:
            raise ValueError(
                "There are no gradients: call `loss, state = optimizer.backward(state, "
                "loss_fn, ...)` first."
            )
        norms = [
            norm([groups.get(state.grads, key)], options=tx.rule.options())
            for key, tx in self._txs.items()
        ]
        overflow = ~functools.reduce(jnp.logical_and, map(jnp.isfinite, norms))
        dynamic, scaler = self.dynamic_loss_scale, state.loss_scaler
        if self.verbose or not dynamic:
            say(
                overflow,
                f"Grad overflow on iteration {scaler.cur_iter}\n"
                f"Using {'dynamic' if dynamic else 'static'} loss scale of "
                f"{scaler.cur_scale}",
            )
        before, weights, opt_states = joined(state.fp16_flat, state.fp32_flat), {}, {}
        for key, tx in self._txs.items():
            weights[key], opt_states[key] = tx.apply(
                groups.get(state.grads, key),
                groups.get(state.opt_state, key),
                groups.get(before, key),
                grad_scale=scaler.cur_scale,
                found_inf=overflow,
            )
        halves, masters = parted(groups.pack(weights, state.fp16_flat))
        moved = self._scaler.update_scale(scaler, overflow)
        return state.replace(
            fp16_flat=halves,
            fp32_flat=masters,
            opt_state=groups.pack(opt_states, state.fp16_flat),
            overflow=overflow,
            loss_scaler=moved._replace(cur_iter=scaler.cur_iter + 1),
        )

    def zero_grad(
        self, state: FP16OptimizerState, set_grads_to_None: bool = True
    ) -> FP16OptimizerState:
        """The state without gradients, or with zeros."""
        _check(state, "zero_grad(state)")
        zeros = jax.tree.map(jnp.zeros_like, state.fp16_flat)
        return state.replace(grads=None if set_grads_to_None else zeros)

    def loss_scale(self, state: FP16OptimizerState) -> Float[Array, ""]:
        """The present loss scale, shape (), float32."""
        return state.loss_scale

    def state_dict(self, state: FP16OptimizerState) -> dict[str, Any]:
        """All that a checkpoint needs but gradients, by apex's names."""
        return to_names(self._saved(state))

    def load_state_dict(
        self, state: FP16OptimizerState, state_dict: Mapping[str, Any]
    ) -> FP16OptimizerState:
        """The state with the values of a `state_dict`, and half params made of them.

        Raises:
            TypeError: `state_dict` is not a mapping.
            ValueError: a name is missing or unexpected, or a shape or dtype differs.
                Nothing is taken before all has been checked.
        """
        _check(state, "load_state_dict(state, state_dict)")
        alike = "the optimizer, the params and the kind of loss scale"
        parts = checked_parts(self._saved(state), state_dict, alike)
        check_scale("cur_scale", state_dict["cur_scale"])
        check_count("cur_iter", state_dict["cur_iter"])
        masters = parts["fp32_groups_flat"]
        scaler = {k: parts[k] for k in LossScalerState._fields if k in parts}
        loaded = state.replace(
            fp32_flat=masters,
            fp16_flat=rounded(masters, state.fp16_flat),
            opt_state=parts["optimizer_state_dict"],
            loss_scaler=state.loss_scaler._replace(**scaler),
        )
        return copy_shared(loaded, (state, state_dict))

    def _saved(self, state: FP16OptimizerState) -> dict[str, PyTree]:
        saved = {
            "dynamic_loss_scale": jnp.asarray(self.dynamic_loss_scale),
            "cur_scale": state.cur_scale,
            "cur_iter": state.cur_iter,
            "optimizer_state_dict": state.opt_state,
            "fp32_groups_flat": state.fp32_flat,
        }
        if self.dynamic_loss_scale:
            saved |= {
                "last_overflow_iter": state.last_overflow_iter,
                "scale_factor": jnp.asarray(_DYNAMIC.scale_factor, jnp.float32),
                "scale_window": jnp.asarray(_DYNAMIC.scale_window, jnp.int32),
            }
        return saved


_check = functools.partial(check_state, FP16OptimizerState)


def _check_half(tree: PyTree, name: str) -> None:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    if not leaves:
        raise TypeError(f"{name} hold no arrays.")
    first = getattr(leaves[0][1], "dtype", None)
    for path, leaf in leaves:
        dtype = getattr(leaf, "dtype", None)
        if dtype not in HALF_DTYPES or dtype != first:
            raise TypeError(
                "The cut-down FP16_Optimizer takes params that are all float16, or all "
                f"bfloat16; {name}{jax.tree_util.keystr(path)} is "
                f"{dtype or type(leaf).__name__}. For others there is "
                "jamp.fp16_utils.FP16_Optimizer."
            )
