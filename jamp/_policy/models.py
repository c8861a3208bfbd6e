"""Where a model begins and ends, under which policy, and what is done there.

A policy is entered together with a `jax.make_user_context` value, which is part of the
key of JAX's trace caches: a function jitted outside is traced again inside, and back.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.linen as nn
import jax

from jamp._autocast.marks import at_boundary
from jamp._core.dtypes import FLOAT32, cast_floats
from jamp._policy.levels import Properties

# `policy.value` is the innermost.
policy = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def forward_policy(properties: Properties) -> Iterator[None]:
    """Runs models under `properties`; entering the same ones twice changes nothing."""
    if policy.value == properties:
        yield
        return
    with contextlib.ExitStack() as stack:
        stack.enter_context(policy(properties))
        if properties.cast_model_type or properties.cast_model_outputs is not None:
            stack.enter_context(nn.intercept_methods(_Linen(properties)))
        yield


def model_inputs[T](tree: T, properties: Properties) -> T:
    """What enters a model: float32, at the half levels rounded where half reads it."""
    tree = cast_floats(tree, FLOAT32) if properties.cast_model_type else tree
    return at_boundary(tree) if properties.half_dtype else tree


def model_outputs[T](tree: T, properties: Properties) -> T:
    """What leaves a model: in float32, or as `cast_model_outputs` says."""
    if properties.half_dtype:
        tree = at_boundary(cast_floats(tree, FLOAT32))
    dtype = properties.output_dtype
    return tree if dtype is None else cast_floats(tree, dtype)


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
        # A model that a module applies, such as a teacher, is one by itself.
        outermost = not self.running
        is_root = scope.parent is None and scope.path == ()
        if not outermost and (not is_root or scope is self.running[-1]):
            return next_fun(*args, **kwargs)
        # Nobody knows yet whether its params are half: a teacher's are not.
        half = self.properties.half_dtype
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
