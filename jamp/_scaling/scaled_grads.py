"""`ScaledGrads`: raw gradients of a scaled loss, with their scale and a finite flag."""

from collections.abc import Callable
from typing import Any, NoReturn, Self

import flax.struct
import jax
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core.dtypes import widen
from jamp._core.show import counted, shown
from jamp._scaling.rules import LossScaleState, lower_of, unscale_tree

NOT_A_TREE = (
    "ScaledGrads are not a tree of gradients: they are scaled, and may be inf. Pass "
    "them whole to `AmpState.apply_gradients(grads=grads)`, or take float32 gradients "
    "out with `tree, finite = grads.unscale()`."
)


@flax.struct.dataclass
class ScaledGrads:
    """Gradients of a scaled loss, with what it takes to unscale and check them.

    `a + b` sums micro-batches of one loss in float32 (begin a scan with
    `jamp.zero_grads`); `* k` and `/ k` act on the tree. To clip by hand, keep the flag:

        tree, finite = grads.unscale()
        grads = grads.replace(tree=clip(tree), scale=jnp.float32(1))

    Attributes:
        tree: the raw scaled gradients, in the dtypes of the params. None where a param
            is no float.
        scale: what the loss was multiplied by, shape (), float32.
        finite: whether all raw gradients are finite, shape (), bool; always True where
            the rule does not check.
        loss_id: which loss scale it was.
        groups: the `wrt` that it was taken for; None for all groups.
        scale_state: with `redo_on_overflow`, what the loss scale has come to; the next
            step goes on from there.
        overwrite: by group, new values of Flax's `_overwrite_with_gradient`, which the
            gradients of fp8 params come with; `tree` is then like `params["params"]`.
    """

    tree: Any
    scale: Float[Array, ""]
    finite: Bool[Array, ""]
    loss_id: int = flax.struct.field(pytree_node=False, default=0)
    groups: Any = flax.struct.field(pytree_node=False, default=None)
    scale_state: LossScaleState | None = None
    overwrite: Any = flax.struct.field(default_factory=dict)

    def __repr__(self) -> str:
        """One line: which loss, its scale, whether finite, how many; not the arrays."""
        groups = "" if self.groups is None else f", groups {self.groups!r}"
        return (
            f"ScaledGrads(loss {self.loss_id}{groups}, scale {shown(self.scale)}, "
            f"finite {shown(self.finite)}: {counted(self.tree)})"
        )

    def unscale(self) -> tuple[PyTree, Bool[Array, ""]]:
        """Gradients in float32 divided by the scale, and whether they are finite."""
        return unscale_tree(self.tree, self.scale), self.finite

    def __add__(self, other: Self) -> Self:
        """Sums two gradients of one loss, in float32, at the scale of the first.

        Raises:
            TypeError: `other` is no ScaledGrads.
            ValueError: it belongs to another loss or other groups.
        """
        if not isinstance(other, ScaledGrads):
            raise TypeError(
                f"ScaledGrads add to ScaledGrads, got {type(other).__name__}. Begin a "
                "sum with `jamp.zero_grads(state)`."
            )
        if (self.loss_id, self.groups) != (other.loss_id, other.groups):
            raise ValueError(
                "ScaledGrads of different losses or groups do not add: loss_id "
                f"{self.loss_id} and {other.loss_id}, groups {self.groups} and "
                f"{other.groups}. Pass both: `apply_gradients(grads=(a, b))`."
            )
        # One, unless the scale moved between the two.
        ratio = self.scale / other.scale
        total = jax.tree.map(
            lambda a, b: a + b * ratio.astype(b.dtype),
            widen_tree(self.tree),
            widen_tree(other.tree),
        )
        return self.replace(  # pyright: ignore[reportAttributeAccessIssue]
            tree=total,
            overwrite=other.overwrite,  # later values replace earlier ones
            finite=self.finite & other.finite,
            scale_state=_lower(self.scale_state, other.scale_state),
        )

    def __mul__(self, factor: Any) -> Self:
        """Multiplies the tree, in float32; the scale stays."""
        _check_factor(factor)
        return self._map(lambda x: x * factor)

    def __truediv__(self, divisor: Any) -> Self:
        """Divides the tree, in float32; the scale stays."""
        _check_factor(divisor)
        return self._map(lambda x: x / divisor)

    __rmul__ = __mul__

    def _map(self, fn: Callable[[Array], Array]) -> Self:
        tree = jax.tree.map(fn, widen_tree(self.tree))
        return self.replace(tree=tree)  # pyright: ignore[reportAttributeAccessIssue]

    def _refuse(self, *_: object) -> NoReturn:
        raise TypeError(NOT_A_TREE)

    # Flax's TrainState asks `"..." in grads`; people index. Both would go on silently.
    __getitem__ = __contains__ = __iter__ = __len__ = _refuse


def _lower(a: LossScaleState | None, b: LossScaleState | None) -> LossScaleState | None:
    return b if a is None else lower_of(a, b)


def _check_factor(factor: Any) -> None:
    if not (isinstance(factor, int | float) or getattr(factor, "shape", None) == ()):
        raise TypeError(
            f"ScaledGrads take a scalar factor, got {type(factor).__name__}."
        )


def widen_tree(tree: PyTree) -> PyTree:
    """Half leaves in float32."""
    return jax.tree.map(widen, tree)
