"""apex's `FP16_Optimizer`: masters, loss scale and gradients behind one object.

After apex/fp16_utils/fp16_optimizer.py.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, ArrayLike, Bool, Float, PyTree

from jamp._core import tree as trees
from jamp._core.devices import place_like
from jamp._core.dtypes import MODEL_DTYPES, is_differentiable, is_half
from jamp._core.numbers import check_scale
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling import rules
from jamp._scaling.incoming import check_scale_state
from jamp._state.closure import rounded, with_gradient
from jamp._state.new_state import begun_group
from jamp._state.step import Group, step, wide_group
from jamp.fp16_utils._fp16util import clip_grad_norm
from jamp.fp16_utils._wrapper import Wrapper, add, needed, say
from jamp.optimizers._masters import MasterWeights, MasterWeightsState, master_weights


class FP16State(flax.struct.PyTreeNode):
    """State of `FP16_Optimizer`.

    Attributes:
        params: the model's params, half or float32.
        opt_state: masters, and the state of the wrapped optimizer.
        model_grads: gradients times the loss scale since the last
            `update_master_grads`, in float32; None where dropped.
        master_grads: gradients since `zero_grad`, in float32; None where dropped.
        overflow: whether some `master_grads` are not finite, shape (), bool.
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


# apex's names of a dynamic scale's arguments, and jamp's.
_NAMES = {
    "init_scale": "init_scale",
    "scale_factor": "factor",
    "scale_window": "window",
    "min_loss_scale": "min_scale",
    "max_loss_scale": "max_scale",
}

type Closure = Callable[[FP16State], tuple[Float[Array, ""], FP16State]]


