"""The loss scalers of apex's `fp16_utils`, as frozen objects with a state.

After apex/fp16_utils/loss_scaler.py.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jamp._core.dtypes import FLOAT32
from jamp._core.numbers import check_scale
from jamp._core.tree import all_finite
from jamp._scaling.loss import grad_of_scaled
from jamp._scaling.rules import DynamicLossScale, LossScaleState


class LossScalerState(NamedTuple):
    """State of a loss scaler.

    Attributes:
        cur_scale: the factor on the loss, shape (), float32.
        cur_iter: updates so far, shape (), int32.
        last_overflow_iter: the last update with an overflow, or -1, shape (), int32.
    """

    cur_scale: Float[Array, ""]
    cur_iter: Int[Array, ""]
    last_overflow_iter: Int[Array, ""]


class _Scaler:
    def scale_gradient(self, state: LossScalerState, grads: PyTree) -> PyTree:
        """Multiplies gradients by the scale, and rounds once to their dtypes."""
        scaled = lambda g: (g.astype(FLOAT32) * state.cur_scale).astype(g.dtype)  # noqa: E731
        return jax.tree.map(scaled, grads)

    def backward(
        self,
        state: LossScalerState,
        loss_fn: Callable[..., Array],
        params: PyTree,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Array, ""], PyTree]:
        """`loss_fn(params, *args, **kwargs)`, and its gradients times the scale."""
        checks = isinstance(self, DynamicLossScaler)
        scale = state.cur_scale
        return grad_of_scaled(loss_fn, params, scale, args, kwargs, checks=checks)


@dataclasses.dataclass(frozen=True)
class LossScaler(_Scaler):
    """A static loss scale, which finds no overflow.

    >>> scaler = LossScaler(128.0)
    >>> loss, grads = scaler.backward(scaler.init(), lambda w: 3 * w, jnp.ones(()))
    >>> print(loss, grads)
    3.0 384.0
    """

    scale: float = 1

    def __post_init__(self) -> None:
        check_scale("scale", self.scale)

    def init(self) -> LossScalerState:
        """The state before the first step."""
        return LossScalerState(jnp.float32(self.scale), jnp.int32(0), jnp.int32(-1))

    def has_overflow(self, grads: PyTree) -> Bool[Array, ""]:
        """False, as in apex."""
        return jnp.asarray(False)

    def update_scale(
        self, state: LossScalerState, overflow: Bool[Array, ""]
    ) -> LossScalerState:
        """The same state."""
        return state


@dataclasses.dataclass(frozen=True)
class DynamicLossScaler(_Scaler):
    """apex's first dynamic loss scale; `jamp.DynamicLossScale` is the current one.

        overflow:  scale = max(scale / scale_factor, 1)
        clean:     scale *= scale_factor, if the iterations since the last overflow are
                   a multiple of `scale_window`; at most 2^126

    >>> scaler = DynamicLossScaler(scale_window=2)
    >>> state = scaler.update_scale(scaler.init(), jnp.isinf(jnp.inf))
    >>> float(state.cur_scale)
    2147483648.0
    """

    init_scale: float = 2.0**32
    scale_factor: float = 2.0
    scale_window: int = 1000

    def __post_init__(self) -> None:
        check_scale("init_scale", self.init_scale)
        self._rule()  # checks the others

    def _rule(self) -> DynamicLossScale:
        factor, window = self.scale_factor, self.scale_window
        return DynamicLossScale(1.0, factor, window, min_scale=1.0, max_scale=None)

    def init(self) -> LossScalerState:
        """The state before the first step."""
        return LossScaler(self.init_scale).init()

    def has_overflow(self, grads: PyTree) -> Bool[Array, ""]:
        """Whether any element is inf or NaN; apex looks at sums."""
        return ~all_finite(grads)

    def update_scale(
        self, state: LossScalerState, overflow: Bool[Array, ""]
    ) -> LossScalerState:
        """The state after a step."""
        overflow = jnp.asarray(overflow, bool)
        clean = (state.cur_iter - state.last_overflow_iter - 1) % self.scale_window
        before = LossScaleState(state.cur_scale, clean, jnp.int32(1), jnp.int32(0))
        last = jnp.where(overflow, state.cur_iter, state.last_overflow_iter)
        scale = self._rule().update(before, ~overflow).scale
        return LossScalerState(scale, state.cur_iter + 1, last)
