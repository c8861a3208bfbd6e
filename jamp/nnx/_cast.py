"""An NNX model in half: its Variables, its modules' dtypes, what goes in and comes out.

A BatchNorm is what has statistics called mean and var. They stay in float32, and with
`keep_batchnorm_fp32` its params; it computes in float32 and gives half back.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx

from jamp._core.dtypes import (
    FLOAT32,
    HALF_DTYPES,
    MODEL_DTYPES,
    is_castable,
    names_dtype,
)
from jamp._policy.active import cast_inputs, cast_outputs, policy
from jamp._policy.forward import forward_policy
from jamp._policy.levels import Properties
from jamp.nnx._arguments import map_arrays
from jamp.nnx._autocast import autocast

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
    """Sets the dtypes of a model whose Variables are cast, and patches its call."""
    if properties.cast_model_type:
        for _, module in nnx.iter_modules(model):
            _set_dtype(module, properties)
    if properties.enabled:
        patched = _patched_class(type(model), properties)
        object.__setattr__(model, "__class__", patched)


def _set_dtype(module: Any, properties: Properties) -> None:
    half = properties.half_dtype
    field = vars(module).get("dtype", _MISSING)
    own = _own_dtypes(module)
    if half is None:  # O0: what asked for half runs in float32
        if names_dtype(field, HALF_DTYPES):
            module.dtype = FLOAT32
        return
    if isinstance(module, nnx.BatchNorm):
        module.dtype = half
        module.promote_dtype = _in_float32
    elif field is None or names_dtype(field, MODEL_DTYPES):
        module.dtype = FLOAT32 if own == {FLOAT32} else half
    if isinstance(module, nnx.RNNCellBase) and hasattr(module, "param_dtype"):
        # The dtype of the carry that it begins with.
        module.param_dtype = half  # pyright: ignore[reportAttributeAccessIssue]


_MISSING = object()


def _own_dtypes(module: nnx.Module) -> set[Any]:
    """The dtypes of the params that are directly the module's."""
    own = [v.get_value() for v in vars(module).values() if isinstance(v, nnx.Param)]
    return {x.dtype for x in own if is_castable(x)}


def _in_float32(args: Any, /, *, dtype: Any = None, inexact: bool = True) -> Any:
    """What a BatchNorm in half computes with: all in float32; its result is in half."""
    del dtype, inexact
    return tuple(None if x is None else jnp.asarray(x).astype(FLOAT32) for x in args)


@functools.cache
def _patched_class(cls: type, properties: Properties) -> type:
    """A subclass of a model's class whose call runs under a policy.

    One per class and policy: models of a class stay of one class. The policy is the
    class's, as some modules take all that an instance has for Variables.
    """

    def call(self, *args, **kwargs):
        return _call(cls.__call__, self, properties, args, kwargs)

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
        body["__call__"] = call
    return type(cls)(cls.__name__, (cls,), body)


def _blank(cls: type, properties: Properties) -> Any:
    """Where pickle begins with a patched model."""
    return object.__new__(_patched_class(cls, properties))


def _call(
    forward: Callable[..., Any],
    model: nnx.Module,
    properties: Properties,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    args, kwargs = map_arrays(lambda x: cast_inputs(x, properties), (args, kwargs))
    if properties.patch_functions and policy.value != properties:
        forward = autocast(
            forward,
            properties.patch_functions_type,
            lists=properties.lists,
            promote=properties.promote,  # pyright: ignore[reportArgumentType]
        )
    with forward_policy(properties):
        out = forward(model, *args, **kwargs)
    return map_arrays(lambda x: cast_outputs(x, properties), out)
