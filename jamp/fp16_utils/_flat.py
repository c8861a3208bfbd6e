"""Trees as one vector, and back."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PyTree


@dataclasses.dataclass(frozen=True)
class FlatSpec:
    """How a tree is stored in a vector: by leaf, in the order of `jax.tree.leaves`.

    Attributes:
        structure: of the tree.
        shapes: of its leaves.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, tree: PyTree) -> "FlatSpec":
        """The spec of a tree of arrays."""
        leaves, structure = jax.tree.flatten(tree)
        return cls(structure, tuple(x.shape for x in leaves))

    def flatten(self, tree: PyTree) -> Float[Array, " n"]:
        """The vector of a tree."""
        leaves = self.structure.flatten_up_to(tree)
        return jnp.concatenate(list(map(jnp.ravel, leaves))) if leaves else jnp.zeros(0)

    def unflatten(self, flat: Float[Array, " n"]) -> PyTree:
        """The tree of a vector."""
        leaves, begin = [], 0
        for shape in self.shapes:
            end = begin + math.prod(shape)
            leaves.append(jax.lax.slice(flat, (begin,), (end,)).reshape(shape))
            begin = end
        return self.structure.unflatten(leaves)
