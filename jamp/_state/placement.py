"""Shardings of a new state: moments as their params, scalars replicated."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jamp._core.devices import in_full, put
from jamp._core.dtypes import is_castable
from jamp._core.tree import is_traced, path_parts, trained_params
from jamp.optimizers import FusedTransformation


def with_shardings(
    tx: optax.GradientTransformation, params: PyTree
) -> optax.GradientTransformation:
    """Tells a fused optimizer how its params are sharded: jit would hide it."""
    if not isinstance(tx, FusedTransformation):
        return tx
    leaves = jax.tree.leaves(trained_params(params))
    named = [_named(x) for x in leaves]
    spread = named and all(s is not None and s.mesh.size > 1 for s in named)
    return tx.replace(shardings=tuple(named)) if spread else tx


def moments_like_params[T](opt_state: T, params: PyTree) -> T:
    """Under jit, shards leaves of an optimizer state like the param they belong to.

    XLA would make them whole on every device. Outside of jit they follow already.
    """
    if not any(map(is_traced, jax.tree.leaves(params))):
        return opt_state
    leaves = jax.tree_util.tree_leaves_with_path(trained_params(params))
    by_path = {path_parts(path): param for path, param in leaves}

    def leaf(path, x):
        parts = path_parts(path)
        ends = (parts[i:] for i in range(len(parts) + 1))
        param = next((by_path[end] for end in ends if end in by_path), None)
        return x if param is None else _alike(x, param)

    return jax.tree_util.tree_map_with_path(leaf, opt_state)


def settled[T](state: T, params: PyTree) -> T:
    """Puts a new state where its first step would leave it: all of it on the mesh.

    Scalars, and fields that were told no place, are replicated. Else the second step,
    whose arguments are elsewhere, is compiled again.
    """
    shardings = [_named(x) for x in jax.tree.leaves(params)]
    meshes = {s.mesh for s in shardings if s is not None}
    if len(meshes) != 1:
        return state
    everywhere = NamedSharding(meshes.pop(), PartitionSpec())

    def leaf(x):
        if is_traced(x) or not isinstance(x, jax.Array):
            return x
        if not x.committed:
            return put(x, _as_given_back(everywhere, x.ndim))
        if sharding := _named(x):
            return jax.device_put(x, _as_given_back(sharding, x.ndim))
        return x

    return jax.tree.map(leaf, state)


def _as_given_back(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """As a program writes the sharding of a result: on Explicit axes in full."""
    explicit = all(kind == AxisType.Explicit for kind in sharding.mesh.axis_types)
    return in_full(sharding, ndim) if explicit else sharding


def _alike(x: Any, param: Any) -> Any:
    """`x`, through an operation by which the sharding of `param` becomes its own."""
    if not is_castable(param) or jnp.shape(x) != param.shape or not param.shape:
        return x
    never = jnp.abs(param) < 0  # a constant would be folded before
    return jax.lax.select(never, param.astype(x.dtype), x)


def _named(x: Any) -> NamedSharding | None:
    """The sharding of an array on a mesh."""
    sharding = None if is_traced(x) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None
