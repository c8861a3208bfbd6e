"""Flax Linen: where a model begins and ends, for losses that call `model.apply`."""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import flax.linen as nn

from jamp._autocast.model import at_boundary
from jamp._policy.active import model_inputs, model_outputs, policy
from jamp._policy.levels import Properties


@contextlib.contextmanager
def linen_models(properties: Properties) -> Iterator[None]:
    """Intercepts the calls of Linen models, where the level casts what they take."""
    if not properties.cast_model_type and properties.cast_model_outputs is None:
        yield
        return
    with nn.intercept_methods(_Models(properties)):
        yield


@dataclasses.dataclass
class _Models:
    """The interceptor: one object per policy entered, so one per thread."""

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
