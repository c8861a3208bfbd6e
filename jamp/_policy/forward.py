"""The forward pass of a model in half: what goes in, what comes out, and for whom."""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

from jamp._autocast.transform import autocast
from jamp._policy.active import cast_inputs, cast_outputs, policy
from jamp._policy.levels import Properties
from jamp._policy.linen import is_linen, linen_in_half


@contextlib.contextmanager
def forward_policy(properties: Properties) -> Iterator[None]:
    """Runs models under `properties`; entering the same ones twice changes nothing."""
    if policy.value == properties:
        yield
        return
    with policy(properties), linen_in_half(properties):
        yield


def under_autocast(
    fn: Callable[..., Any], properties: Properties
) -> Callable[..., Any]:
    """`fn` under the level's autocast, if it has one and is not in it already."""
    if not properties.patch_functions or policy.value == properties:
        return fn
    return autocast(
        fn,
        properties.patch_functions_type,
        lists=properties.lists,
        promote=properties.promote,  # pyright: ignore[reportArgumentType]
    )


@dataclasses.dataclass(frozen=True)
class _Forward:
    """`apply_fn` under a policy. Hashes by value, so that jit does not retrace."""

    apply_fn: Callable[..., Any]
    properties: Properties
    casts: bool  # what goes in and comes out; Linen's modules see to that themselves

    def __call__(self, *args, **kwargs):
        if self.casts:
            rest, kwargs = cast_inputs((args[1:], kwargs), self.properties)
            args = (*args[:1], *rest)
        apply_fn = under_autocast(self.apply_fn, self.properties)
        with forward_policy(self.properties):
            out = apply_fn(*args, **kwargs)
        if not self.casts:
            return out
        if kwargs.get("mutable", False) is False:
            return cast_outputs(out, self.properties)
        first, *updated = out
        return cast_outputs(first, self.properties), *updated


def cast_forward(
    apply_fn: Callable[..., Any], properties: Properties
) -> Callable[..., Any]:
    """Wraps the forward function of any framework as apex wraps a model's `forward`.

    Float inputs are cast to `properties.cast_model_type`, outputs to float32 or to
    `cast_model_outputs`. What happens in between is the framework's: with half params
    and half inputs, JAX computes in half until something brings in float32.

    Args:
        apply_fn: `(variables, *args, **kwargs) -> outputs`. The first argument is not
            cast; under a keyword `mutable`, as in Flax, only the first output is.
        properties: what to cast to, from `Properties.from_opt_level`.

    Returns:
        A function with the signature of `apply_fn`; it hashes by value.

    >>> import jax.numpy as jnp
    >>> def apply(w, x):
    ...     return jnp.dot(x, w)
    >>> half = cast_forward(apply, Properties.from_opt_level("O3"))
    >>> half(jnp.ones(3, jnp.float16), jnp.full(3, 1.0004)).item()  # 1.0004 is rounded
    3.0
    """
    return _Forward(apply_fn, properties, casts=True)


def no_forward(*_: Any, **__: Any) -> NoReturn:
    """What `state.apply_fn` is where none was given."""
    raise TypeError(
        "The state has no forward: pass `apply_fn=model.apply`, or any `(variables, "
        "*args) -> outputs`, to jamp.initialize. An NNX model is called itself."
    )


def patched_forward(
    apply_fn: Callable[..., Any], properties: Properties
) -> Callable[..., Any]:
    """What `state.apply_fn` is: Linen's modules see to what goes in and comes out."""
    return _Forward(apply_fn, properties, casts=not is_linen(apply_fn))
