"""The call of an NNX model under its level."""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx

from jamp._core.dtypes import FLOAT32, HALF_DTYPES, names_dtype
from jamp._policy.forward import (
    forward_policy,
    model_inputs,
    model_outputs,
    scope_under,
)
from jamp._policy.levels import Properties
from jamp.nnx._autocast import autocast_in
from jamp.nnx._variables import map_arrays

_PROPERTIES = "_jamp_properties"


def check_fresh(model: nnx.Module) -> None:
    """Raises if a model has a policy already."""
    if hasattr(model, _PROPERTIES):
        raise ValueError(
            "The model has gone through jamp.nnx.initialize already, at "
            f"{getattr(model, _PROPERTIES).opt_level}. Pass a fresh one, or "
            "initialize all optimizers together."
        )


def patch(model: nnx.Module, properties: Properties) -> None:
    """Lets the call of a model whose Variables are cast run under its level."""
    if properties.cast_model_type:
        module: Any
        for _, module in nnx.iter_modules(model):
            if names_dtype(vars(module).get("dtype"), HALF_DTYPES):
                module.dtype = FLOAT32  # the level says what runs in half
    if properties.enabled:
        patched = _patched_class(type(model), properties)
        object.__setattr__(model, "__class__", patched)


@functools.cache
def _patched_class(cls: type, properties: Properties) -> type:
    """A subclass of a model's class whose call runs under a policy.

    One per class and policy: models of a class stay of one class. The policy is the
    class's, as some modules take all that an instance has for Variables.
    """

    def reduce(self, protocol):
        del protocol
        return _blank, (cls, properties), self.__getstate__()

    def new(patched, *args, **kwargs):
        del patched, args, kwargs
        return object.__new__(cls)  # type(model)(...) makes a model without policy

    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(cls, name) for name in names}
    body |= {"__new__": new, "__reduce_ex__": reduce, _PROPERTIES: properties}
    if any("__call__" in vars(base) for base in cls.__mro__):
        body["__call__"] = _under_level(cls.__call__, properties)
    return type(cls)(cls.__name__, (cls,), body)


def _blank(cls: type, properties: Properties) -> Any:
    """Where pickle begins with a patched model."""
    return object.__new__(_patched_class(cls, properties))


def _under_level(
    forward: Callable[..., Any], properties: Properties
) -> Callable[..., Any]:
    """The call of a model, as its level writes it."""

    def run(model, *args, **kwargs):
        enter = lambda x: model_inputs(x, properties)  # noqa: E731
        args, kwargs = map_arrays(enter, (args, kwargs))
        out = forward(model, *args, **kwargs)
        return map_arrays(lambda x: model_outputs(x, properties), out)

    def call(model, *args, **kwargs):
        scope = scope_under(properties, nnx.as_pure(nnx.state(model)))
        written = run if scope is None else autocast_in(scope, run)
        with forward_policy(properties):
            return written(model, *args, **kwargs)

    return call
