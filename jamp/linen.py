"""For Flax Linen: which modules of a model are BatchNorm."""

from typing import Any

import flax.linen as nn
import jax


def batchnorm_paths(model: nn.Module, *inputs: Any, **kwargs: Any) -> tuple[str, ...]:
    """Traces `model.init` and returns the paths of the BatchNorm modules it calls.

    Args:
        model: a Linen module.
        *inputs, **kwargs: what its `__call__` takes; arrays or `jax.ShapeDtypeStruct`.

    Returns:
        The paths, sorted: `("BatchNorm_0", "block/norm")`. Nothing is computed.

    >>> import flax.linen as nn, jax.numpy as jnp
    >>> class Net(nn.Module):
    ...     @nn.compact
    ...     def __call__(self, x):
    ...         return nn.BatchNorm(use_running_average=True, name="norm")(x)
    >>> batchnorm_paths(Net(), jnp.ones((1, 3)))
    ('norm',)
    """
    found = set()

    def record(next_fun, args, kwargs, context):
        if isinstance(context.module, nn.BatchNorm):
            found.add("/".join(context.module.path))
        return next_fun(*args, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(
            lambda key, args: model.init(key, *args, **kwargs),
            jax.random.key(0),
            inputs,
        )
    return tuple(sorted(found))