class FP16_Optimizer(Wrapper):  # noqa: N801, apex's name
    """Wraps an optax optimizer for a model whose params are half.

    `AmpState` does the same with less to call; this is apex's older interface. Methods
    work under `jit`, where nothing is printed.

    Args:
        init_optimizer: an optax transformation.
        static_loss_scale: the loss scale, which checks nothing.
        dynamic_loss_scale: whether it moves, and steps with overflows are skipped.
        dynamic_loss_args: `init_scale` (2^16), `scale_factor` (2), `scale_window`
            (2000), `min_loss_scale`, `max_loss_scale` (2^24).
        verbose: whether `init` prints the params' dtypes and shapes.

    Raises:
        TypeError: `init_optimizer` is not a transformation, or an argument is unknown.
        ValueError: it keeps masters already, or a number is out of range.

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

    state_class: ClassVar[type] = FP16State

    @property
    def checks(self) -> bool:
        return self.rule.checks

    def _configure(self, tx: Any, static: float, args: Any) -> None:
        if isinstance(tx, MasterWeights):
            raise ValueError(
                "FP16_Optimizer keeps the masters itself: pass the bare transformation."
            )
        self.optimizer: MasterWeights = master_weights(tx)
        self.rule: rules.LossScaleRule = rules.StaticLossScale(static)
        if self.dynamic_loss_scale:
            args = args or {}
            if unknown := sorted(set(args) - set(_NAMES)):
                raise TypeError(
                    f"dynamic_loss_args has no {unknown[0]!r}; its keys are "
                    f"{[*_NAMES]}."
                )
            own = {_NAMES[name]: value for name, value in args.items()}
            self.rule = rules.DynamicLossScale(**own)

    def init(self, params: PyTree) -> FP16State:
        """The state for half and float32 params, with gradients of zero.

        Raises:
            TypeError: a float leaf has another dtype.
        """
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
        strong = jax.tree.map(trees.strong_array, params)
        group = begun_group(self.optimizer, strong, strong)
        grads = _zeros(strong), _zeros(strong)
        own = group.params, group.opt_state, *grads, jnp.asarray(False)
        return trees.copy_shared(FP16State(*own, self.rule.init()), params)

    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        state: FP16State,
        loss_fn: Callable[..., Any],
        *args: Any,
        update_master_grads: bool = True,
        **kwargs: Any,
    ) -> tuple[Any, FP16State]:
        """Adds the gradients of a loss times the loss scale to `state.model_grads`.

        Calls `update_master_grads` too, unless that is False, as for all losses but the
        last.
        """
        value, state = super().backward(state, loss_fn, *args, **kwargs)
        return value, self.update_master_grads(state) if update_master_grads else state

    def _add(self, state: FP16State, grads: PyTree) -> FP16State:
        wide = trees.widen_tree(grads)
        return state.replace(model_grads=add(state.model_grads, wide))

    def update_master_grads(self, state: FP16State) -> FP16State:
        """Unscales `model_grads`, adds them to `master_grads`, and moves the scale."""
        self._check(state)
        fresh = rules.unscale_tree(needed(state.model_grads), state.loss_scale)
        overflow = state.overflow
        if self.checks:
            overflow |= ~trees.all_finite(fresh)
        return state.replace(
            model_grads=_zeros(state.params),
            master_grads=add(state.master_grads, fresh),
            overflow=overflow,
            loss_scaler=self.rule.update(state.loss_scaler, ~overflow),
        )

    def clip_master_grads(
        self, state: FP16State, max_norm: ArrayLike, norm_type: float | str = 2
    ) -> tuple[Float[Array, ""], FP16State]:
        """Clips `master_grads` by `clip_grad_norm`; returns `(norm, state)`.

        After an overflow the norm is -1, and the gradients stay as they are.
        """
        self._check(state)
        grads = needed(state.master_grads)
        norm, clipped = clip_grad_norm(grads, max_norm, norm_type)
        clipped = trees.select(state.overflow, grads, clipped)
        norm = jnp.where(state.overflow, -1.0, norm)
        return norm, state.replace(master_grads=clipped)

    def step(self, state: FP16State, closure: Closure | None = None) -> Any:
        """Steps the masters and rounds them to the params, or skips on overflow.

        A closure `state -> (loss, state)` calls `zero_grad` and `backward` itself. It
        runs again while it overflows, until the scale is at its floor, and in line
        searches. With one, the method returns `(loss, state)`.
        """
        self._check(state)
        loss, update_args = None, {}
        if closure is not None:
            loss, state = self._call_until_finite(closure, state)
            update_args = {"value": loss, "grad": state.master_grads}

            def value_and_grad(masters):
                params = rounded(masters, state.params)
                value, there = _call(closure, state.replace(params=params))
                return value, there.master_grads

            update_args["value_fn"] = with_gradient(value_and_grad)
        say(state.overflow, _SKIPS.format("Gradient overflow. ", state.loss_scale))
        group = step(
            Group(self.optimizer, state.opt_state, state.params),
            needed(state.master_grads),
            clean=~state.overflow if self.checks else None,
            update_args=update_args,
        )
        state = state.replace(params=group.params, opt_state=group.opt_state)
        return state if closure is None else (loss, state)

    def _call_until_finite(self, closure: Closure, state: FP16State) -> Any:
        """Calls the closure again while its gradients overflow and the scale falls."""
        floor = rules.lowest_scale(self.rule)
        again = lambda carry: _call(closure, carry[1])  # noqa: E731
        goes_on = lambda carry: carry[1].overflow & (carry[1].loss_scale > floor)  # noqa: E731
        carry = _call(closure, state)
        if not self.rule.moves:
            return carry
        if trees.is_traced(carry[1].overflow):
            return jax.lax.while_loop(goes_on, again, carry)
        while goes_on(carry):
            say(True, _SKIPS.format("OVERFLOW within closure!", carry[1].loss_scale))
            carry = again(carry)
        return carry

    def zero_grad(self, state: FP16State, set_grads_to_None: bool = False) -> FP16State:
        """The state with gradients of zero, or None, and no overflow."""
        self._check(state)
        model, master = (
            None if set_grads_to_None else _zeros(state.params) for _ in range(2)
        )
        clean = jnp.zeros_like(state.overflow)
        return state.replace(model_grads=model, master_grads=master, overflow=clean)

    def inspect_master_grad_data(self, state: FP16State) -> PyTree | None:
        """The masters' gradients, float32; None, and a warning, after an overflow."""
        self._check(state)
        if trees.is_traced(state.overflow):
            raise TypeError(
                "Call inspect_master_grad_data outside of `jit`, or read "
                "state.master_grads and state.overflow."
            )
        if state.overflow:
            warn("The gradients overflowed and are invalid.", PrecisionWarning)
        return None if state.overflow else state.master_grads

    def set_loss_scale(self, state: FP16State, value: ArrayLike) -> FP16State:
        """The state with another loss scale, and `model_grads` scaled to match."""
        self._check(state)
        check_scale("value", value)
        scale = place_like(jnp.asarray(value, jnp.float32), state.loss_scale)
        ratio = scale / state.loss_scale
        return state.replace(
            model_grads=jax.tree.map(lambda g: g * ratio, state.model_grads),
            loss_scaler=state.loss_scaler._replace(scale=scale),
        )

    def master_params(self, state: FP16State) -> PyTree:
        """The params in float32: masters, and those that are their own."""
        self._check(state)
        return wide_group(Group(self.optimizer, state.opt_state, state.params))

    def _saved(self, state: FP16State) -> dict[str, PyTree]:
        params = trees.differentiable(state.params)
        own = jax.tree.map(lambda p: optax.MaskedNode() if is_half(p) else p, params)
        return {
            "loss_scaler": state.loss_scaler,
            "dynamic_loss_scale": jnp.asarray(self.dynamic_loss_scale),
            "overflow": state.overflow,
            "optimizer_state_dict": state.opt_state.inner_state,
            "fp32_from_fp16": state.opt_state.masters,
            "fp32_from_fp32": own,
        }

    def _loaded(self, state: FP16State, parts: dict[str, PyTree]) -> FP16State:
        check_scale_state("loss_scaler", parts["loss_scaler"]._asdict())
        masters, own = parts["fp32_from_fp16"], parts["fp32_from_fp32"]
        choose = lambda p, master, x: master if is_half(p) else x  # noqa: E731
        wide = jax.tree.map(choose, trees.differentiable(state.params), masters, own)
        return state.replace(
            params=rounded(wide, state.params),
            opt_state=MasterWeightsState(masters, parts["optimizer_state_dict"]),
            overflow=parts["overflow"],
            loss_scaler=parts["loss_scaler"],
        )


_SKIPS = "{} Skipping step, reducing loss scale to {}"


def _zeros(params: PyTree) -> PyTree:
    """Gradients of 0 in float32."""
    trained = trees.widen_tree(trees.differentiable(params))
    return jax.tree.map(jnp.zeros_like, trained)


def _call(closure: Closure, state: FP16State) -> tuple[Array, FP16State]:
    match closure(state):
        case (loss, FP16State() as state) if state.master_grads is not None:
            if is_differentiable(loss) and jnp.shape(loss) == ():
                return loss, state
    raise TypeError(
        "The closure must call `optimizer.zero_grad` and `optimizer.backward`, and "
        "return (loss, state) with the loss, a scalar."
    )
