"""`Transformation`: an optax transformation that is equal to others by its rule."""

from collections.abc import Callable
from typing import Any, Self

import optax
from jaxtyping import Array, Bool


class Transformation(optax.GradientTransformationExtraArgs):
    """optax's `init` and `update`, as methods of a frozen dataclass, the rule.

    Transformations with equal rules are equal, so that JAX does not compile again.
    """

    rule: Any  # the frozen dataclass
    # The kernel of `FusedTransformation.all_finite`, if there is one.
    all_finite: Callable[..., Bool[Array, ""]] | None = None

    @classmethod
    def from_rule(cls, rule: Any) -> Self:
        """Returns the transformation of a rule."""
        tx = cls(rule.init, rule.update)
        tx.rule = rule
        return tx

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.rule == self.rule

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.rule)
