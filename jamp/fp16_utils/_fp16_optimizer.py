"""apex's `FP16_Optimizer`: masters, loss scale and gradients in one object.

Based on apex/fp16_utils/fp16_optimizer.py.
"""

from collections.abc import Callable, Mapping
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from jamp._core import tree as trees
from jamp._core.devices import place_like
from jamp._core.dtypes import FLOAT32, MODEL_DTYPES, is_half
from jamp._core.names import check_same, from_names, to_names
from jamp._core.numbers import check_scale, check_scale_state
from jamp._core.show import short_repr
from jamp._core.warnings import PrecisionWarning, UnusedOptionWarning, warn
from jamp._scaling import rules
from jamp._scaling.loss import checked_loss, grad_of_scaled
from jamp._state.closure import rounded, with_gradient
from jamp._state.grads import Gradients
from jamp._state.group import Group, pack_groups
from jamp._state.new_state import init_group
from jamp._state.step import step
from jamp.fp16_utils._fp16util import clip_grad_norm
from jamp.optimizers._masters import MasterWeights, MasterWeightsState, master_weights


class FP16State(flax.struct.PyTreeNode):
    """State of `FP16_Optimizer`.

    Attributes:
        params: the model's params, half or float32.
        opt_state: masters, and the state of the wrapped optimizer.
        model_grads: scaled float32 gradients that `update_master_grads` has not read
            yet, or None.
        master_grads: the float32 gradients since `zero_grad`, or None.
        overflow: whether any of the `master_grads` is not finite, shape (), bool.
        loss_scaler: the loss scale and its counters.
    """

    params: Any
    opt_state: MasterWeightsState
    model_grads: Any
    master_grads: Any
    overflow: Bool[Array, ""]
    loss_scaler: rules.LossScaleState

    @property
    def loss_scale(self) -> Float[Array, ""]:
        """The loss scale, shape (), float32."""
        return self.loss_scaler.scale


type Closure = Callable[[FP16State], tuple[Float[Array, ""], FP16State]]


