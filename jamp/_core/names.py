"""Converts trees to nested dicts of names for checkpoints, and back."""

import itertools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jamp._core.devices import place_like
from jamp._core.show import kind, short_repr
from jamp._core.tree import KeyPath, path_parts, path_string


def to_names(tree: PyTree) -> Any:
    """Converts a tree to dicts with the names of `flax.serialization.to_state_dict`.

    Entries of a sequence are named "0", "1" and so on. PRNG keys become their data.
    """
    if tree is None:
        return None
    children = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda x: x is not tree
    )[0]
    if len(children) == 1 and children[0][0] == ():
        return jax.random.key_data(tree) if _is_key(tree) else tree
    return {path_parts(path)[0]: to_names(child) for path, child in children}


def from_names(like: PyTree, names: PyTree) -> Any:
    """Returns a tree like `like` with the values of `names`, which has its names.

    The arrays keep their dtypes, and get the shardings of the leaves of `like`.
    """

    def leaf(path: KeyPath, x: Any) -> Any:
        value = names
        for part in path_parts(path):
            value = value[part]
        if _is_key(x):
            impl = jax.random.key_impl(jax.lax.full((), 0, x.dtype))
            value = jax.random.wrap_key_data(jnp.asarray(value), impl=impl)
        return place_like(value, x)

    return jax.tree_util.tree_map_with_path(leaf, like)


def check_same(given: Any, expected: Any, what: str, remedy: str) -> None:
    """Raises an error that lists where two trees of names differ.

    The message begins with `what`, such as "The checkpoint", and ends with `remedy`.
    """
    if not isinstance(given, Mapping):
        raise TypeError(f"{what} must be a mapping, got {short_repr(given)}.")
    have, want = _leaves(given), _leaves(expected)
    kinds = (
        [d for p in want if p in have for d in _differ(p, have[p], want[p])],
        [f"{path} is missing" for path in want if path not in have],
        [f"{path} is unexpected" for path in have if path not in want],
    )
    # With another optimizer, every name is missing or unexpected: show some of both.
    mixed = filter(None, itertools.chain.from_iterable(itertools.zip_longest(*kinds)))
    problems = sorted(mixed, key=lambda d: not d.startswith("params"))
    if problems:
        shown = "; ".join(problems[:5]) + ("; ..." if len(problems) > 5 else "")
        raise ValueError(
            f"{what} differs from the state in {len(problems)} place(s): {shown}. "
            f"{remedy}"
        )


def _differ(path: str, x: Any, like: Any) -> list[str]:
    if isinstance(x, list | tuple):  # a ragged list has no shape
        return [f"{path} is {kind(x)}, expected {like.dtype}{like.shape}"]
    if np.shape(x) != like.shape:
        return [f"{path} has shape {np.shape(x)}, expected {like.shape}"]
    dtype = getattr(x, "dtype", None)
    if dtype is None:  # a Python number fits every dtype of the same kind
        is_number = isinstance(x, bool | int | float)
        fits = is_number and np.can_cast(type(x), like.dtype, "same_kind")
        return [] if fits else [f"{path} is {x!r}, expected {like.dtype}"]
    if dtype != like.dtype:
        return [f"{path} has dtype {dtype}, expected {like.dtype}"]
    return []


def _leaves(names: PyTree) -> dict[str, Any]:
    is_leaf = lambda x: not isinstance(x, Mapping)  # noqa: E731
    leaves = jax.tree_util.tree_leaves_with_path(names, is_leaf=is_leaf)
    return {path_string(path): x for path, x in leaves if x is not None}


def _is_key(x: Any) -> bool:
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
