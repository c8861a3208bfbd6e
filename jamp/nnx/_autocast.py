"""Autocast of functions that take NNX models, and change what is in them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jamp._autocast._transform import autocast as autocast_pure
from jamp.nnx._variables import with_values


def autocast(fn: Callable[..., Any], dtype: Any = None, **options: Any) -> Any:
    """`jamp.autocast` for functions of NNX models.

    The models among the arguments go in as arrays and come out as arrays, so what `fn`
    writes into them (running statistics, counters of keys) is written when it is done.

    Args:
        fn: takes NNX modules, arrays, and whatever else.
        dtype, **options: as of `jamp.autocast`.

    Returns:
        A function with the signature of `fn`.

    >>> import jax.numpy as jnp
    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> y = autocast(lambda model, x: model(x))(model, jnp.ones((1, 2)))
    >>> print(y.shape, y.dtype)
    (1, 2) float32
    """

    @functools.wraps(fn)
    def autocast_fn(*args, **kwargs):
        leaves, structure = jax.tree.flatten((args, kwargs), is_leaf=_is_node)
        nodes = tuple(x for x in leaves if _is_node(x))
        graphdef, state = nnx.split(nodes)

        def pure(values, others):
            there = nnx.merge(graphdef, with_values(state, values))
            rest, models = iter(others), iter(there)
            full = [next(models) if _is_node(x) else next(rest) for x in leaves]
            args, kwargs = jax.tree.unflatten(structure, full)
            out = fn(*args, **kwargs)
            return out, nnx.as_pure(nnx.state(there))

        others = [x for x in leaves if not _is_node(x)]
        which = {} if dtype is None else {"dtype": dtype}
        run = autocast_pure(pure, **which, **options)
        out, values = run(nnx.as_pure(state), others)
        nnx.update(nodes, with_values(state, values))
        return out

    return autocast_fn


def _is_node(x: Any) -> bool:
    return isinstance(x, nnx.Pytree)
