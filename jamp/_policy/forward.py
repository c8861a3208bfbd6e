"""The forward pass of a model, as its level writes it, and where a model begins.

A policy is entered together with a `jax.make_user_context` value, which is part of the
key of JAX's trace caches: a function jitted outside is traced again inside, and back.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import flax.linen as nn
import jax
from jaxtyping import PyTree

from jamp._autocast.marks import at_boundary, shown_params
from jamp._autocast.program import Scope
from jamp._autocast.transform import autocast_in, scope_of
from jamp._core import groups
from jamp._core.dtypes import FLOAT32, cast_floats
from jamp._fp8.write import Products
from jamp._policy.levels import Properties, half_dtype, output_dtype

# `policy.value` is the innermost.
policy = jax.make_user_context(default_value=None)


def model_inputs[T](tree: T, properties: Properties) -> T:
    """Casts the inputs of a model to float32, and marks them where half reads them."""
    tree = cast_floats(tree, FLOAT32) if properties.cast_model_type else tree
    return at_boundary(tree) if half_dtype(properties) else tree


def model_outputs[T](tree: T, properties: Properties) -> T:
    """Casts the outputs of a model to float32, or as `cast_model_outputs` says."""
    if half_dtype(properties):
        tree = at_boundary(cast_floats(tree, FLOAT32))
    dtype = output_dtype(properties)
    return tree if dtype is None else cast_floats(tree, dtype)


@contextlib.contextmanager
def under_policy(
    fn: Callable[..., Any],
    properties: Properties,
    params: PyTree,
    write: Callable[..., Any] | None = None,
) -> Iterator[Callable[..., Any]]:
    """Runs models under `properties`, and yields `fn` as its level writes it.

    At O1 and O4 that is `autocast`. At the levels that cast, `fn` sees the half params
    in float32, so that nothing promotes, and the same passes write it in half. If the
    policy around is the same and no param is half, `fn` is written already.

    Args:
        fn: a function of the params, first, and anything else.
        properties: the level.
        params: those of `fn`, or others of their dtypes.
        write: `(scope, fn) -> fn`, in place of the default.
    """
    half, scope = half_dtype(properties), None
    if half:
        is_new = half in [getattr(x, "dtype", None) for x in jax.tree.leaves(params)]
    else:
        is_new = policy.value != properties
    if is_new:
        scope = scope_by(properties)
    written = fn if scope is None else (write or _written)(scope, fn)
    if policy.value == properties:
        yield written
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(policy(properties))
        if properties.cast_model_type or properties.cast_model_outputs is not None:
            stack.enter_context(nn.intercept_methods(_Linen(properties)))
        yield written


def _written(scope: Scope, fn: Callable[..., Any]) -> Callable[..., Any]:
    def shown(params, /, *args, **kwargs):
        return fn(shown_params(params, scope.policy), *args, **kwargs)

    return autocast_in(scope, shown)


def scope_by(properties: Properties) -> Scope | None:
    """The scope in which a level rewrites a program, or None if it rewrites nothing."""
    half = half_dtype(properties)
    dtype = half or (properties.patch_functions and properties.patch_functions_type)
    if not dtype:
        return None
    options = properties.lists, properties.promote
    fp8 = properties.fp8 and Products(properties.fp8)
    return scope_of(dtype, *options, of_model=bool(half), fp8=fp8)


@dataclasses.dataclass(frozen=True)
class _Forward:
    """`apply_fn` under a policy. It hashes by value, so that jit does not retrace."""

    apply_fn: Callable[..., Any]
    properties: Properties

    def __call__(self, variables, /, *args, **kwargs):
        is_flax = isinstance(variables, Mapping) and "params" in variables

        def run(params, /, *args, **kwargs):
            whole = {**variables, "params": params} if is_flax else params
            args, kwargs = model_inputs((args, kwargs), self.properties)
            out = self.apply_fn(whole, *args, **kwargs)
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

    The function sees half params and inputs as float32, so that nothing promotes, and
    its matmuls of half params run in half. Outputs are float32 by default.

    Args:
        apply_fn: `(variables, *args, **kwargs) -> outputs`; under a keyword `mutable`,
            as in Flax, only the first output is cast.
        properties: the level, from `Properties.from_opt_level`.

    Returns:
        A function with the signature of `apply_fn`; it hashes by value. Returns an
        `apply_fn` that has this cast as it is.

    >>> import jax.numpy as jnp
    >>> def apply(w, x):
    ...     return jnp.dot(x, w)
    >>> half = cast_forward(apply, Properties.from_opt_level("O3"))
    >>> half(jnp.ones(3, jnp.float16), jnp.full((2, 3), 1.0004))[0].item()  # rounded
    3.0
    """
    is_cast = isinstance(apply_fn, _Forward) and apply_fn.properties == properties
    return apply_fn if is_cast else _Forward(apply_fn, properties)


def forwards(apply_fn: Any, properties: Properties) -> Any:
    """The `apply_fn` of a state: one, one per group, or one that raises."""
    if apply_fn is None or apply_fn is no_forward:
        return no_forward
    if not isinstance(apply_fn, list | tuple | Mapping):
        return cast_forward(apply_fn, properties)
    by_key = groups.split(apply_fn, groups.group_keys(apply_fn))
    cast = {key: cast_forward(fn, properties) for key, fn in by_key.items()}
    return groups.pack_hashable(cast, apply_fn)


def no_forward(*_: object, **__: object) -> NoReturn:
    """The `apply_fn` of a state that was given none."""
    raise TypeError(
        "The state has no forward: pass `apply_fn=model.apply`, or any `(variables, "
        "*args) -> outputs`, to jamp.initialize. Call an NNX model itself."
    )


@dataclasses.dataclass
class _Linen:
    """Intercepts the calls of Linen models: a loss may call `model.apply` by itself.

    One object per policy entered, so one per thread.
    """

    properties: Properties
    running: list[Any] = dataclasses.field(default_factory=list)  # scopes of models

    def __call__(self, next_fun, args, kwargs, context):
        scope = context.module.scope
        if (
            scope is None
            or policy.value != self.properties
            or context.method_name == "setup"
            or context.module.is_initializing()
        ):
            return next_fun(*args, **kwargs)
        # A model applied inside another module, such as a teacher, is a separate model.
        outermost = not self.running
        is_root = scope.parent is None and scope.path == ()
        if not outermost and (not is_root or scope is self.running[-1]):
            return next_fun(*args, **kwargs)
        # Its params may be half or, as a teacher's, float32: not known yet.
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
