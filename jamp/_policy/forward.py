"""The forward pass of a model, as its level writes it."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import jax
from jaxtyping import PyTree

from jamp._autocast.marks import shown_params
from jamp._autocast.program import Scope
from jamp._autocast.transform import autocast_in, scope_of
from jamp._policy.levels import Properties
from jamp._policy.models import forward_policy, model_inputs, model_outputs, policy


def under_policy(
    fn: Callable[..., Any], properties: Properties, params: PyTree
) -> Callable[..., Any]:
    """A function of params, first, and anything else, as its level writes it.

    At O1 and O4 that is `autocast`. At O2, O3 and O5 `fn` sees the half params in
    float32, so that nothing promotes, and is written in half by the same passes: its
    products of these params, and what else half is enough for. `params` are those that
    it will be called with, or others of their dtypes.
    """
    scope, half = scope_under(properties, params), properties.half_dtype

    def shown(params, *args, **kwargs):
        return fn(shown_params(params, half), *args, **kwargs)

    written = fn if scope is None else autocast_in(scope, shown if half else fn)

    @functools.wraps(fn)
    def run(params, *args, **kwargs):
        with forward_policy(properties):
            return written(params, *args, **kwargs)

    return run


def scope_under(properties: Properties, params: PyTree) -> Scope | None:
    """In what to write a program of these params.

    None where neither the policy nor half params are new: what is around the program
    is written already.
    """
    half, lists, promote = properties.half_dtype, properties.lists, properties.promote
    if half:
        is_new = any(getattr(x, "dtype", None) == half for x in jax.tree.leaves(params))
        return scope_of(half, lists, promote, of_model=True) if is_new else None
    is_new = properties.patch_functions and policy.value != properties
    return scope_of(properties.patch_functions_type, lists, promote) if is_new else None


@dataclasses.dataclass(frozen=True)
class _Forward:
    """`apply_fn` under a policy. Hashes by value, so that jit does not retrace."""

    apply_fn: Callable[..., Any]
    properties: Properties

    def __call__(self, variables, *args, **kwargs):
        is_flax = isinstance(variables, Mapping) and "params" in variables

        def run(params, *args, **kwargs):
            whole = {**variables, "params": params} if is_flax else params
            args, kwargs = model_inputs((args, kwargs), self.properties)
            out = self.apply_fn(whole, *args, **kwargs)
            if kwargs.get("mutable", False) is False:
                return model_outputs(out, self.properties)
            first, *updated = out
            return model_outputs(first, self.properties), *updated

        params = variables["params"] if is_flax else variables
        return under_policy(run, self.properties, params)(params, *args, **kwargs)


def cast_forward(
    apply_fn: Callable[..., Any], properties: Properties
) -> Callable[..., Any]:
    """Wraps the forward function of any framework as apex wraps a model's `forward`.

    With half params, the function is written in half: every product of a param that is
    not kept in float32. It sees params and inputs as float32 itself, so nothing that it
    promotes falls out of half. Outputs are float32, or
    `cast_model_outputs`.

    Args:
        apply_fn: `(variables, *args, **kwargs) -> outputs`; under a keyword `mutable`,
            as in Flax, only the first output is cast.
        properties: the level, from `Properties.from_opt_level`.

    Returns:
        A function with the signature of `apply_fn`; it hashes by value.

    >>> import jax.numpy as jnp
    >>> def apply(w, x):
    ...     return jnp.dot(x, w)
    >>> half = cast_forward(apply, Properties.from_opt_level("O3"))
    >>> half(jnp.ones(3, jnp.float16), jnp.full(3, 1.0004)).item()  # 1.0004 is rounded
    3.0
    """
    return _Forward(apply_fn, properties)


def no_forward(*_: object, **__: object) -> NoReturn:
    """What `state.apply_fn` is where none was given."""
    raise TypeError(
        "The state has no forward: pass `apply_fn=model.apply`, or any `(variables, "
        "*args) -> outputs`, to jamp.initialize. Call an NNX model itself."
    )
