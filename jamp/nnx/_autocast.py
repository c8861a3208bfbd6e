"""Autocasts functions of NNX models, and runs the call of a model under its level."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jamp._autocast.lists import AutocastLists
from jamp._autocast.program import Scope
from jamp._autocast.transform import Promote, autocast_in as pure_in, scope_of
from jamp._core.dtypes import FLOAT32, HALF_DTYPES
from jamp._policy.forward import model_inputs, model_outputs, under_policy
from jamp._policy.levels import Properties
from jamp.nnx._pure import PureCall
from jamp.nnx._variables import map_arrays


def autocast[**P, R](
    fn: Callable[P, R],
    dtype: DTypeLike | None = None,
    *,
    lists: AutocastLists | None = None,
    promote: Promote = "widest",
) -> Callable[P, R]:
    """`jamp.autocast` for functions of NNX models.

    Models in the arguments keep the values that `fn` writes to them, such as running
    statistics. See `jamp.autocast` for the arguments; the default dtype is float16.

    >>> import jax.numpy as jnp
    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> y = autocast(lambda model, x: model(x))(model, jnp.ones((1, 2)))
    >>> print(y.shape, y.dtype)
    (1, 2) float32
    """
    return autocast_in(scope_of(dtype or "float16", lists, promote), fn)


def autocast_in[**P, R](scope: Scope, fn: Callable[P, R]) -> Callable[P, R]:
    """Rewrites `fn` in a scope, in which half params of models appear as float32."""

    @functools.wraps(fn)
    def autocast_fn(*args, **kwargs):
        call = PureCall(fn, args, kwargs, scope)
        out, written = pure_in(scope, call)(None, call.others, call.values)
        call.write_back(written)
        return out

    return autocast_fn


_PROPERTIES = "_jamp_properties"


def check_fresh(model: nnx.Module) -> None:
    """Raises if `initialize` has patched the model already."""
    if hasattr(model, _PROPERTIES):
        raise ValueError(
            "jamp.nnx.initialize has changed the model already, at "
            f"{getattr(model, _PROPERTIES).opt_level}. Pass a fresh one, or "
            "initialize all optimizers in one call."
        )


def patch(model: nnx.Module, properties: Properties) -> None:
    """Makes the call of a model run under its level."""
    if properties.cast_model_type:
        module: Any
        for _, module in nnx.iter_modules(model):
            with contextlib.suppress(TypeError):  # a field `dtype` may hold any object
                if jnp.dtype(vars(module).get("dtype")) in HALF_DTYPES:
                    module.dtype = FLOAT32  # the level decides what runs in half
    if properties.enabled:
        patched = _patched_class(type(model), properties)
        object.__setattr__(model, "__class__", patched)


@functools.cache
def _patched_class(cls: type, properties: Properties) -> type:
    """Returns a subclass whose call runs under a policy, one for equal arguments.

    The class holds the policy, because some modules treat each attribute of an instance
    as a Variable.
    """

    def reduce(self, protocol):
        del protocol
        return _blank, (cls, properties), self.__getstate__()

    def new(patched, *args, **kwargs):
        del patched, args, kwargs
        return object.__new__(cls)  # type(model)(...) makes an unpatched model

    names = ("__module__", "__qualname__", "__doc__")
    body = {name: getattr(cls, name) for name in names}
    body |= {"__new__": new, "__reduce_ex__": reduce, _PROPERTIES: properties}
    if any("__call__" in vars(base) for base in cls.__mro__):
        body["__call__"] = _under_level(cls.__call__, properties)
    return type(cls)(cls.__name__, (cls,), body)


def _blank(cls: type, properties: Properties) -> Any:
    """Makes an empty patched model, which pickle fills."""
    return object.__new__(_patched_class(cls, properties))


def _under_level(forward: Any, properties: Properties) -> Callable[..., Any]:
    """Wraps the `__call__` of a model so that it runs under the model's level."""

    def run(model, *args, **kwargs):
        args, kwargs = map_arrays(lambda x: model_inputs(x, properties), (args, kwargs))
        out = forward(model, *args, **kwargs)
        return map_arrays(lambda x: model_outputs(x, properties), out)

    def call(model, *args, **kwargs):
        params = nnx.as_pure(nnx.state(model))
        with under_policy(run, properties, params, autocast_in) as written:
            return written(model, *args, **kwargs)

    return call
