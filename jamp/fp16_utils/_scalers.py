"""The loss scalers of apex's `fp16_utils`, as frozen objects with a state.

After apex/fp16_utils/loss_scaler.py.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PyTree

from jamp._core.dtypes import FLOAT32
from jamp._core.tree import all_finite
from jamp._core.warnings import UnusedOptionWarning, warn
from jamp._scaling.loss import grad_of_scaled
from jamp._scaling.rules import (
    DynamicLossScale,
    LossScaleState,
    StaticLossScale,
    check_scale,
)

# apex's names of what `DynamicLossScale` takes.
_ARGS = {
    "init_scale": "init_scale",
    "scale_factor": "factor",
    "scale_window": "window",
    "min_loss_scale": "min_scale",
    "max_loss_scale": "max_scale",
}
UNUSED = "{} has no effect: it needs dynamic_loss_scale={}."


class LossScalerState(NamedTuple):
    """What a loss scaler of `fp16_utils` remembers.

    Attributes:
        cur_scale: the factor on the loss, shape (), float32.
        cur_iter: updates so far, shape (), int32.
        last_overflow_iter: the last update with an overflow, or -1, shape (), int32.
    """

    cur_scale: Float[Array, ""]
    cur_iter: Int[Array, ""]
    last_overflow_iter: Int[Array, ""]


class _Scaler:
    """What both scalers do with their scale."""

    def _first(self, scale: float) -> LossScalerState:
        return LossScalerState(
            cur_scale=jnp.asarray(scale, jnp.float32),
            cur_iter=jnp.asarray(0, jnp.int32),
            last_overflow_iter=jnp.asarray(-1, jnp.int32),
        )

    def loss_scale(self, state: LossScalerState) -> Float[Array, ""]:
        """The present scale, shape (), float32."""
        return state.cur_scale

    def scale_gradient(self, state: LossScalerState, grads: PyTree) -> PyTree:
        """Gradients times the scale, rounded once to their dtypes."""
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
        """`loss_fn(params, *args, **kwargs)`, and gradients of it times the scale.

        Raises:
            TypeError: the loss is not a float scalar.
        """
        checks = isinstance(self, DynamicLossScaler)
        scale = state.cur_scale
        return grad_of_scaled(loss_fn, params, scale, args, kwargs, checks=checks)


@dataclasses.dataclass(frozen=True)
class LossScaler(_Scaler):
    """A static loss scale, which looks for no overflow.

    Attributes:
        scale: the factor on the loss.

    Raises:
        ValueError: it is not a number between 2^-126 and 2^126.

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
        return self._first(self.scale)

    def has_overflow(self, grads: PyTree) -> Bool[Array, ""]:
        """False, as in apex."""
        del grads
        return jnp.asarray(False)

    def update_scale(
        self, state: LossScalerState, overflow: Bool[Array, ""]
    ) -> LossScalerState:
        """The same state."""
        del overflow
        return state


@dataclasses.dataclass(frozen=True)
class DynamicLossScaler(_Scaler):
    """apex's first dynamic loss scale; `jamp.DynamicLossScale` is the current one.

        overflow:  scale = max(scale / scale_factor, 1)
        clean:     scale *= scale_factor, if the iterations since the last overflow are
                   a multiple of scale_window

    Its ceiling is float32's: 2^126.

    Attributes:
        init_scale: the first scale.
        scale_factor: greater than 1.
        scale_window: iterations, at least 1.

    Raises:
        ValueError: an attribute is out of its range.

    >>> scaler = DynamicLossScaler(scale_window=2)
    >>> state = scaler.update_scale(scaler.init(), jnp.isinf(jnp.inf))
    >>> float(scaler.loss_scale(state))
    2147483648.0
    """

    init_scale: float = 2.0**32
    scale_factor: float = 2.0
    scale_window: int = 1000

    def __post_init__(self) -> None:
        check_scale("init_scale", self.init_scale)
        if not 1 < self.scale_factor < float("inf"):
            raise ValueError(
                f"scale_factor must be greater than 1, got {self.scale_factor}."
            )
        if self.scale_window < 1 or self.scale_window != int(self.scale_window):
            raise ValueError(
                f"scale_window must be an integer of at least 1, got "
                f"{self.scale_window}."
            )

    def init(self) -> LossScalerState:
        """The state before the first step."""
        return self._first(self.init_scale)

    def has_overflow(self, grads: PyTree) -> Bool[Array, ""]:
        """Whether any element is inf or NaN; apex looks at sums."""
        return ~all_finite(grads)

    def update_scale(
        self, state: LossScalerState, overflow: Bool[Array, ""]
    ) -> LossScalerState:
        """The state after a step."""
        window, overflow = self.scale_window, jnp.asarray(overflow, bool)
        rule = DynamicLossScale(1.0, self.scale_factor, window, 1.0, max_scale=None)
        clean = (state.cur_iter - state.last_overflow_iter - 1) % window
        before = LossScaleState(state.cur_scale, clean, jnp.int32(1), jnp.int32(0))
        last = jnp.where(overflow, state.cur_iter, state.last_overflow_iter)
        scale = rule.update(before, ~overflow).scale
        return LossScalerState(scale, state.cur_iter + 1, last)


def rule_from_args(
    static: float, dynamic: bool, dynamic_args: Mapping[str, Any] | None
) -> DynamicLossScale | StaticLossScale:
    """The rule for the arguments of apex's `FP16_Optimizer`, in its words."""
    if not dynamic:
        if dynamic_args is not None:
            warn(UNUSED.format("dynamic_loss_args", True), UnusedOptionWarning)
        return StaticLossScale(static)
    if static != 1.0:
        warn(UNUSED.format("static_loss_scale", False), UnusedOptionWarning)
    unknown = sorted(set(dynamic_args or {}) - set(_ARGS))
    if unknown:
        raise TypeError(
            f"dynamic_loss_args has no {unknown[0]!r}; its keys are {list(_ARGS)}."
        )
    return DynamicLossScale(**{_ARGS[k]: v for k, v in (dynamic_args or {}).items()})
