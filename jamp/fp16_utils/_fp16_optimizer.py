"""`FP16_Optimizer`: masters, loss scale and gradients behind one object.

After apex/fp16_utils/fp16_optimizer.py. The object holds what does not change; what
does is a state, which every method takes first and gives back last.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Float, PyTree

from jamp._core.devices import place_like
from jamp._core.dtypes import MODEL_DTYPES, is_half
from jamp._core.names import to_names
from jamp._core.tree import (
    copy_shared,
    differentiable,
    is_traced,
    select,
    strong_array,
    unscaled_finite,
    widen_tree,
)
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling.incoming import check_scale_state
from jamp._scaling.loss import grad_of_scaled
from jamp._scaling.rules import LossScaleRule, check_scale, unscale_tree
from jamp._state.closure import rounded
from jamp._state.new_state import begun_group
from jamp._state.step import Group, step, wide_group
from jamp.fp16_utils import _closure
from jamp.fp16_utils._fp16util import clip_grad_norm
from jamp.fp16_utils._scalers import rule_from_args
from jamp.fp16_utils._state import (
    FP16_OptimizerState,
    added,
    check_state,
    checked_parts,
    needed,
    say,
    zeros,
)
from jamp.optimizers._masters import MasterWeights, MasterWeightsState, master_weights

_check_state = functools.partial(check_state, FP16_OptimizerState)


class FP16_Optimizer:  # noqa: N801, apex's name
    """Wraps an optax optimizer for a model whose params are half.

    `AmpState` does the same with less to call; this is apex's older interface. Methods
    work under `jit`, where messages about overflows are not printed.

    >>> import optax
    >>> optimizer = FP16_Optimizer(optax.sgd(0.5), dynamic_loss_scale=True,
    ...                            dynamic_loss_args={"init_scale": 64}, verbose=False)
    >>> loss_fn = lambda w, x: (w * x).sum(dtype="float32")
    >>> state = optimizer.init(jnp.ones(2, jnp.float16))
    >>> x = jnp.array([1, 2], jnp.float16)
    >>> for _ in range(2):
    ...     state = optimizer.zero_grad(state)
    ...     loss, state = optimizer.backward(state, loss_fn, x)
    ...     state = optimizer.step(state)
    >>> print(loss, state.params, state.loss_scale)
    0.5 [ 0. -1.] 64.0
    """

    def __init__(
        self,
        init_optimizer: optax.GradientTransformation,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ):
        """Wraps an optimizer.

        Args:
            init_optimizer: an optax transformation.
            static_loss_scale: the loss scale.
            dynamic_loss_scale: whether it moves, and steps with overflows are skipped.
            dynamic_loss_args: of a dynamic scale: `init_scale` (2^16), `scale_factor`
                (2), `scale_window` (2000), `min_loss_scale`, `max_loss_scale` (2^24).
            verbose: whether `init` prints what it received.

        Raises:
            TypeError: `init_optimizer` is not a transformation; an unknown argument of
                the loss scale.
            ValueError: it keeps masters already; a number out of range.
        """
        if isinstance(init_optimizer, MasterWeights):
            raise ValueError(
                "FP16_Optimizer keeps the masters itself: pass the bare transformation."
            )
        self.optimizer: MasterWeights = master_weights(init_optimizer)
        self.dynamic_loss_scale: bool = bool(dynamic_loss_scale)
        self.verbose = verbose
        self.rule: LossScaleRule = rule_from_args(
            static_loss_scale, dynamic_loss_scale, dynamic_loss_args
        )

    def init(self, params: PyTree) -> FP16_OptimizerState:
        """The state for a model.

        Args:
            params: half, as of `network_to_half`; those in float32 are their own
                masters. Non-float leaves are left alone.

        Returns:
            A state whose gradients are zero. Its arrays are its own.

        Raises:
            TypeError: a float of another dtype.
        """
        self._say_groups(params)
        given, params = params, jax.tree.map(strong_array, params)
        _, opt_state, params = begun_group(self.optimizer, params, params)
        state = FP16_OptimizerState(
            params=params,
            opt_state=opt_state,
            model_grads=zeros(params),
            master_grads=zeros(params),
            overflow=jnp.asarray(False),
            first_closure_call_this_step=jnp.asarray(True),
            loss_scaler=self.rule.init(),
        )
        return copy_shared(state, given)

    def backward(
        self,
        state: FP16_OptimizerState,
        loss_fn: Callable[..., Any],
        *args: Any,
        update_master_grads: bool = True,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, FP16_OptimizerState]:
        """Adds the gradients of a loss times the loss scale to `state.model_grads`.

        Args:
            state: the state.
            loss_fn: `(params, *args, **kwargs) -> loss`, a float scalar, in float32
                rather than in half; or `(loss, aux)`.
            update_master_grads: whether to call `update_master_grads` too. Pass False
                for all losses but the last, or call it yourself.
            has_aux: whether `loss_fn` returns `(loss, aux)`.

        Returns:
            `(loss, state)` or `((loss, aux), state)`; the loss unscaled, in float32.

        Raises:
            TypeError: `state` is not an FP16_OptimizerState; the loss is not a float
                scalar.
        """
        _check_state(state, "backward(state, loss_fn, ...)")
        value, grads = grad_of_scaled(
            loss_fn,
            state.params,
            state.loss_scale,
            args,
            kwargs,
            has_aux,
            checks=self.rule.checks,
        )
        state = state.replace(model_grads=added(state.model_grads, widen_tree(grads)))
        if update_master_grads:
            state = self.update_master_grads(state)
        return value, state

    def update_master_grads(self, state: FP16_OptimizerState) -> FP16_OptimizerState:
        """Unscales `model_grads` and adds them to `master_grads`; moves the scale.

        Raises:
            ValueError: there are no gradients.
        """
        _check_state(state, "update_master_grads(state)")
        scaled = needed(state.model_grads)
        fresh = unscale_tree(scaled, state.loss_scale)
        overflow = state.overflow | ~self._finite(scaled)
        return state.replace(
            model_grads=zeros(state.params),
            master_grads=added(state.master_grads, fresh),
            overflow=overflow,
            loss_scaler=self.rule.update(state.loss_scaler, ~overflow),
        )

    def clip_master_grads(
        self,
        state: FP16_OptimizerState,
        max_norm: ArrayLike,
        norm_type: float | str = 2,
    ) -> tuple[Float[Array, ""], FP16_OptimizerState]:
        """Scales `master_grads` down to a norm, see `clip_grad_norm`.

        Returns:
            `(norm, state)`: the norm before; -1 in a state of overflow, whose gradients
            are left as they are.

        Raises:
            ValueError: there are no gradients; `norm_type` is not positive.
        """
        _check_state(state, "clip_master_grads(state, max_norm)")
        grads = needed(state.master_grads)
        norm, clipped = clip_grad_norm(grads, max_norm, norm_type)
        norm = jnp.where(state.overflow, -1.0, norm)
        grads = select(~state.overflow, clipped, grads)
        return norm, state.replace(master_grads=grads)

    def step(
        self,
        state: FP16_OptimizerState,
        closure: Callable[[FP16_OptimizerState], Any] | None = None,
    ) -> Any:
        """Steps the masters and rounds them to the params; or skips on overflow.

        A skip leaves every bit as it is; the loss scale fell in `update_master_grads`.

        Args:
            state: the state.
            closure: `state -> (loss, state)`, which calls `zero_grad` and `backward`
                itself. It is called again while it overflows, until the scale is at its
                floor; and by line searches, as often as they like.

        Returns:
            The state; with a closure `(loss, state)`.

        Raises:
            TypeError: the closure returned something else.
            ValueError: there are no gradients.
        """
        _check_state(state, "step(state)")
        loss, update_args = None, {}
        if closure is not None:
            loss, state = _closure.call_until_finite(closure, state, self.rule)
            update_args = {
                "value": loss,
                "grad": state.master_grads,
                "value_fn": _closure.value_fn(closure, state),
            }
        say(
            state.overflow,
            "Gradient overflow.  Skipping step, reducing loss scale to "
            f"{state.loss_scale}",
        )
        _, opt_state, params = step(
            Group(self.optimizer, state.opt_state, state.params),
            needed(state.master_grads),
            clean=~state.overflow if self.rule.checks else None,
            update_args=update_args,
        )
        state = state.replace(params=params, opt_state=opt_state)
        if closure is None:
            return state
        return loss, state.replace(first_closure_call_this_step=jnp.asarray(True))

    def zero_grad(
        self, state: FP16_OptimizerState, set_grads_to_None: bool = False
    ) -> FP16_OptimizerState:
        """The state without gradients, and without their overflow.

        Args:
            state: the state.
            set_grads_to_None: whether to drop them, which frees their memory until the
                next `backward`; else they are zeros.
        """
        _check_state(state, "zero_grad(state)")
        drop = set_grads_to_None
        return state.replace(
            model_grads=None if drop else zeros(state.params),
            master_grads=None if drop else zeros(state.params),
            overflow=jnp.zeros_like(state.overflow),
        )

    def inspect_master_grad_data(self, state: FP16_OptimizerState) -> PyTree | None:
        """The masters' gradients, float32; None, and a warning, after an overflow.

        Raises:
            TypeError: under `jit`, where nobody can look.
        """
        _check_state(state, "inspect_master_grad_data(state)")
        if is_traced(state.overflow):
            raise TypeError(
                "inspect_master_grad_data is for the host: call it outside of `jit`, "
                "or read state.master_grads and state.overflow."
            )
        if state.overflow:
            warn(
                "inspect_master_grad_data was called in a state of overflow: the "
                "gradients are invalid, so it returns None.",
                PrecisionWarning,
            )
            return None
        return state.master_grads

    def loss_scale(self, state: FP16_OptimizerState) -> Float[Array, ""]:
        """The present loss scale, shape (), float32."""
        return state.loss_scale

    def set_loss_scale(
        self, state: FP16_OptimizerState, value: ArrayLike
    ) -> FP16_OptimizerState:
        """The state with another loss scale; its counters stay.

        Gradients that wait for `update_master_grads` are scaled anew.

        Raises:
            ValueError: `value` is not a number between 2^-126 and 2^126.
        """
        if not is_traced(value):
            check_scale("value", float(value))  # pyright: ignore[reportArgumentType]
        scale = place_like(jnp.asarray(value, jnp.float32), state.loss_scale)
        rescaled = jax.tree.map(
            lambda g: g * (scale / state.loss_scale).astype(g.dtype), state.model_grads
        )
        loss_scaler = state.loss_scaler._replace(scale=scale)
        return state.replace(model_grads=rescaled, loss_scaler=loss_scaler)

    def master_params(self, state: FP16_OptimizerState) -> PyTree:
        """The params in float32: masters, and those that are their own."""
        return wide_group(Group(self.optimizer, state.opt_state, state.params))

    def state_dict(self, state: FP16_OptimizerState) -> dict[str, Any]:
        """All that a checkpoint needs, by name: apex's keys, and `fp32_from_fp32`.

        Gradients are not in it; save after `step`. (The state itself is a pytree, which
        Flax and Orbax save whole.)
        """
        return to_names(self._saved(state))

    def load_state_dict(
        self, state: FP16_OptimizerState, state_dict: Mapping[str, Any]
    ) -> FP16_OptimizerState:
        """The state with the values of a `state_dict`, and its params made of them.

        Raises:
            ValueError: a name is missing or unexpected, a shape or dtype differs, or
                the loss scale is of the other kind. Nothing is taken before all has
                been checked.
        """
        alike = "the optimizer and the params"
        parts = checked_parts(self._saved(state), state_dict, alike)
        if parts.pop("dynamic_loss_scale") != self.dynamic_loss_scale:
            other = not self.dynamic_loss_scale
            raise ValueError(
                f"The state dict is of dynamic_loss_scale={other}: construct "
                f"FP16_Optimizer(..., dynamic_loss_scale={other})."
            )
        check_scale_state("loss_scaler", state_dict["loss_scaler"])
        masters = parts.pop("fp32_from_fp16")
        widened = jax.tree.map(
            lambda param, master, own: master if is_half(param) else own,
            differentiable(state.params),
            masters,
            parts.pop("fp32_from_fp32"),
        )
        opt_state = MasterWeightsState(masters, parts.pop("optimizer_state_dict"))
        params = rounded(widened, state.params)
        loaded = state.replace(params=params, opt_state=opt_state, **parts)
        return copy_shared(loaded, (state, state_dict))

    def _saved(self, state: FP16_OptimizerState) -> dict[str, PyTree]:
        own = jax.tree.map(
            lambda p: optax.MaskedNode() if is_half(p) else p,
            differentiable(state.params),
        )
        return {
            "loss_scaler": state.loss_scaler,
            "dynamic_loss_scale": jnp.asarray(self.dynamic_loss_scale),
            "overflow": state.overflow,
            "first_closure_call_this_step": state.first_closure_call_this_step,
            "optimizer_state_dict": state.opt_state.inner_state,
            "fp32_from_fp16": state.opt_state.masters,
            "fp32_from_fp32": own,
        }

    def _finite(self, grads: PyTree) -> Any:
        if not self.rule.checks:
            return jnp.asarray(True)
        return unscaled_finite(self.optimizer, grads, grads)

    def _say_groups(self, params: PyTree) -> None:
        lines = ["FP16_Optimizer processing param group 0:"]
        for path, leaf in jax.tree_util.tree_leaves_with_path(differentiable(params)):
            dtype = getattr(leaf, "dtype", None)
            if dtype not in MODEL_DTYPES:
                raise TypeError(
                    "Wrapped parameters must be either float32, float16 or bfloat16. "
                    f"Received params{jax.tree_util.keystr(path)}: "
                    f"{dtype or type(leaf).__name__}."
                )
            lines.append(f"FP16_Optimizer received {dtype} with {jnp.shape(leaf)}")
        if self.verbose and jax.process_index() == 0:
            print("\n".join(lines))
