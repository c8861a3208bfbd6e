"""Pytrees of parameters: paths, partitions, finite checks and selects."""

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, PyTree

from jamp._core.dtypes import FLOAT32, is_differentiable, widen

type KeyPath = tuple[Any, ...]


def path_parts(path: KeyPath) -> tuple[str, ...]:
    """The components of a key path as strings: `("Dense_0", "kernel")`."""
    return tuple(map(_key_string, path))


@functools.lru_cache(maxsize=4096)  # each layer has a kernel and a bias
def _key_string(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def path_string(path: KeyPath) -> str:
    """A key path as Flax writes it: `"Dense_0/kernel"`."""
    return "/".join(path_parts(path))


def differentiable[T](tree: T) -> T:
    """The tree that `jax.grad` and optax see: non-float leaves become None."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([x if is_differentiable(x) else None for x in leaves])


def merge[T](tree: T, rest: T) -> T:
    """Puts the leaves of `rest` where `tree`, made from it, has None."""
    if jax.tree.structure(tree) == jax.tree.structure(rest):
        return tree
    return jax.tree.map(
        lambda x, other: other if x is None else x,
        tree,
        rest,
        is_leaf=lambda x: x is None,
    )


def split_overwrite(tree: PyTree) -> tuple[Any, Any]:
    """Splits off Flax's collection whose gradients are its new values, or None."""
    if isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree:
        return tree["params"], tree[OVERWRITE_WITH_GRADIENT]
    return tree, None


def is_overwritten(parts: tuple[str, ...]) -> bool:
    """Whether a leaf is of that collection: neither a weight nor a gradient."""
    return OVERWRITE_WITH_GRADIENT in parts


def trained_params(params: PyTree) -> PyTree:
    """The params that an optimizer steps: floats outside of that collection."""
    return differentiable(split_overwrite(params)[0])


def with_trained(params: PyTree, trained: PyTree, overwrite: PyTree = None) -> Any:
    """`params` with new trained values, and those of the collection unless None."""
    whole, old = split_overwrite(params)
    whole = merge(trained, whole)
    if old is None:
        return whole
    values = old if overwrite is None else overwrite
    return mapping_like(params, {"params": whole, OVERWRITE_WITH_GRADIENT: values})


def mapping_like(like: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """Entries in a mapping of the kind of `like`, so that the structure stays."""
    if isinstance(like, defaultdict):
        return defaultdict(like.default_factory, entries)
    plain = isinstance(like, dict) and not isinstance(like, OrderedDict)
    return entries if plain else type(like)(entries)  # pyright: ignore[reportCallIssue]


def widen_tree(tree: PyTree) -> PyTree:
    """Half leaves in float32."""
    return jax.tree.map(widen, tree)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Whether no element of any float leaf is inf or NaN."""
    leaves = [x for x in jax.tree.leaves(tree) if is_differentiable(x)]
    if not leaves:
        return jnp.asarray(True)
    # On a CPU, XLA would compute the whole check again in the step of each leaf.
    barrier = lax.optimization_barrier
    return lax.platform_dependent(_all_finite(leaves), cpu=barrier, default=lambda x: x)


def unscaled_finite(
    tx: Any, grads: PyTree, divided: PyTree, scale: Array
) -> Bool[Array, ""]:
    """Whether all gradients are finite once they are divided by their scale.

    A fused optimizer, with masters or without, checks many small leaves in one kernel.
    """
    check = getattr(getattr(tx, "inner", tx), "all_finite", None)
    return all_finite(divided) if check is None else check(grads, scale)


@functools.partial(jax.jit, inline=True)  # or `jax_debug_nans` would see the NaN
def _all_finite(leaves: Sequence[Any]) -> Array:
    return lax.is_finite(
        lax.reduce_sum(jnp.stack(list(map(_zero_or_nan, leaves))), (0,))
    )


@functools.partial(jax.jit, inline=True)
def leaf_is_finite(x: Array) -> Bool[Array, ""]:
    """`all_finite` for one leaf, from the same sum, which XLA computes once."""
    return lax.is_finite(_zero_or_nan(x))


def _zero_or_nan(x: Array) -> Array:
    # `x - x` is NaN where `x` is not finite, and a sum keeps it. XLA fuses sums into
    # what makes `x`; the flags of `is_finite` it may write to memory.
    if jnp.iscomplexobj(x):
        return _zero_or_nan(lax.real(x)) + _zero_or_nan(lax.imag(x))
    total = lax.reduce_sum(lax.sub(x, x), tuple(range(x.ndim)))
    return lax.convert_element_type(total, FLOAT32)


def select[T](take_new: Bool[Array, ""] | bool, new: T, old: T) -> T:
    """`new` where `take_new`, else the bits of `old`, in the dtypes of `old`."""
    take_new = jnp.asarray(take_new)

    def leaf(n, o):
        n = n if getattr(n, "dtype", None) == o.dtype else jnp.asarray(n, o.dtype)
        return lax.select(take_new, n, o)  # `jnp.where` would trace a program for each

    return jax.tree.map(leaf, new, old)


def strong_array(x: Any) -> Any:
    """An array without weak type, with which step 2 would retrace."""
    x = x if isinstance(x, jax.Array) else jnp.array(x, copy=True)
    return x.astype(x.dtype) if getattr(x, "weak_type", False) else x


def copy_leaves(leaves: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    """Copies, which can be donated; leaves whose dtype is None are left alone."""
    return map_in_one_program(_copy, leaves, dtypes)


def map_in_one_program(
    fn: Callable[[Any, Any], Any], leaves: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """`fn(leaf, dtype)` of each leaf whose dtype is not None; the others as they are.

    A program for each of a thousand leaves takes three times as long. Each placement
    gets a program of its own, so that nothing moves.
    """
    places: dict[Any, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        if dtype is not None:
            x = leaves[i]
            stays = not is_traced(x) and getattr(x, "committed", False)
            places.setdefault(x.sharding if stays else None, []).append(i)
    results = list(leaves)
    for indices in places.values():
        of_place = [leaves[i] for i in indices]
        done = _each(fn, of_place, tuple(dtypes[i] for i in indices))
        for i, x in zip(indices, done, strict=True):
            results[i] = x
    return results


@functools.partial(jax.jit, static_argnames=("fn", "dtypes"), inline=True)
def _each(fn: Any, leaves: list[Any], dtypes: tuple[Any, ...]) -> list[Any]:
    return [fn(x, dtype) for x, dtype in zip(leaves, dtypes, strict=True)]


def _copy(x: ArrayLike, dtype: DTypeLike) -> jax.Array:
    return jnp.array(x, dtype, copy=True)


def copy_shared[T](tree: T, given: PyTree) -> T:
    """A tree of strong arrays, each of which is there once and nowhere else.

    Copies leaves that the caller also holds or that occur twice, because donating the
    state would delete them.
    """
    return copy_shared_arrays(jax.tree.map(strong_array, tree), given, tracers=True)


def copy_shared_arrays[T](tree: T, others: PyTree, tracers: bool = False) -> T:
    """Does the same for arrays alone, and for tracers only if `tracers` is set."""
    leaves, structure = jax.tree.flatten(tree)
    seen, dtypes = set(map(id, jax.tree.leaves(others))), []
    for x in leaves:
        copies = id(x) in seen and isinstance(x, jax.Array)
        dtypes.append(x.dtype if copies and (tracers or not is_traced(x)) else None)
        seen.add(id(x))
    return structure.unflatten(copy_leaves(leaves, dtypes))


def is_traced(x: object) -> bool:
    """Whether `x` has no value yet, under `jit` for example."""
    return isinstance(x, Tracer)


def check_like(given: PyTree, expected: PyTree, what: str, remedy: str) -> None:
    """Raises a ValueError that names the first leaf where two trees differ.

    `what` names the given tree, as "gradients", and `remedy` ends the message.
    """
    given_def, expected_def = jax.tree.structure(given), jax.tree.structure(expected)
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(y)] for y in (given, expected)]
    if given_def == expected_def and shapes[0] == shapes[1]:
        return
    have, want = _shapes(given), _shapes(expected)
    problem = f" have the structure {given_def}, expected {expected_def}"
    for path in want | have:
        if path not in have:
            problem = f" have no leaf at {path or 'the root'}"
        elif path not in want:
            problem = f" have an unexpected leaf at {path}"
        elif have[path] != want[path]:
            problem = f"{path} has shape {have[path]}, expected {want[path]}"
        else:
            continue
        break
    raise ValueError(f"{what}{problem}: {remedy}")


def check_kinds(given: PyTree, expected: PyTree, what: str) -> None:
    """Raises where a cast would lose more than digits, as from float to integer."""
    leaves = jax.tree_util.tree_leaves_with_path(given)
    for (path, new), old in zip(leaves, jax.tree.leaves(expected), strict=True):
        if _kind(new) > _kind(old):
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} is {jnp.result_type(new)}, and "
                f"the state stores {old.dtype}. Cast it, or initialize the state with "
                "the wider dtype."
            )


def _kind(x: Any) -> int:
    """The rank of a dtype, from bool to complex; -1 for a PRNG key."""
    dtype = jnp.result_type(x)
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    found = (i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))
    return next(found, -1)


def _shapes(tree: PyTree) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in leaves}
