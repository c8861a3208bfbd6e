"""The layout of the params of one group: which leaves are trained, and where they go.

    params                    kind           trained          gradients
    {"w": float, "n": int}    trained fixed  {"w", None}      {"w", None}
    {"params": {"w": float},                 {"w"}            {"params": {"w"},
     OVERWRITE: {"s": float}} overwritten                      OVERWRITE: {"s"}}

Everything else works on lists of one group's trained leaves. `groups` knows the
containers that hold several groups.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
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
        trained: the structure of the trained params, with None for fixed leaves.
        grads: the structure of gradients, with None for fixed leaves.
    """

    structure: Structure
    kind: tuple[Kind, ...]
    trained: Structure
    grads: Structure

    @classmethod
    def of(cls, params: PyTree) -> tuple["Layout", list[Any]]:
        """Returns the layout of params, and all their leaves."""
        leaves, structure = jax.tree.flatten(params)
        return _layout(structure, tuple(map(is_differentiable, leaves))), leaves

    def floats(self, leaves: Sequence[Any]) -> list[Any]:
        """Returns the leaves that have a gradient, from all leaves."""
        return [x for x, k in zip(leaves, self.kind, strict=True) if k != "fixed"]

    def fill(self, leaves: Sequence[Any], floats: Sequence[Any]) -> list[Any]:
        """Returns all leaves with other floats; fixed ones are those of `leaves`."""
        new, pairs = iter(floats), zip(leaves, self.kind, strict=True)
        return [x if kind == "fixed" else next(new) for x, kind in pairs]

    def with_floats(self, leaves: Sequence[Any], floats: Sequence[Any]) -> PyTree:
        """Returns params with other floats."""
        return self.structure.unflatten(self.fill(leaves, floats))

    def split(self, floats: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Splits floats into trained and overwritten ones."""
        if "overwritten" not in self.kind:
            return list(floats), []
        pairs = list(zip(floats, self._float_kinds, strict=True))
        trained = [x for x, kind in pairs if kind == "trained"]
        return trained, [x for x, kind in pairs if kind == "overwritten"]

    def join(self, trained: Sequence[Any], overwritten: Sequence[Any]) -> list[Any]:
        """Returns the floats: the inverse of `split`."""
        if "overwritten" not in self.kind:
            return list(trained)
        new = {"trained": iter(trained), "overwritten": iter(overwritten)}
        return [next(new[kind]) for kind in self._float_kinds]

    @property
    def _float_kinds(self) -> list[Kind]:
        return [kind for kind in self.kind if kind != "fixed"]

    def read_gradients(
        self, tree: PyTree, leaves: Sequence[Any], what: str, remedy: str
    ) -> list[Any]:
        """Returns the leaves of a tree of gradients, one for each float.

        Raises:
            ValueError: the tree differs from the params, whose `leaves` are given, in
                structure or shape.
        """
        given, structure = jax.tree.flatten(tree)
        if structure == self.structure:  # fixed leaves may have gradients of float0
            given, structure = self.floats(given), self.grads
        wanted = self.floats(leaves)
        if structure == self.grads and all(map(is_differentiable, given)):
            pairs = zip(given, wanted, strict=True)
            if all([jnp.shape(x) == jnp.shape(y) for x, y in pairs]):
                return given
        tree = differentiable(tree)
        check_like(tree, self.grads.unflatten(wanted), what, remedy)
        return jax.tree.leaves(tree)


@functools.lru_cache(maxsize=256)
def _layout(structure: Structure, are_floats: tuple[bool, ...]) -> Layout:
    tree = structure.unflatten(range(len(are_floats)))
    fixed = {i for i, is_float in enumerate(are_floats) if not is_float}
    overwritten: set[int] = set()
    whole = tree
    if isinstance(tree, Mapping) and OVERWRITE_WITH_GRADIENT in tree:
        whole = tree["params"]
        overwritten = {*jax.tree.leaves(tree[OVERWRITE_WITH_GRADIENT])} - fixed
        fixed |= {*range(len(are_floats))} - overwritten - {*jax.tree.leaves(whole)}
    kinds: list[Kind] = [
        "fixed" if i in fixed else "overwritten" if i in overwritten else "trained"
        for i in range(len(are_floats))
    ]
    without = lambda tree: jax.tree.map(lambda i: None if i in fixed else i, tree)  # noqa: E731
    trained, grads = (jax.tree.structure(without(x)) for x in (whole, tree))
    return Layout(structure, tuple(kinds), trained, grads)
