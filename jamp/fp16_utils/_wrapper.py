"""Code that both FP16_Optimizers share: they add gradients, save, and load."""

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from jamp._core.names import check_same, from_names, to_names
from jamp._core.tree import copy_shared, is_traced
from jamp._core.warnings import UnusedOptionWarning, warn
from jamp._scaling.loss import grad_of_scaled

_UNUSED = "{} has no effect: it needs dynamic_loss_scale={}."


class Wrapper:
    """An optimizer that holds settings, and whose methods take a state first.

    Subclasses have `checks`, whether they skip, and the methods `_configure`, `_add`,
    `_saved`, and its inverse `_loaded`.
    """

    state_class: ClassVar[type]

    def __init__(
        self: Any,
        init_optimizer: Any,
        static_loss_scale: float = 1.0,
        dynamic_loss_scale: bool = False,
        dynamic_loss_args: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ):
        if dynamic_loss_args is not None and not dynamic_loss_scale:
            warn(_UNUSED.format("dynamic_loss_args", True), UnusedOptionWarning)
        if dynamic_loss_scale and static_loss_scale != 1.0:
            warn(_UNUSED.format("static_loss_scale", False), UnusedOptionWarning)
        self.dynamic_loss_scale: bool = bool(dynamic_loss_scale)
        self.verbose = verbose
        self._configure(init_optimizer, static_loss_scale, dynamic_loss_args)

    def backward(
        self: Any,
        state: Any,
        loss_fn: Callable[..., Any],
        *args: Any,
        has_aux: bool = False,
        **kwargs: Any,
    ) -> tuple[Any, Any]:
        """Adds the gradients of `loss_fn(params, *args, **kwargs)` times the scale.

        Returns:
            `(loss, state)`, or `((loss, aux), state)` with `has_aux`; the loss
            unscaled, in float32.
        """
        self._check(state)
        held = state.params, state.loss_scale
        value, grads = grad_of_scaled(
            loss_fn, *held, args, kwargs, has_aux, checks=self.checks
        )
        return value, self._add(state, grads)

    def state_dict(self: Any, state: Any) -> dict[str, Any]:
        """A checkpoint by apex's names, without gradients: save after `step`."""
        self._check(state)
        return to_names(self._saved(state))

    def load_state_dict(self: Any, state: Any, state_dict: Mapping[str, Any]) -> Any:
        """The state with the values of a `state_dict`, and params rounded from them.

        Raises:
            TypeError: `state_dict` is not a mapping.
            ValueError: a name, shape or dtype differs, or the kind of loss scale.
        """
        self._check(state)
        if not isinstance(state_dict, Mapping):
            kind = type(state_dict).__name__
            raise TypeError(f"load_state_dict takes a mapping, got {kind}.")
        saved = self._saved(state)
        names = jax.eval_shape(to_names, saved)
        remedy = "Nothing was loaded: wrap the optimizer and params of the saved run."
        check_same(state_dict, names, "The state dict", remedy)
        parts = from_names(saved, state_dict)
        if parts.pop("dynamic_loss_scale") != self.dynamic_loss_scale:
            other = f"dynamic_loss_scale={not self.dynamic_loss_scale}"
            raise ValueError(f"The state dict was saved with {other}: construct so.")
        return copy_shared(self._loaded(state, parts), (state, state_dict))

    def _check(self, state: object) -> None:
        if not isinstance(state, self.state_class):
            raise TypeError(
                f"Methods of {type(self).__name__} take the state that "
                f"`optimizer.init(params)` returned, got {type(state).__name__}."
            )


def add(before: PyTree | None, grads: PyTree) -> PyTree:
    """The sum of gradients, where `before` may be None."""
    return grads if before is None else jax.tree.map(jnp.add, before, grads)


def needed[T](grads: T | None) -> T:
    """The gradients; raises if there are none."""
    if grads is None:
        raise ValueError(
            "There are no gradients: call `loss, state = optimizer.backward(state, "
            "loss_fn, ...)` first."
        )
    return grads


def say(overflow: Bool[Array, ""] | bool, message: str) -> None:
    """Prints a message on overflow, except under `jit`."""
    if not is_traced(overflow) and overflow and jax.process_index() == 0:
        print(message)
