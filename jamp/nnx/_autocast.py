"""Functions of NNX models, and the calls of models, in half."""

import functools
from collections.abc import Callable
from typing import Any

from flax import nnx
from jax.typing import DTypeLike

from jamp._autocast.lists import AutocastLists
from jamp._autocast.program import Scope
from jamp._autocast.transform import Promote, autocast_in as pure_in, scope_of
from jamp._core.dtypes import FLOAT32, HALF_DTYPES, names_dtype
from jamp._policy.forward import (
    model_inputs,
    model_outputs,
    under_policy,
)
from jamp._policy.levels import Properties
from jamp.nnx._variables import (
    check_same_variables,
    from_pure,
    map_arrays,
    shown,
    take_out,
    values_by_path,
    written_back,
)


def autocast[**P, R](
    fn: Callable[P, R],
    dtype: DTypeLike | None = None,
    *,
    lists: AutocastLists | None = None,
    promote: Promote = "widest",
) -> Callable[P, R]:
    """`jamp.autocast` for functions of NNX models.

    The models among the arguments keep what `fn` writes into them, such as running
    statistics. Args, returns: see `jamp.autocast`; a dtype of None is float16.

    >>> import jax.numpy as jnp
    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> y = autocast(lambda model, x: model(x))(model, jnp.ones((1, 2)))
    >>> print(y.shape, y.dtype)
    (1, 2) float32
    """
    return autocast_in(scope_of(dtype or "float16", lists, promote), fn)


def autocast_in[**P, R](scope: Scope, fn: Callable[P, R]) -> Callable[P, R]:
    """As `autocast`, in a scope: of a model's half params, `fn` sees float32."""

    @functools.wraps(fn)
    def autocast_fn(*args, **kwargs):
        nodes, others, put_back = take_out((args, kwargs))
        graphdef, state = nnx.split(nodes)
        variables = dict(nnx.to_flat_state(state))

        def pure(values, others):
            there = nnx.merge(graphdef, from_pure(state, shown(state, values, scope)))
            before = values_by_path(there)
            args, kwargs = put_back(there, others)
            out = fn(*args, **kwargs)  # pyright: ignore[reportCallIssue]
            after = values_by_path(there)
            check_same_variables(before, after)
            # None if not written: a Variable of an outer trace can only be read.
            pairs = ((before[path], after[path]) for path in variables)
            return out, [None if old is new else new for old, new in pairs]

        out, values = pure_in(scope, pure)(nnx.as_pure(state), others)
        written = {
            path: written_back(variable, value)
            for (path, variable), value in zip(variables.items(), values, strict=True)
            if value is not None
        }
        nnx.update(nodes, nnx.from_flat_state(written))
        return out

    return autocast_fn


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
        params = nnx.as_pure(nnx.state(model))
        with under_policy(run, properties, params, autocast_in) as written:
            return written(model, *args, **kwargs)

    return call
