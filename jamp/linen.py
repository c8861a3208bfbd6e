"""For Flax Linen: which modules of a model are BatchNorm."""

from typing import Any

import flax.linen as nn
import jax
import numpy as np


def batchnorm_paths(model: nn.Module, *inputs: Any, **kwargs: Any) -> tuple[str, ...]:
    """Traces `model.init` and returns the paths of the BatchNorm modules it calls.

    Args:
        model: a Linen module.
        *inputs, **kwargs: what its `__call__` takes; a `jax.ShapeDtypeStruct` may stand
            for an array.

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

    leaves, structure = jax.tree.flatten((inputs, kwargs))
    is_array = lambda x: isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct)  # noqa: E731
    arrays = {i: x for i, x in enumerate(leaves) if is_array(x)}

    def init(key, arrays):  # flags and the like stay what they are
        inside = [arrays.get(i, x) for i, x in enumerate(leaves)]
        inputs, kwargs = structure.unflatten(inside)
        return model.init(key, *inputs, **kwargs)

    with nn.intercept_methods(record):
        jax.eval_shape(init, jax.random.key(0), arrays)
    return tuple(sorted(found))
