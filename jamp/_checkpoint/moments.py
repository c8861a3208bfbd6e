"""Converts the moments of a checkpoint to the formats of a state."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jamp.optimizers import _codes as codes
from jamp.optimizers._codes import EightBit

_FIELDS = ("mu", "nu", "trace", "nu_max", "sum_of_squares")
_ENCODED = (codes.FIRST, codes.SECOND, codes.MOMENTUM)
_FORMATS = (jnp.dtype(jnp.float32), jnp.dtype(jnp.bfloat16), *_ENCODED)


def in_formats_of(like: PyTree, found: PyTree) -> Any:
    """Returns the optimizer state of a checkpoint with its moments in other formats.

    A moment in the format of `like` keeps its bits, and any other is rounded to
    nearest. Both trees are nested dicts of names.
    """
    if not (isinstance(found, Mapping) and isinstance(like, Mapping)):
        return found
    names = [name for name in _FIELDS if name in found and name in like]
    old, wanted = ({n: _by_path(tree[n]) for n in names} for tree in (found, like))
    for path in {path for tree in old.values() for path in tree}:
        leaf, to = (
            {n: tree[n][path] for n in names if path in tree[n]}
            for tree in (old, wanted)
        )
        if _can_convert(leaf, to):
            wide = codes.widened(jax.tree.map(jnp.asarray, leaf))
            moments = codes.narrowed(wide, to)
            for name in names:
                old[name][path] = moments[name]
    new = {}
    for name, x in found.items():
        if name in old:
            new[name] = _named(x, old[name])
        else:
            new[name] = in_formats_of(like.get(name), x)
    return new


def _named(names: PyTree, moments: Mapping[Any, Any]) -> PyTree:
    """Returns the names with other moments."""

    def leaf(path: Any, _: Any) -> Any:
        x = moments[path]
        return x._asdict() if isinstance(x, EightBit) else x

    return jax.tree.map_with_path(leaf, names, is_leaf=_is_encoded)


def _by_path(names: PyTree) -> dict[Any, Any]:
    """Returns the moments by their paths."""
    leaves = jax.tree.leaves_with_path(names, is_leaf=_is_encoded)
    return {path: EightBit(**x) if _is_encoded(x) else x for path, x in leaves}


def _is_encoded(names: Any) -> bool:
    """Returns whether a dict is an `EightBit`, and no params with its names."""
    if not isinstance(names, Mapping) or set(names) != set(EightBit._fields):
        return False
    x, block = EightBit(**names), codes.block_of(names["codes"])
    if block is None or _format(x) not in _ENCODED:
        return False
    *rest, last = x.shape
    shape = (*rest, last // block)
    return np.shape(x.scales) == shape and _format(x.scales) == jnp.float32


def _format(x: Any) -> Any:
    return getattr(x.codes if isinstance(x, EightBit) else x, "dtype", None)


def _can_convert(leaf: Mapping[str, Any], to: Mapping[str, Any]) -> bool:
    """Returns whether moments of one shape have other formats, which are known."""
    if leaf.keys() != to.keys() or [*map(_format, leaf.values())] == [
        *map(_format, to.values())
    ]:
        return False
    return all(
        _format(x) in _FORMATS and _format(y) in _FORMATS and x.shape == y.shape
        for x, y in zip(leaf.values(), to.values(), strict=True)
    )
