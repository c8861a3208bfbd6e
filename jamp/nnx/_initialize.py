"""`initialize` for NNX: casts models, and makes their `Optimizer`."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack, overload

import optax
from flax import nnx
from flax.nnx import filterlib

from jamp._policy.casting import cast_to_level
from jamp._policy.levels import OptLevel
from jamp._policy.options import InitOptions, check_options
from jamp._state.initialize import initialize_beside
from jamp.nnx._autocast import widen_modules
from jamp.nnx._optimizer import Optimizer
from jamp.nnx._variables import Models, arrays_of, by_path, check_apart, entries

type Tx = (
    optax.GradientTransformation
    | Sequence[optax.GradientTransformation]
    | Mapping[Any, optax.GradientTransformation]
)


@overload
def initialize[M: Models](
    models: M,
    tx: None = None,
    opt_level: OptLevel = "O1",
    *,
    wrt: filterlib.Filter = nnx.Param,
    **options: Unpack[InitOptions],
) -> M: ...
@overload
def initialize[M: Models](
    models: M,
    tx: Tx,
    opt_level: OptLevel = "O1",
    *,
    wrt: filterlib.Filter = nnx.Param,
    **options: Unpack[InitOptions],
) -> tuple[M, Optimizer]: ...
def initialize(
    models: Models,
    tx: Tx | None = None,
    opt_level: OptLevel = "O1",
    *,
    wrt: filterlib.Filter = nnx.Param,
    **options: Unpack[InitOptions],
) -> Any:
    """Prepares an NNX model and an optimizer for training at an opt level.

    Casts the Variables of the models in place, as apex does, and leaves their classes
    alone. It recognizes a BatchNorm by its statistics. Losses run under the level; for
    inference, see `cast_forward`. An error leaves the models unchanged.

    Args:
        models: an nnx.Module in float32, or a list, tuple or dict of them.
        tx: an optax transformation, or a container like `models` with one for each
            model.
        opt_level: "O0" to "O6".
        wrt: a filter of the Variables to train, such as `nnx.LoRAParam`. The other
            params are cast and then stay constant.
        **options: the options of `jamp.initialize`, such as `keep_fp32`.

    Returns:
        `(models, optimizer)` with the same models; without `tx`, only the models.

    Raises:
        ValueError: params are not float32, for example because the model was
            initialized before; two models share a Variable.
        TypeError: `models` are not modules; an option is unknown.

    >>> import jax.numpy as jnp, jamp.nnx, optax
    >>> model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    >>> model, optimizer = jamp.nnx.initialize(model, optax.sgd(0.1), "O2", verbosity=0)
    >>> @nnx.jit
    ... def train_step(model, optimizer, x):
    ...     loss_fn = lambda model, x: (model(x) ** 2).mean()
    ...     loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer, x)
    ...     optimizer.update(model, grads)
    ...     return loss
    >>> loss = train_step(model, optimizer, jnp.ones((1, 2)))
    >>> print(model.kernel.dtype, loss.dtype, optimizer.loss_scale)
    float16 float32 65536.0
    """
    check_apart(models)
    for each in tx if isinstance(tx, list | tuple) else (tx,):
        if isinstance(each, nnx.Optimizer):
            raise TypeError(
                "tx is an nnx.Optimizer: pass its transformation, `optimizer.tx`. "
                "jamp.nnx.initialize returns the optimizer to use."
            )
    check_options("jamp.nnx.initialize", options, InitOptions.__optional_keys__)
    params = arrays_of(models, wrt)
    frozen = arrays_of(models, nnx.All(nnx.Param, nnx.Not(wrt)))
    stats = arrays_of(models, nnx.BatchStat)
    state = initialize_beside(
        frozen, params, tx, opt_level, batch_stats=stats, **options
    )
    frozen = cast_to_level(frozen, state.properties, stats)
    optimizer = None if tx is None else Optimizer(state, wrt)
    nnx.update(models, by_path(state.params))
    nnx.update(models, by_path(frozen))
    for module in entries(models).values():
        widen_modules(module, state.properties)
    return models if optimizer is None else (models, optimizer)
