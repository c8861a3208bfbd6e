"""An optax transformation made of a frozen object, and equal to others by it."""

from typing import Any, Self

import optax


class Transformation(optax.GradientTransformationExtraArgs):
    """optax's pair, as the methods `init` and `update` of one frozen dataclass.

    Two of equal rules are equal and hash alike, which closures never do: a state that
    holds one as a static field does not compile its step again.
    """

    @classmethod
    def from_rule(cls, rule: Any) -> Self:
        """The transformation of a rule."""
        return cls(rule.init, rule.update)

    @property
    def rule(self) -> Any:
        """The frozen dataclass whose methods these are."""
        return self.init.__self__  # pyright: ignore[reportAttributeAccessIssue]

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.rule == self.rule

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(self.rule)
