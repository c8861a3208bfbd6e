"""The front end for NNX: model and optimizer in, model and optimizer out."""

from collections.abc import Mapping, Sequence
from typing import Any, Unpack, overload

import optax
from flax import nnx
from flax.nnx import filterlib

from jamp._core.devices import moves_constants
from jamp._policy.casting import cast_to_level
from jamp._policy.levels import OptLevel
from jamp._policy.options import InitOptions, check_options
from jamp._state.initialize import initialize_beside
from jamp.nnx._autocast import check_fresh, patch
from jamp.nnx._optimizer import Optimizer
from jamp.nnx._variables import Models, arrays_of, by_path, check_models_apart, entries

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
@moves_constants
def initialize(
    models: Models,
    tx: Tx | None = None,
    opt_level: OptLevel = "O1",
    *,
    wrt: filterlib.Filter = nnx.Param,
    **options: Unpack[InitOptions],
) -> Any:
    """Prepares an NNX model and an optimizer for training at an opt level.

    As apex does, in place: the model's Variables are cast, and its call runs under the
    level. BatchNorm is known by its statistics.

    Args:
        models: an nnx.Module in float32; or a list, tuple or dict of them.
        tx: an optax transformation; or as many, in the container of the models.
        opt_level: "O0" to "O6".
        wrt: a filter of the Variables to train, such as `nnx.LoRAParam`; the other
            params are cast, and stay as they are.
        **options: of `jamp.initialize`: overrides, `num_losses`, `keep_fp32` and so on.

    Returns:
        `(models, optimizer)`, the objects that were passed, and one `Optimizer`;
        without a tx the models alone.

    Raises:
        ValueError: a model was initialized before; two models share a Variable.
        TypeError: `models` are not modules; an unknown option.

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
    >>> print(model.kernel.dtype, model(jnp.ones((1, 2))).dtype, optimizer.loss_scale)
    float16 float32 65536.0
    """
    modules = entries(models)
    for module in modules.values():
        if not isinstance(module, nnx.Module):
            raise TypeError(f"models hold {module!r}, which is not an nnx.Module.")
        check_fresh(module)
    check_models_apart(models)
    for each in tx if isinstance(tx, list | tuple) else (tx,):
        if isinstance(each, nnx.Optimizer):
            raise TypeError(
                "tx is an nnx.Optimizer: pass its transformation, `optimizer.tx`. "
                "jamp.nnx.initialize returns the optimizer to use."
            )
    check_options("jamp.nnx.initialize", options, InitOptions.__optional_keys__)
    params = arrays_of(models, wrt)
    frozen = arrays_of(models, nnx.All(nnx.Param, nnx.Not(wrt)))
    stats = arrays_of(models, nnx.BatchStat)  # which tell what is a BatchNorm
    state = initialize_beside(
        frozen, params, tx, opt_level, batch_stats=stats, **options
    )
    nnx.update(models, by_path(state.params))
    nnx.update(models, by_path(cast_to_level(frozen, state.properties, stats)))
    for module in modules.values():
        patch(module, state.properties)
    if tx is None:
        return models
    return models, Optimizer(state, wrt)
