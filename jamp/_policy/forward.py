"""Forward passes under an opt level.

The current policy is a `jax.make_user_context` value, which is part of the keys of
JAX's trace caches. So JAX traces a jitted function again under another policy.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import flax.errors
import flax.linen as nn
import jax
from jaxtyping import PyTree

from jamp._autocast.marks import at_boundary, shown_params
from jamp._autocast.scope import Scope
from jamp._autocast.transform import autocast_in, scope_of
from jamp._core import groups
from jamp._core.dtypes import FLOAT32, cast_floats
from jamp._fp8.write import Products
from jamp._policy.levels import Properties, half_dtype

policy = jax.make_user_context(default_value=None)
# Properties that replace the properties of every `apply_fn`. A `loss_fn` may call the
# `apply_fn` of its state, and `jamp.diagnostics.compare` runs it at another level.
forwards_at = jax.make_user_context(default_value=None)
_VARIABLES = (
    "A Flax model takes variables: write `state.apply_fn({'params': state.params}, x)`."
)


def model_inputs[T](tree: T, properties: Properties) -> T:
    """Casts inputs to float32, and marks them as the inputs of a half model."""
    tree = cast_floats(tree, FLOAT32) if properties.cast_model_type else tree
    return at_boundary(tree) if half_dtype(properties) else tree


def model_outputs[T](tree: T, properties: Properties) -> T:
    """Casts outputs to `cast_model_outputs`, by default to float32 in a cast model."""
    if half_dtype(properties):
        tree = at_boundary(cast_floats(tree, FLOAT32))
    default = FLOAT32 if properties.cast_model_type else None
    dtype = properties.cast_model_outputs or default
    return cast_floats(tree, dtype) if dtype else tree


@contextlib.contextmanager
def under_policy(
    fn: Callable[..., Any],
    properties: Properties,
    params: PyTree,
    write: Callable[..., Any] | None = None,
) -> Iterator[Callable[..., Any]]:
    """Runs models under `properties`, and yields `fn` rewritten for the level.

    At O1 and O4 the rewrite is `autocast`. At the levels that cast, `fn` sees the half
    params in float32, so that no operation promotes, and the rewrite puts its matmuls
    into half. Inside the same policy, `fn` without half params is already rewritten.

    Args:
        fn: a function whose first argument is the params.
        properties: the level.
        params: a tree with the dtypes of the params.
        write: `(scope, fn) -> fn`, which replaces the default rewrite.
    """
    half, written = half_dtype(properties), fn
    if half:
        is_new = half in [getattr(x, "dtype", None) for x in jax.tree.leaves(params)]
    else:
        is_new = policy.value != properties
    if (is_new or not half) and (scope := scope_by(properties)):

        def shown(params, /, *args, **kwargs):
            return fn(shown_params(params, scope.policy), *args, **kwargs)

        if is_new:
            written = write(scope, fn) if write else autocast_in(scope, shown)
        elif not write:
            written = shown  # the params of another model, such as a teacher
    if policy.value == properties:
        yield written
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(policy(properties))
        if properties.cast_model_type or properties.cast_model_outputs is not None:
            stack.enter_context(nn.intercept_methods(_Linen(properties)))
        yield written


def scope_by(properties: Properties) -> Scope | None:
    """Returns the scope in which a level rewrites programs, or None."""
    half = half_dtype(properties)
    dtype = half or (properties.patch_functions and properties.patch_functions_type)
    if not dtype:
        return None
    options = properties.lists, properties.promote
    fp8 = properties.fp8 and Products(properties.fp8)
    return scope_of(dtype, *options, of_model=bool(half), fp8=fp8, marked=True)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """An `apply_fn` under a policy. It hashes by value, so jit does not retrace."""

    apply_fn: Callable[..., Any]
    properties: Properties

    def __call__(self, variables, /, *args, **kwargs):
        if forwards_at.value not in (None, self.properties):
            other = _Forward(self.apply_fn, forwards_at.value)
            return other(variables, *args, **kwargs)
        is_flax = isinstance(variables, Mapping) and "params" in variables

        def run(params, /, *args, **kwargs):
            whole = {**variables, "params": params} if is_flax else params
            args, kwargs = model_inputs((args, kwargs), self.properties)
            try:
                out = self.apply_fn(whole, *args, **kwargs)
            except flax.errors.FlaxError as error:
                if not is_flax:
                    error.add_note(_VARIABLES)
                raise
            if kwargs.get("mutable", False) is False:
                return model_outputs(out, self.properties)
            first, *updated = out
            return model_outputs(first, self.properties), *updated

        params = variables["params"] if is_flax else variables
        with under_policy(run, self.properties, params) as written:
            return written(params, *args, **kwargs)


def cast_forward(
    apply_fn: Callable[..., Any], properties: Properties
) -> Callable[..., Any]:
    """Wraps the forward function of any framework as apex wraps a model's `forward`.

    The function sees half params and inputs in float32, so that no operation promotes,
    and its matmuls of half params run in half. Outputs are float32 by default.

    Args:
        apply_fn: `(variables, *args, **kwargs) -> outputs`. With `mutable=`, as in
            Flax, only the first output is cast.
        properties: the level, from `Properties.from_opt_level`.

    Returns:
        A function with the signature of `apply_fn`, which hashes by value. Wrapping it
        again with the same properties returns it unchanged.

    Raises:
        TypeError: `properties` is something else, such as the name of a level.

    >>> import jax.numpy as jnp
    >>> def apply(w, x):
    ...     return jnp.dot(x, w)
    >>> half = cast_forward(apply, Properties.from_opt_level("O3"))
    >>> half(jnp.ones(3, jnp.float16), jnp.full((2, 3), 1.0004))[0].item()  # rounded
    3.0
    """
    if not isinstance(properties, Properties):
        raise TypeError(
            f"jamp.cast_forward(apply_fn, properties) got {properties!r}: write "
            f"`jamp.Properties.from_opt_level({properties!r})`, or pass the "
            "`properties` of a state."
        )
    is_cast = isinstance(apply_fn, _Forward) and apply_fn.properties == properties
    return apply_fn if is_cast else _Forward(apply_fn, properties)


def forwards(apply_fn: Any, properties: Properties) -> Any:
    """Wraps the `apply_fn` of a state, or one per group, or returns one that raises."""
    if apply_fn is None or apply_fn is no_forward:
        return no_forward
    by_key = groups.split(apply_fn, apply_fn)
    cast = {key: cast_forward(fn, properties) for key, fn in by_key.items()}
    return groups.pack_hashable(cast, apply_fn)


def no_forward(*_: object, **__: object) -> NoReturn:
    """Raises an error. A state without an `apply_fn` has this function."""
    raise TypeError(
        "The state has no forward function: pass `apply_fn=model.apply`, or any "
        "`(variables, *args) -> outputs`, to jamp.initialize. For NNX, "
        "write `jamp.nnx.cast_forward(fn, optimizer)(model, *args)`."
    )


@dataclasses.dataclass
class _Linen:
    """Casts inputs and outputs where a loss calls a Linen model itself.

    Each entered policy has its own object, so threads do not share one.
    """

    properties: Properties
    running: list[Any] = dataclasses.field(default_factory=list)  # models' scopes

    def __call__(self, next_fun, args, kwargs, context):
        scope = context.module.scope
        if (
            scope is None
            or policy.value != self.properties
            or context.method_name == "setup"
            or context.module.is_initializing()
        ):
            return next_fun(*args, **kwargs)
        # A root scope inside another model, such as a teacher's, begins a new model.
        outermost = not self.running
        is_root = scope.parent is None and scope.path == ()
        if not outermost and (not is_root or scope is self.running[-1]):
            return next_fun(*args, **kwargs)
        # The params of an inner model may be half or, for a teacher, float32.
        half = half_dtype(self.properties)
        if half:
            args, kwargs = at_boundary((args, kwargs))
        elif outermost:
            args, kwargs = model_inputs((args, kwargs), self.properties)
        self.running.append(scope)
        try:
            out = next_fun(*args, **kwargs)
        finally:
            self.running.pop()
        if outermost:
            return model_outputs(out, self.properties)
        return at_boundary(out) if half else out
