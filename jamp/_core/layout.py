"""The layout of the params of one group: which leaves are trained, and where they are.

    params                          kind                  gradients
    {"w": float, "n": int}          fixed, trained        {"w": float, "n": None}
    {"params": {"w": float},        trained               {"params": {"w": float},
     OVERWRITE: {"s": float}}       overwritten            OVERWRITE: {"s": float}}

Below it, code works on lists: all leaves of a group, or its trained ones. `groups`
knows the containers of several groups.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT
from jaxtyping import PyTree

from jamp._core.dtypes import is_differentiable
from jamp._core.tree import check_like, differentiable

type Structure = Any  # a `jax.tree_util.PyTreeDef`, which pyright takes for a variable
# An optimizer steps a trained leaf. A fixed one has no gradient. The gradient of an
# overwritten one, in Flax's `_overwrite_with_gradient`, is its new value.
type Kind = Literal["trained", "fixed", "overwritten"]


@dataclasses.dataclass(frozen=True)
class Layout:
    """The kind of each leaf of a params tree. It is static, and made once.

    Attributes:
        structure: the structure of the params.
        kind: the kind of each leaf.
        trained: the structure of the trained params, which an optimizer gets. It has
            None for fixed leaves.
    """

    structure: Structure
    kind: tuple[Kind, ...]
    trained: Structure

    @classmethod
    def of(cls, params: PyTree) -> tuple["Layout", list[Any]]:
        """Returns the layout of params, and all their leaves."""
        leaves, structure = jax.tree.flatten(params)
        return _layout(structure, tuple(map(is_differentiable, leaves))), leaves

    def pick(self, leaves: Sequence[Any], kind: Kind = "trained") -> list[Any]:
        """Returns the leaves of one kind, from all leaves."""
        return [x for x, k in zip(leaves, self.kind, strict=True) if k == kind]

    def fill(
        self, leaves: Sequence[Any], new: Iterable[Any], kind: Kind = "trained"
    ) -> list[Any]:
        """Returns all leaves, with new ones of one kind."""
        each = iter(new)
        pairs = zip(leaves, self.kind, strict=True)
        return [next(each) if k == kind else x for x, k in pairs]

    def without_fixed(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns all leaves, with None for fixed ones, as in gradients."""
        return self.fill(leaves, itertools.repeat(None), "fixed")

    def read_gradients(
        self, tree: PyTree, leaves: Sequence[Any], what: str, remedy: str
    ) -> tuple[list[Any], list[Any]]:
        """Returns the gradients of trained leaves, and new values of overwritten ones.

        Raises:
            ValueError: the tree differs from the params, whose `leaves` are given, in
                structure or shape.
        """
        try:
            given = self.structure.flatten_up_to(tree)
            fits = [
                (x is None or hasattr(x, "dtype"))
                if kind == "fixed"
                else (is_differentiable(x) and jnp.shape(x) == jnp.shape(y))
                for x, y, kind in zip(given, leaves, self.kind, strict=True)
            ]
        except ValueError:
            given, fits = [], [False]
        if not all(fits):
            expected = self.structure.unflatten(self.without_fixed(leaves))
            check_like(differentiable(tree), expected, what, remedy)
        return self.pick(given), self.pick(given, "overwritten")


@functools.lru_cache(maxsize=256)
def _layout(structure: Structure, are_floats: tuple[bool, ...]) -> Layout:
    places = structure.unflatten(range(len(are_floats)))
    whole, kinds = places, ["trained" if x else "fixed" for x in are_floats]
    if isinstance(places, Mapping) and OVERWRITE_WITH_GRADIENT in places:
        whole, trained = places["params"], {*jax.tree.leaves(places["params"])}
        for i in jax.tree.leaves(places[OVERWRITE_WITH_GRADIENT]):
            kinds[i] = "overwritten" if are_floats[i] else "fixed"
        kinds = [
            "fixed" if k == "trained" and i not in trained else k
            for i, k in enumerate(kinds)
        ]
    trained = jax.tree.map(lambda i: None if kinds[i] == "fixed" else i, whole)
    return Layout(structure, tuple(kinds), jax.tree.structure(trained))  # pyright: ignore[reportArgumentType]