class FP16_Optimizer:  # noqa: N801, apex's name
    """Wraps an optax optimizer for a model with half params.

    This is apex's older interface. `AmpState` does the same with fewer calls. Methods
    work under `jit`, and then print nothing.

    Args:
        init_optimizer: an optax transformation.
        static_loss_scale: a loss scale that does not move and checks nothing.
        dynamic_loss_scale: whether the scale moves, and overflows skip steps.
        dynamic_loss_args: `init_scale` (2^16), `scale_factor` (2), `scale_window`
            (2000), `min_loss_scale`, `max_loss_scale` (2^24).
        verbose: whether `init` prints the params' dtypes and shapes.

    Raises:
        TypeError: `init_optimizer` is not a transformation, or an argument is unknown.
        ValueError: `init_optimizer` keeps masters, or a number is out of range.

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

    optimizer: MasterWeights
    rule: rules.LossScaleRule
    _unscales_in_step: bool = False  # instead of after each `backward`

    def __init__(
        self,
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

    def _configure(self, tx: Any, static: float, args: Any) -> None:
        self.optimizer = master_weights(tx)
        self.rule = rules.StaticLossScale(static)
        if self.dynamic_loss_scale:
            args = args or {}
            for name in args:
                if name not in _NAMES:
                    raise TypeError(
                        f"dynamic_loss_args has no {name!r}; its keys are {[*_NAMES]}."
                    )
            own = {_NAMES[name]: value for name, value in args.items()}
            self.rule = rules.DynamicLossScale(**own)

    def init(self, params: PyTree) -> FP16State:
        """Returns the state for half and float32 params, with zero gradients.

        Raises:
            TypeError: a float leaf has another dtype.
        """
        self._check_params(params)
        lines = ["FP16_Optimizer processing param group 0:"]
        trained = trees.differentiable(params)
        for path, leaf in jax.tree_util.tree_leaves_with_path(trained):
            dtype = getattr(leaf, "dtype", type(leaf).__name__)
            if dtype not in MODEL_DTYPES:
                raise TypeError(
                    "Wrapped parameters must be either float32, float16 or bfloat16. "
                    f"Received params{jax.tree_util.keystr(path)}: {dtype}."
                )
            lines.append(f"FP16_Optimizer received {dtype} with {jnp.shape(leaf)}")
        if self.verbose and jax.process_index() == 0:
            print("\n".join(lines))
        group = init_group(self.optimizer, params, params)
        state = FP16State(
            **pack_groups({None: group}),
            model_grads=None,
            master_grads=None,
            overflow=jnp.asarray(False),
            loss_scaler=self.rule.init(),
        )
        return trees.copy_shared(self.zero_grad(state), params)

    def _check_params(self, params: PyTree) -> None:
        """Raises if params and optimizers have different groups."""

    def backward(
        self,
        state: FP16State,
        loss_fn: Callable[..., Any],
        *args: Any,
        update_master_grads: bool = True,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, FP16State]:
        """Adds gradients of `loss_fn(params, *args, **kwargs)` to `state.model_grads`.

        It then calls `update_master_grads`, unless the argument is False. Pass False
        for all losses but the last.

        Returns:
            `(loss, state)`, or `((loss, aux), state)` with `has_aux`. The loss is
            unscaled and float32.
        """
        held, checks = (state.params, state.loss_scale), self.rule.check
        value, grads = grad_of_scaled(
            loss_fn, *held, args, kwargs, has_aux, checks=checks
        )
        grads = _add(state.model_grads, trees.widen_tree(grads))
        state = state.replace(model_grads=grads)
        if update_master_grads and not self._unscales_in_step:
            state = self.update_master_grads(state)
        return value, state

    def update_master_grads(self, state: FP16State) -> FP16State:
        """Unscales `model_grads`, adds them to `master_grads`, and moves the scale."""
        grads = state.model_grads
        if grads is None and state.master_grads is not None:
            grads = _zeros(state.params)
        fresh = rules.unscale_tree(_needed(grads), state.loss_scale)
        finite = self._are_finite(fresh) if self.rule.check else jnp.asarray(True)
        if self._unscales_in_step:  # one update for all passes since `zero_grad`
            finite &= ~state.overflow
        before = state.loss_scaler
        # `step` counts the skips, because a step may have several passes.
        moved = self.rule.update(before, finite)._replace(
            consecutive_skips=before.consecutive_skips
        )
        return state.replace(
            model_grads=None,
            master_grads=_add(state.master_grads, fresh),
            overflow=state.overflow | ~finite,
            loss_scaler=moved,
        )

    def _are_finite(self, grads: PyTree) -> Bool[Array, ""]:
        return trees.all_finite(grads)

    def clip_master_grads(
        self, state: FP16State, max_norm: ArrayLike, norm_type: float | str = 2
    ) -> tuple[Float[Array, ""], FP16State]:
        """Clips `master_grads` with `clip_grad_norm`, and returns `(norm, state)`.

        After an overflow, the norm is -1, and the gradients do not change.
        """
        grads = _needed(state.master_grads)
        norm, clipped = clip_grad_norm(grads, max_norm, norm_type)
        clipped = trees.select(state.overflow, grads, clipped)
        norm = jnp.where(state.overflow, -1.0, norm)
        return norm, state.replace(master_grads=clipped)

    def step(self, state: FP16State, closure: Closure | None = None) -> Any:
        """Steps the masters and rounds them to the params, or skips on overflow.

        A closure `state -> (loss, state)` calls `zero_grad` and `backward`. `step`
        calls it again while it overflows and the scale is above its floor. A line
        search also calls it. With a closure, `step` returns `(loss, state)`.
        """
        loss, update_args = None, {}
        if closure is not None:
            loss, state = self._call_until_finite(closure, state)
            update_args = {"value": loss, "grad": state.master_grads}

            def value_and_grad(masters):
                params = rounded(masters, state.params)
                value, there = self._call(closure, state.replace(params=params))
                return value, _needed(there.master_grads)

            update_args["value_fn"] = with_gradient(value_and_grad)
        elif self._unscales_in_step:
            state = self.update_master_grads(state)
        grads, finite = jax.tree.leaves(_needed(state.master_grads)), True
        if self.rule.check:
            self._say(state, "Gradient overflow. ")
            finite = ~state.overflow
            skips = rules.count_skips(state.loss_scaler, finite)
            scaler = state.loss_scaler._replace(consecutive_skips=skips)
            state = state.replace(loss_scaler=scaler)
        given = Gradients(grads, [], finite)
        group = step(self._group(state), given, update_args=update_args)
        state = state.replace(**pack_groups({None: group}))
        return state if closure is None else (loss, state)

    def _call_until_finite(self, closure: Closure, state: FP16State) -> Any:
        """Calls the closure again while its gradients overflow and the scale falls."""
        floor = rules.lowest_scale(self.rule)
        again = lambda carry: self._call(closure, carry[1])  # noqa: E731
        goes_on = lambda carry: carry[1].overflow & (carry[1].loss_scale > floor)  # noqa: E731
        carry = self._call(closure, state)
        if trees.is_traced(carry[1].overflow):
            return jax.lax.while_loop(goes_on, again, carry)
        while goes_on(carry):
            self._say(carry[1], "OVERFLOW within closure!")
            carry = again(carry)
        return carry

    def _say(self, state: FP16State, what: str) -> None:
        """Prints apex's line on overflow, except under `jit`."""
        overflow, scale = state.overflow, state.loss_scale
        if trees.is_traced(overflow) or not overflow or jax.process_index() != 0:
            return
        does = "keeping loss scale"
        if self.rule.moves:
            at_floor = scale <= rules.lowest_scale(self.rule)
            does = (
                "loss scale at its floor of" if at_floor else "reducing loss scale to"
            )
        print(f"{what} Skipping step, {does} {scale}")

    def _call(self, closure: Closure, state: FP16State) -> tuple[Array, FP16State]:
        match closure(state):
            case (loss, FP16State() as state):
                if self._unscales_in_step:
                    state = self.update_master_grads(state)
                return checked_loss(loss)[0], state
            case result:
                raise TypeError(
                    "The closure must return (loss, state) of `optimizer.backward`, "
                    f"got {short_repr(result)}."
                )

    def zero_grad(self, state: FP16State, set_grads_to_None: bool = False) -> FP16State:
        """Returns the state with gradients of zero or None, and no overflow."""
        drops = set_grads_to_None or self._unscales_in_step
        grads = None if drops else _zeros(state.params)
        none = jnp.zeros_like(state.overflow)
        return state.replace(model_grads=None, master_grads=grads, overflow=none)

    def inspect_master_grad_data(self, state: FP16State) -> PyTree | None:
        """Returns the masters' gradients. After an overflow, warns and returns None."""
        if state.overflow:
            warn("The gradients overflowed and are invalid.", PrecisionWarning)
        return None if state.overflow else state.master_grads

    def set_loss_scale(self, state: FP16State, value: ArrayLike) -> FP16State:
        """Returns the state with another loss scale, and rescales `model_grads`."""
        check_scale("value", value)
        scale = place_like(jnp.asarray(value, FLOAT32), state.loss_scale)
        ratio = scale / state.loss_scale
        return state.replace(
            model_grads=jax.tree.map(lambda g: g * ratio, state.model_grads),
            loss_scaler=state.loss_scaler._replace(scale=scale),
        )

    def master_params(self, state: FP16State) -> PyTree:
        """Returns the params in float32, from the masters if there are any."""
        return self._group(state).wide()

    def state_dict(self, state: FP16State) -> dict[str, Any]:
        """Returns apex's state dict, which has no gradients. Save it after `step`."""
        return to_names(self._saved(state))

    def _saved(self, state: FP16State) -> dict[str, PyTree]:
        params = trees.differentiable(state.params)
        return {
            "loss_scaler": state.loss_scaler,
            "dynamic_loss_scale": jnp.asarray(self.dynamic_loss_scale),
            "overflow": state.overflow,
            "optimizer_state_dict": state.opt_state.inner_state,
            "fp32_from_fp16": state.opt_state.masters,
            "fp32_from_fp32": jax.tree.map(lambda p: None if is_half(p) else p, params),
        }

    def load_state_dict(
        self, state: FP16State, state_dict: Mapping[str, Any]
    ) -> FP16State:
        """Returns the state with the values of a `state_dict`, and rounds the params.

        Raises:
            ValueError: a name, a shape, a dtype or the kind of loss scale differs.
        """
        saved = self._saved(state)
        names = jax.eval_shape(to_names, saved)
        remedy = "Nothing was loaded: use the optimizer and params of the saved run."
        check_same(state_dict, names, "The state dict", remedy)
        parts = from_names(saved, state_dict)
        check_scale_state("loss_scaler", parts["loss_scaler"]._asdict())
        if parts.pop("dynamic_loss_scale") != self.dynamic_loss_scale:
            other = f"dynamic_loss_scale={not self.dynamic_loss_scale}"
            raise ValueError(f"The state dict was saved with {other}: pass it too.")
        masters = parts.pop("fp32_from_fp16")
        wide = jax.tree.map(
            lambda own, master: master if own is None else own,
            parts.pop("fp32_from_fp32"),
            masters,
            is_leaf=lambda x: x is None,
        )
        inner_state = parts.pop("optimizer_state_dict")
        parts["opt_state"] = MasterWeightsState(masters, inner_state)
        parts["params"] = rounded(wide, state.params)
        return trees.copy_shared(state.replace(**parts), (state, state_dict))

    def _group(self, state: FP16State) -> Group:
        return Group.of(self.optimizer, state.opt_state, state.params)


# apex's names of the arguments of a dynamic scale, and jamp's.
_NAMES = {
    "init_scale": "init_scale",
    "scale_factor": "factor",
    "scale_window": "window",
    "min_loss_scale": "min_scale",
    "max_loss_scale": "max_scale",
}


def _zeros(params: PyTree) -> PyTree:
    """Makes float32 zeros like the params."""
    trained = trees.differentiable(params)
    return jax.tree.map(lambda p: jnp.zeros_like(p, FLOAT32), trained)


def _add(before: PyTree | None, grads: PyTree) -> PyTree:
    return grads if before is None else jax.tree.map(jnp.add, before, grads)


def _needed[T](grads: T | None) -> T:
    """Returns the gradients, or raises if they are None."""
    if grads is None:
        raise ValueError(
            "There are no gradients: call `loss, state = optimizer.backward(state, "
            "loss_fn, ...)` first."
        )
    return grads
