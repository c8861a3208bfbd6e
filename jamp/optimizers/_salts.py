"""Numbers that make the rounding bits of each leaf its own."""

import zlib
from collections.abc import Hashable

import jax
from jaxtyping import PyTree

from jamp._core.tree import path_parts


def leaf_salts(tree: PyTree, group: Hashable = None) -> list[int]:
    """A 32-bit number per leaf, from its path and the key of its group.

    A checksum of the text, because Python's `hash` differs between processes and a
    resumed run must round alike.
    """
    prefix = "" if group is None else f"{group!r}:"
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    names = [prefix + "/".join(path_parts(path)) for path, _ in leaves]
    return [zlib.crc32(name.encode()) for name in names]
