"""Scaling a loss by hand: `scale_loss`, `unscale`, and what they check."""

from typing import Any, Protocol

from jaxtyping import Array, Float, PyTree

from jamp._core.devices import moves_constants
from jamp._core.tree import all_finite, split_overwrite, with_trained
from jamp._policy.levels import Properties
from jamp._scaling.loss import checked_loss
from jamp._scaling.rules import LossScaleRule, LossScaleState
from jamp._scaling.unscaled import unscaled


class HasLossScales(Protocol):
    """What this room needs of an `AmpState`."""

    @property
    def params(self) -> Any: ...
    @property
    def tx(self) -> Any: ...
    @property
    def loss_scales(self) -> Any: ...
    @property
    def loss_scale_rules(self) -> Any: ...
    @property
    def properties(self) -> Any: ...


@moves_constants
def scale_loss(loss: Array, state: HasLossScales, loss_id: int = 0) -> Float[Array, ""]:
    """The loss in float32 times a loss scale, for people who call `jax.grad`
    themselves.

    Args:
        loss: a float scalar.
        state: an AmpState.
        loss_id: which of the state's loss scales to use.

    Returns:
        The scaled loss, shape (), float32.

    Raises:
        TypeError: the loss is not a float scalar.
        IndexError: `loss_id` is out of range.

    >>> import jax, jax.numpy as jnp, jamp, optax
    >>> state = jamp.initialize(
    ...     jnp.ones(2), optax.sgd(1.0), "O2", loss_scale=4, verbosity=0
    ... )
    >>> loss_fn = lambda w: scale_loss(w.sum(dtype="float32"), state)
    >>> grads = jax.grad(loss_fn)(state.params)
    >>> print(grads, jamp.unscale(grads, state))
    [4. 4.] [1. 1.]
    """
    rule, scale_state = find_loss_scale(state, loss_id, "jamp.scale_loss(loss, state)")
    return rule.scale_loss(checked_loss(loss), scale_state)


@moves_constants
def unscale(grads: PyTree, state: HasLossScales, loss_id: int = 0) -> PyTree:
    """Gradients of a loss from `scale_loss`, in float32, divided by the scale.

    If one of them is not finite, all are NaN, as of `scaled_value_and_grad`. A static
    scale does not look: inf stays inf.

    Args:
        grads: a tree of gradients.
        state: the AmpState that scaled the loss, before it is updated.
        loss_id: which of the state's loss scales was used.

    Returns:
        The tree in float32.

    Raises:
        TypeError: `state` is not an AmpState.
        IndexError: `loss_id` is out of range.
    """
    rule, _ = find_loss_scale(state, loss_id, "jamp.unscale(grads, state)")
    find_finite = (lambda _, divided: all_finite(divided)) if rule.checks else None
    raw, scale = split_overwrite(grads)[0], current_scale(state, loss_id)
    divided, _ = unscaled(raw, scale, loss_id, find_finite)
    return with_trained(grads, divided)


def find_loss_scale(
    state: Any, loss_id: int, call: str
) -> tuple[LossScaleRule, LossScaleState]:
    """The rule and the state of a loss scale; `call` is what the user wrote."""
    if not isinstance(getattr(state, "properties", None), Properties):
        raise TypeError(
            f"{call} takes the AmpState that `jamp.initialize` returned, got "
            f"{type(state).__name__}."
        )
    check_loss_id(loss_id, state)
    return state.loss_scale_rules[loss_id], state.loss_scales[loss_id]


def current_scale(state: HasLossScales, loss_id: int) -> Float[Array, ""]:
    """The scale of a loss: a constant of the program, if it is static."""
    return state.loss_scale_rules[loss_id].current(state.loss_scales[loss_id])


def check_loss_id(loss_id: Any, state: HasLossScales) -> None:
    """Raises unless the state has a loss scale of this number."""
    count = len(state.loss_scale_rules)
    if isinstance(loss_id, bool) or loss_id not in range(count):
        raise IndexError(
            f"loss_id={loss_id!r} is out of range: the state has {count} loss "
            "scale(s). Pass num_losses to jamp.initialize."
        )
