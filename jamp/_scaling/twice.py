"""Errors for a loss that is scaled twice, and the calls of loss functions."""

import functools
import weakref
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

import jax
from jaxtyping import Array

from jamp._autocast.tracers import depends_without_grad
from jamp._core.devices import callers_guard

_INSIDE = (
    "jamp.scale_loss is called in a loss function whose loss jamp scales already. "
    "Delete the call of jamp.scale_loss, and return the loss itself."
)
_TWICE = (
    "jamp.scale_loss got a loss that jamp.scale_loss returned. Delete one of the two "
    "calls."
)

# The params of the loss function that jamp runs now.
_params: ContextVar[Sequence[Any]] = ContextVar("params", default=())
_scaled: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def run_loss(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function of the caller's as jamp runs it, whose loss jamp scales.

    It runs under the caller's `jax.transfer_guard`.
    """

    @functools.wraps(loss_fn)
    def run(params, /, *args, **kwargs):
        token = _params.set(jax.tree.leaves(params))
        try:
            with callers_guard():
                return loss_fn(params, *args, **kwargs)
        finally:
            _params.reset(token)

    return run


def remember_scaled(loss: Array) -> Array:
    """The scaled loss that `scale_loss` returns, which must not be scaled again."""
    _scaled[id(loss)] = loss
    return loss


def check_not_scaled(loss: Any) -> None:
    """Raises if `scale_loss` gets a loss that is, or will be, scaled by another call.

    An inner `jax.grad` may scale its own loss, which is not the one that jamp scales.
    """
    if _scaled.get(id(loss)) is loss:
        raise ValueError(_TWICE)
    if depends_without_grad(loss, _params.get()):
        raise ValueError(_INSIDE)
