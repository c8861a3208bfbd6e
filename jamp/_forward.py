"""The forward pass of a model in half: what goes in, what comes out, and for whom.

A policy is entered together with a `jax.make_user_context` value, which is part of the
key of JAX's trace caches: a function jitted outside is traced again inside, and back.
Adapters for module systems (`jamp.linen`) register here what they do inside.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, Protocol

import jax

from jamp._autocast._transform import autocast
from jamp._dtypes import cast_floats
from jamp._opt_level import Properties

_active = jax.make_user_context(default_value=None)


class Adapter(Protocol):
    """What a module system does under a policy."""

    def owns(self, apply_fn: Callable[..., Any]) -> bool:
        """Whether `apply_fn` needs no more than `context` around it."""
        ...

    def context(self, properties: Properties) -> AbstractContextManager[None]:
        """Patches the module system while entered."""
        ...


_adapters: list[Adapter] = []


def register_adapter(adapter: Adapter) -> None:
    """Adds an adapter, once, when its module is imported."""
    _adapters.append(adapter)


def active_policy() -> Properties | None:
    """The innermost policy."""
    return _active.value


@contextlib.contextmanager
def forward_policy(properties: Properties) -> Iterator[None]:
    """Runs models under `properties`; entering the same ones twice changes nothing."""
    if active_policy() == properties:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(_active(properties))
        for adapter in _adapters:
            stack.enter_context(adapter.context(properties))
        yield


def under_autocast(
    fn: Callable[..., Any], properties: Properties
) -> Callable[..., Any]:
    """`fn` under the level's autocast, if it has one and is not in it already."""
    if not properties.patch_functions or active_policy() == properties:
        return fn
    return autocast(
        fn,
        properties.patch_functions_type,
        lists=properties.lists,
        promote=properties.promote,  # pyright: ignore[reportArgumentType]
    )


def cast_inputs[T](tree: T, properties: Properties) -> T:
    """Casts the float arrays that enter a model."""
    dtype = properties.cast_model_type
    return cast_floats(tree, dtype) if dtype else tree


def cast_outputs[T](tree: T, properties: Properties) -> T:
    """Casts the float arrays that leave a model."""
    dtype = properties.output_dtype
    return tree if dtype is None else cast_floats(tree, dtype)


@dataclasses.dataclass(frozen=True)
class _UnderPolicy:
    """`apply_fn` under a policy. Hashes by value, so that jit does not retrace."""

    apply_fn: Callable[..., Any]
    properties: Properties

    def __call__(self, *args, **kwargs):
        apply_fn = under_autocast(self.apply_fn, self.properties)
        with forward_policy(self.properties):
            return apply_fn(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _CastForward:
    """`apply_fn` with inputs and outputs cast, under a policy."""

    apply_fn: Callable[..., Any]
    properties: Properties

    def __call__(self, variables, *args, **kwargs):
        args, kwargs = cast_inputs((args, kwargs), self.properties)
        apply_fn = under_autocast(self.apply_fn, self.properties)
        with forward_policy(self.properties):
            out = apply_fn(variables, *args, **kwargs)
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
    return _CastForward(apply_fn, properties)


def patched_forward(
    apply_fn: Callable[..., Any], properties: Properties
) -> Callable[..., Any]:
    """What `state.apply_fn` is: `apply_fn` as its framework's adapter wants it."""
    if any(adapter.owns(apply_fn) for adapter in _adapters):
        return _UnderPolicy(apply_fn, properties)
    return _CastForward(apply_fn, properties)
