"""Pytrees of params and gradients: paths, partitions, finite checks and copies."""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Bool, PyTree

from jamp._core.dtypes import is_differentiable, widen
from pallas_kernels import computed_once, found_inf

type KeyPath = tuple[Any, ...]


def path_parts(path: KeyPath) -> tuple[str, ...]:
    """Converts a key path to strings: `("Dense_0", "kernel")`."""
    return tuple(map(_key_string, path))


@functools.lru_cache(maxsize=4096)  # layers share names such as "kernel"
def _key_string(key: Any) -> str:
    return jax.tree_util.keystr((key,), simple=True)


def path_string(path: KeyPath) -> str:
    """Converts a key path to a string as in Flax: `"Dense_0/kernel"`."""
    return "/".join(path_parts(path))


def by_keystr(tree: PyTree) -> dict[str, Any]:
    """Returns the leaves of a tree by their paths."""
    return {jax.tree_util.keystr(p): x for p, x in jax.tree.leaves_with_path(tree)}


def differentiable[T](tree: T) -> T:
    """Replaces the leaves that `jax.grad` does not accept with None."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten([x if is_differentiable(x) else None for x in leaves])


def is_overwritten(parts: tuple[str, ...]) -> bool:
    """Returns whether a leaf is in `_overwrite_with_gradient`."""
    return OVERWRITE_WITH_GRADIENT in parts


def mapping_like(like: Mapping[Any, Any], entries: dict[Any, Any]) -> Any:
    """Makes a mapping of the type of `like`, to keep the structure of the tree."""
    return entries if type(like) is dict else type(like)(entries)  # pyright: ignore[reportCallIssue]


def widen_tree(tree: PyTree) -> PyTree:
    """Casts half leaves to float32."""
    return jax.tree.map(widen, tree)


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """Returns whether all numbers in all float leaves are finite."""
    leaves = [x for x in jax.tree.leaves(tree) if is_differentiable(x)]
    # Otherwise, XLA on a CPU repeats this check in the step of each leaf.
    return computed_once(_all_finite(leaves))


@functools.partial(jax.jit, inline=True)  # hides the NaN from `jax_debug_nans`
def _all_finite(leaves: Sequence[Any]) -> Array:
    # A complex number is finite where both parts are.
    parts = [[x.real, x.imag] if jnp.iscomplexobj(x) else [x] for x in leaves]
    return ~found_inf([*itertools.chain(*parts)])


def select[T](take_new: Bool[Array, ""] | bool, new: T, old: T) -> T:
    """Returns `new` in the dtypes of `old` if `take_new`, and `old` otherwise."""
    take_new = jnp.asarray(take_new)
    return jax.tree.map(lambda n, o: select_leaf(take_new, n, o), new, old)


def select_leaf(take_new: Bool[Array, ""], new: Any, old: Array) -> Array:
    """Selects between two arrays like `select`."""
    if getattr(new, "dtype", None) != old.dtype:
        new = jnp.asarray(new, old.dtype)
    return lax.select(take_new, new, old)  # `jnp.where` traces a program for each leaf


def strong_array(x: Any) -> Any:
    """Makes an array without a weak type, so that JAX does not retrace step 2."""
    x = x if isinstance(x, jax.Array) else jnp.array(x, copy=True)
    return x.astype(x.dtype) if getattr(x, "weak_type", False) else x


def map_in_one_program(
    fn: Callable[[Any, Any], Any], leaves: Sequence[Any], dtypes: Sequence[Any]
) -> list[Any]:
    """Calls `fn(leaf, dtype)` for each leaf whose dtype is not None.

    One program per leaf takes three times as long for a thousand leaves. Each sharding
    has its own program, so that no array moves.
    """
    places: dict[Any, list[int]] = {}
    for i, dtype in enumerate(dtypes):
        if dtype is not None:
            x = leaves[i]
            stays = not is_traced(x) and getattr(x, "committed", False)
            places.setdefault(x.sharding if stays else None, []).append(i)
    results = list(leaves)
    for indices in places.values():
        done = _each(
            fn, [leaves[i] for i in indices], tuple(dtypes[i] for i in indices)
        )
        for i, x in zip(indices, done, strict=True):
            results[i] = x
    return results


@functools.partial(jax.jit, static_argnames=("fn", "dtypes"), inline=True)
def _each(fn: Any, leaves: list[Any], dtypes: tuple[Any, ...]) -> list[Any]:
    return [fn(x, dtype) for x, dtype in zip(leaves, dtypes, strict=True)]


# Copies the leaves that have a dtype, so that they can be donated.
copy_leaves = functools.partial(
    map_in_one_program, functools.partial(jnp.array, copy=True)
)


def copy_shared[T](tree: T, given: PyTree) -> T:
    """Makes all leaves strong arrays, and copies those that would share a buffer.

    Donating a state deletes its buffers. Leaves of `given`, and leaves that occur
    twice, must not share them.
    """
    return copy_shared_arrays(jax.tree.map(strong_array, tree), given, tracers=True)


def copy_shared_arrays[T](tree: T, others: PyTree, tracers: bool = False) -> T:
    """Copies the arrays that occur twice in `tree` or also in `others`.

    It keeps weak types, and copies tracers only if `tracers` is set.
    """
    leaves, structure = jax.tree.flatten(tree)
    seen, dtypes = set(map(id, jax.tree.leaves(others))), []
    for x in leaves:
        copies = id(x) in seen and isinstance(x, jax.Array)
        dtypes.append(x.dtype if copies and (tracers or not is_traced(x)) else None)
        seen.add(id(x))
    return structure.unflatten(copy_leaves(leaves, dtypes))


def is_traced(x: object) -> bool:
    """Returns whether `x` has no value yet, for example under `jit`."""
    return isinstance(x, Tracer)


def check_like(given: PyTree, expected: PyTree, what: str, remedy: str) -> None:
    """Raises a ValueError that names a leaf where two trees differ.

    The message begins with `what`, such as "gradients", and ends with `remedy`.
    """
    given_def, expected_def = jax.tree.structure(given), jax.tree.structure(expected)
    shapes = [[jnp.shape(x) for x in jax.tree.leaves(y)] for y in (given, expected)]
    if given_def == expected_def and shapes[0] == shapes[1]:
        return
    have, want = (
        {path: jnp.shape(x) for path, x in by_keystr(tree).items()}
        for tree in (given, expected)
    )
    both = [path for path in want if path in have and have[path] != want[path]]
    problems = (
        [f" have no leaf at {path or 'the root'}" for path in want if path not in have]
        + [f" have an unexpected leaf at {path}" for path in have if path not in want]
        + [f"{path} has shape {have[path]}, expected {want[path]}" for path in both]
        + [f" have the structure {given_def}, expected {expected_def}"]
    )
    raise ValueError(f"{what}{problems[0]}: {remedy}")


def check_kinds(given: PyTree, expected: PyTree, what: str) -> None:
    """Raises where a cast would lose more than digits, such as float to integer."""
    leaves = jax.tree_util.tree_leaves_with_path(given)
    for (path, new), old in zip(leaves, jax.tree.leaves(expected), strict=True):
        if _kind(new) > _kind(old):
            raise ValueError(
                f"{what}{jax.tree_util.keystr(path)} is {jnp.result_type(new)}, and "
                f"the state stores {old.dtype}. Cast it, or initialize the state with "
                "the wider dtype."
            )


def _kind(x: Any) -> int:
    """Ranks a dtype from bool to complex; a PRNG key is -1."""
    dtype = jnp.result_type(x)
    kinds = (np.bool_, np.integer, np.floating, np.complexfloating)
    found = (i for i, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind))
    return next(found, -1)
