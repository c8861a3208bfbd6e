"""Autocasts functions of NNX models, and runs them under the level of a model."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from jamp._autocast.lists import AutocastLists
from jamp._autocast.scope import Scope
from jamp._autocast.transform import Promote, autocast_in as pure_in, scope_of
from jamp._core.dtypes import FLOAT32, HALF_DTYPES
from jamp._policy.forward import model_inputs, model_outputs, under_policy
from jamp._policy.levels import Properties
from jamp.nnx._optimizer import Optimizer
from jamp.nnx._pure import PureCall
from jamp.nnx._variables import Models, arrays_of, map_arrays


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


def cast_forward(
    fn: Callable[..., Any], optimizer: Optimizer | Properties
) -> "Forward":
    """Runs a function of an NNX model under the model's level, for inference.

    It is the counterpart of `state.apply_fn`. The function sees half params and inputs
    in float32, and its matmuls run in half. Outputs are float32 by default. A loss
    needs no `cast_forward`, because `scaled_value_and_grad` runs all of it under the
    level.

    Args:
        fn: `(model, *args, **kwargs) -> outputs`, which may call any method. The model
            keeps the values that `fn` writes to its Variables.
        optimizer: the `jamp.nnx.Optimizer` of the model, or `jamp.Properties` for a
            model without one.

    Returns:
        A function with the signature of `fn`, which hashes by value.

    Raises:
        TypeError: `optimizer` is neither of both.

    >>> import jax.numpy as jnp, jamp.nnx, optax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> model, optimizer = jamp.nnx.initialize(model, optax.sgd(0.1), "O2", verbosity=0)
    >>> forward = cast_forward(lambda model, x: nnx.relu(model(x)), optimizer)
    >>> print(forward(model, jnp.ones((1, 2))).dtype)
    float32
    """
    if isinstance(optimizer, Optimizer):
        optimizer = optimizer.properties
    if not isinstance(optimizer, Properties):
        raise TypeError(
            "jamp.nnx.cast_forward(fn, optimizer) takes a jamp.nnx.Optimizer or "
            f"jamp.Properties, got {type(optimizer).__name__}."
        )
    return Forward(fn, optimizer)


@dataclasses.dataclass(frozen=True)
class Forward:
    """A function of NNX models under a level. It hashes by value."""

    fn: Callable[..., Any]
    properties: Properties

    def __call__(self, models: Models, /, *args: Any, **kwargs: Any) -> Any:
        params = arrays_of(models, nnx.Param)
        with under_policy(self._run, self.properties, params, autocast_in) as written:
            return written(models, *args, **kwargs)

    def _run(self, models, /, *args, **kwargs):
        inputs = functools.partial(model_inputs, properties=self.properties)
        args, kwargs = map_arrays(inputs, (args, kwargs))
        out = self.fn(models, *args, **kwargs)
        return map_arrays(lambda x: model_outputs(x, self.properties), out)


def widen_modules(model: nnx.Module, properties: Properties) -> None:
    """Sets a half `dtype` of modules to float32: the level decides what is half."""
    if properties.cast_model_type:
        module: Any
        for _, module in nnx.iter_modules(model):
            with contextlib.suppress(TypeError):  # a field `dtype` may hold any object
                if jnp.dtype(vars(module).get("dtype")) in HALF_DTYPES:
                    module.dtype = FLOAT32
