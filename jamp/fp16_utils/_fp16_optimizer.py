"""apex's `FP16_Optimizer`: masters, loss scale and gradients behind one object.

After apex/fp16_utils/fp16_optimizer.py.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float, PyTree

from jamp._core import tree as trees
from jamp._core.devices import place_like
from jamp._core.dtypes import FLOAT32, MODEL_DTYPES
from jamp._core.numbers import check_scale
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling import rules
from jamp._scaling.loss import checked_loss
from jamp._state.closure import rounded, with_gradient
from jamp.fp16_utils._fp16util import clip_grad_norm
from jamp.fp16_utils._wrapper import Wrapper, WrapperState, check_dtypes, needed, say
from jamp.optimizers._masters import master_weights


class FP16State(WrapperState):
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

    master_grads: Any


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

    state_class: ClassVar[type] = FP16State

    def _configure(self, tx: Any, static: float, args: Any) -> None:
        self.optimizer = master_weights(tx)
        self.rule = rules.StaticLossScale(static)
        if self.dynamic_loss_scale:
            args = {_NAMES.get(name, name): x for name, x in (args or {}).items()}
            self.rule = rules.DynamicLossScale(**args)

    def init(self, params: PyTree) -> FP16State:
        """The state for half and float32 params, with gradients of zero.

        Raises:
            TypeError: a float leaf has another dtype.
        """
        lines = check_dtypes(trees.differentiable(params), MODEL_DTYPES)
        if self.verbose and jax.process_index() == 0:
            print("\n".join(["FP16_Optimizer processing param group 0:", *lines]))
        grads = {"model_grads": _zeros(params), "master_grads": _zeros(params)}
        return self._init(params, **grads)

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

    def _sum(self, before: PyTree | None, grads: PyTree) -> PyTree:
        return super()._sum(before, trees.widen_tree(grads))

    def update_master_grads(self, state: FP16State) -> FP16State:
        """Unscales `model_grads`, adds them to `master_grads`, and moves the scale."""
        self._check(state)
        fresh = rules.unscale_tree(needed(state.model_grads), state.loss_scale)
        overflow = state.overflow
        if self.rule.checks:
            overflow |= ~trees.all_finite(fresh)
        return state.replace(
            model_grads=_zeros(state.params),
            master_grads=self._sum(state.master_grads, fresh),
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
                value, there = self._call(closure, state.replace(params=params))
                return value, needed(there.master_grads)

            update_args["value_fn"] = with_gradient(value_and_grad)
        say(state.overflow, _SKIPS.format("Gradient overflow. ", state.loss_scale))
        clean = ~state.overflow if self.rule.checks else True
        state = self._stepped(state, needed(state.master_grads), clean, **update_args)
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
            say(True, _SKIPS.format("OVERFLOW within closure!", carry[1].loss_scale))
            carry = again(carry)
        return carry

    def _call(self, closure: Closure, state: FP16State) -> tuple[Array, FP16State]:
        loss, state = closure(state)
        self._check(state)
        return checked_loss(loss)[0], state

    def zero_grad(self, state: FP16State, set_grads_to_None: bool = False) -> FP16State:
        """The state with gradients of zero, or None, and no overflow."""
        self._check(state)
        zeros = (lambda _: None) if set_grads_to_None else _zeros
        return state.replace(
            model_grads=zeros(state.params),
            master_grads=zeros(state.params),
            overflow=jnp.zeros_like(state.overflow),
        )

    def inspect_master_grad_data(self, state: FP16State) -> PyTree | None:
        """The masters' gradients; None, and a warning, after an overflow."""
        self._check(state)
        if state.overflow:
            warn("The gradients overflowed and are invalid.", PrecisionWarning)
        return None if state.overflow else state.master_grads

    def set_loss_scale(self, state: FP16State, value: ArrayLike) -> FP16State:
        """The state with another loss scale, and `model_grads` scaled to match."""
        self._check(state)
        check_scale("value", value)
        scale = place_like(jnp.asarray(value, FLOAT32), state.loss_scale)
        ratio = scale / state.loss_scale
        return state.replace(
            model_grads=jax.tree.map(lambda g: g * ratio, state.model_grads),
            loss_scaler=state.loss_scaler._replace(scale=scale),
        )


# apex's names of a dynamic scale's arguments, and jamp's.
_NAMES = {
    "scale_factor": "factor",
    "scale_window": "window",
    "min_loss_scale": "min_scale",
    "max_loss_scale": "max_scale",
}
_SKIPS = "{} Skipping step, reducing loss scale to {}"


def _zeros(params: PyTree) -> PyTree:
    """Gradients of 0 in float32."""
    trained = trees.differentiable(params)
    return jax.tree.map(lambda p: jnp.zeros_like(p, FLOAT32), trained)
