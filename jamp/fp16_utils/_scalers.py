"""The loss scalers of apex's `fp16_utils`: rules of `jamp` with apex's names.

Based on apex/fp16_utils/loss_scaler.py.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core.dtypes import FLOAT32
from jamp._core.tree import all_finite
from jamp._scaling import rules
from jamp._scaling.loss import grad_of_scaled


class LossScaler:
    """A static loss scale, which detects no overflow.

    >>> scaler = LossScaler(128.0)
    >>> loss, grads = scaler.backward(scaler.init(), lambda w: 3 * w, jnp.ones(()))
    >>> print(loss, grads)
    3.0 384.0
    """

    def __init__(self, scale: float = 1):
        self.rule: rules.LossScaleRule = rules.StaticLossScale(scale)

    def init(self) -> rules.LossScaleState:
        """Returns the state before the first step."""
        return self.rule.init()

    def has_overflow(self, grads: PyTree) -> Bool[Array, ""]:
        """Returns whether any element is inf or NaN; False for a static scale."""
        return ~all_finite(grads if self.rule.check else ())

    def update_scale(
        self, state: rules.LossScaleState, overflow: Bool[Array, ""]
    ) -> rules.LossScaleState:
        """Returns the state after a step."""
        return self.rule.update(state, ~jnp.asarray(overflow, bool))

    def scale_gradient(self, state: rules.LossScaleState, grads: PyTree) -> PyTree:
        """Multiplies gradients by the scale, and rounds once to their dtypes."""
        scaled = lambda g: (g.astype(FLOAT32) * state.scale).astype(g.dtype)  # noqa: E731
        return jax.tree.map(scaled, grads)

    def backward(
        self,
        state: rules.LossScaleState,
        loss_fn: Callable[..., Array],
        params: PyTree,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Float[Array, ""], PyTree]:
        """Returns `loss_fn(params, *args, **kwargs)` and its scaled gradients."""
        scale, checks = state.scale, self.rule.check
        return grad_of_scaled(loss_fn, params, scale, args, kwargs, checks=checks)


class DynamicLossScaler(LossScaler):
    """apex's first dynamic loss scale: `jamp.DynamicLossScale` with other numbers.

    Its floor is 1, and it has no ceiling.

    >>> scaler = DynamicLossScaler(scale_window=2)
    >>> state = scaler.update_scale(scaler.init(), jnp.isinf(jnp.inf))
    >>> float(state.scale)
    2147483648.0
    """

    def __init__(
        self,
        init_scale: float = 2.0**32,
        scale_factor: float = 2.0,
        scale_window: int = 1000,
    ):
        own = init_scale, scale_factor, scale_window
        self.rule: rules.LossScaleRule = rules.DynamicLossScale(*own, 1.0, None)
