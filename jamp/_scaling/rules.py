"""Loss scaling: a frozen rule, and the state that it carries through the steps.

After apex/amp/scaler.py, with the hysteresis of apex's update_scale_hysteresis kernel.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PyTree

from jamp._core.dtypes import FLOAT32, is_differentiable, widen
from jamp._core.groups import HasGroups

# Between these a scale and its reciprocal are normal numbers of float32. A scale of 0
# never recovers (apex issues 834 and 930); a subnormal reciprocal is flushed to zero.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = 2.0**126
FLOAT32_MAX = float(jnp.finfo(jnp.float32).max)

_ZERO, _ONE = np.int32(0), np.int32(1)


class LossScaleState(NamedTuple):
    """What a loss scale remembers between steps.

    Attributes:
        scale: the factor on the loss, shape (), float32.
        unskipped: clean steps since the scale last moved, shape (), int32.
        hysteresis: non-finite steps still tolerated, shape (), int32.
        consecutive_skips: skipped steps in a row, shape (), int32.
    """

    scale: Float[Array, ""]
    unskipped: Int[Array, ""]
    hysteresis: Int[Array, ""]
    consecutive_skips: Int[Array, ""]


class HasLossScales(HasGroups, Protocol):
    """What this room needs of an `AmpState`."""

    @property
    def loss_scales(self) -> Any: ...
    @property
    def loss_scale_rules(self) -> Any: ...
    @property
    def properties(self) -> Any: ...


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """Multiplies the scale by `factor` after `window` clean steps, divides on overflow.

    With `finite` telling whether all gradients of the step were finite:

        finite:      unskipped += 1;  at unskipped == window:
                     scale = min(scale * factor, max_scale), unskipped = 0
        not finite:  unskipped = 0;  on the hysteresis-th non-finite step in a row, and
                     each one after it: scale = max(scale / factor, min_scale)

    Attributes:
        init_scale: the first scale; capped at `max_scale`, as in apex.
        factor: greater than 1 (apex accepts one and ignores it).
        window: clean steps until the scale grows; Flax grows one step later.
        min_scale: floor; None or 0 is float32's smallest normal, so never 0.
        max_scale: ceiling; None and more than 2**126 are 2**126, so never inf.
        hysteresis: non-finite steps in a row until the scale falls.

    Raises:
        ValueError: an attribute is out of its range.

    >>> rule = DynamicLossScale(init_scale=8.0, window=2)
    >>> state = rule.init()
    >>> [float((state := rule.update(state, ok)).scale) for ok in (True, True, False)]
    [8.0, 16.0, 8.0]
    """

    checks: ClassVar[bool] = True  # gradients are looked at, and steps skipped
    moves: ClassVar[bool] = True  # the scale can change

    init_scale: float = 2.0**16
    factor: float = 2.0
    window: int = 2000
    min_scale: float | None = None
    max_scale: float | None = 2.0**24
    hysteresis: int = 1

    def __post_init__(self) -> None:
        for name in ("init_scale", "factor", "min_scale", "max_scale"):
            value = getattr(self, name)
            if value is not None:
                object.__setattr__(self, name, float(value))  # hashable, not an array
        for name in ("window", "hysteresis"):
            value = getattr(self, name)
            if isinstance(value, bool) or value != int(value) or value < 1:
                raise ValueError(
                    f"`{name}` must be an integer of at least 1, got {value}."
                )
            object.__setattr__(self, name, int(value))
        if not 1 < self.factor < float("inf"):
            raise ValueError(f"`factor` must be greater than 1, got {self.factor}.")
        check_scale("init_scale", self.init_scale, capped=True)
        if self.min_scale:
            check_scale("min_scale", self.min_scale)
        if self.max_scale is not None:
            check_scale("max_scale", self.max_scale, capped=True)
        if not self.floor <= self.ceiling:
            raise ValueError(
                f"`min_scale` must not exceed `max_scale`, got {self.min_scale} and "
                f"{self.max_scale}."
            )
        if self.init_scale < self.floor:
            raise ValueError(
                f"`init_scale` must be at least `min_scale`, got {self.init_scale} and "
                f"{self.min_scale}."
            )

    @property
    def floor(self) -> float:
        """The scale never falls below this."""
        return max(self.min_scale or SMALLEST_SCALE, SMALLEST_SCALE)

    @property
    def ceiling(self) -> float:
        """The scale never grows above this."""
        return min(self.max_scale or LARGEST_SCALE, LARGEST_SCALE)

    def init(self) -> LossScaleState:
        """The state before the first step."""
        return _state(min(self.init_scale, self.ceiling), self.hysteresis)

    def update(self, state: LossScaleState, finite: Bool[Array, ""]) -> LossScaleState:
        """The state after a step whose gradients were all finite, or not."""
        # Of `lax`: each function of `jnp` is traced as a program of its own.
        finite, scale = jnp.asarray(finite), jnp.asarray(state.scale, FLOAT32)
        left = lax.max(lax.sub(state.hysteresis, _ONE), _ZERO)
        left = lax.select(finite, np.int32(self.hysteresis), left)
        unskipped = lax.select(finite, lax.add(state.unskipped, _ONE), _ZERO)
        # At least, not equal: a checkpoint may come from a run with a longer window.
        grows = lax.ge(unskipped, np.int32(self.window))
        falls = lax.bitwise_and(lax.bitwise_not(finite), lax.eq(left, _ZERO))
        grown = lax.min(
            lax.mul(scale, np.float32(self.factor)), np.float32(self.ceiling)
        )
        fallen = lax.clamp(
            np.float32(self.floor),
            lax.div(scale, np.float32(self.factor)),
            np.float32(self.ceiling),
        )
        return LossScaleState(
            scale=lax.select(grows, grown, lax.select(falls, fallen, scale)),
            unskipped=lax.select(grows, _ZERO, unskipped),
            hysteresis=left,
            consecutive_skips=count_skips(state, finite),
        )

    def current(self, state: LossScaleState) -> Float[Array, ""]:
        """The scale of this step."""
        return state.scale

    def scale_loss(self, loss: Array, state: LossScaleState) -> Float[Array, ""]:
        """The loss in float32 times the scale."""
        return jnp.asarray(loss).astype(jnp.float32) * self.current(state)

    def unscale(self, tree: PyTree, state: LossScaleState) -> PyTree:
        """Float leaves in float32, divided by the scale; other leaves as they are."""
        return unscale_tree(tree, self.current(state))


@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A scale that never moves.

    Attributes:
        scale: the factor on the loss, positive and finite.
        check: whether non-finite gradients skip the step. As in apex they do not:
            they reach the optimizer.

    Raises:
        ValueError: `scale` is not positive and finite.

    >>> rule = StaticLossScale(128.0)
    >>> float(rule.scale_loss(jnp.float16(2.0), rule.init()))
    256.0
    """

    moves: ClassVar[bool] = False  # the scale cannot change

    scale: float
    check: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.scale, bool):
            raise ValueError(f"`scale` must be a number, got {self.scale}.")
        object.__setattr__(self, "scale", float(self.scale))
        check_scale("scale", self.scale)

    @property
    def checks(self) -> bool:
        """Whether gradients are checked, and steps skipped."""
        return self.check

    @property
    def floor(self) -> float:
        """The scale never falls below this."""
        return self.scale

    def init(self) -> LossScaleState:
        """The state before the first step."""
        return _state(self.scale, 1)

    def update(self, state: LossScaleState, finite: Bool[Array, ""]) -> LossScaleState:
        """Counts the step; the scale stays."""
        finite = jnp.asarray(finite)
        counted = optax.safe_increment(state.unskipped)
        if not self.check:
            return state._replace(unskipped=counted)
        return state._replace(
            unskipped=lax.select(finite, counted, _ZERO),
            consecutive_skips=count_skips(state, finite),
        )

    def current(self, state: LossScaleState) -> Float[Array, ""]:
        """The scale, as a constant: compiled with scale 1, products fold away."""
        del state
        return jnp.asarray(self.scale, jnp.float32)

    def scale_loss(self, loss: Array, state: LossScaleState) -> Float[Array, ""]:
        """The loss in float32 times the scale."""
        return jnp.asarray(loss).astype(jnp.float32) * self.current(state)

    def unscale(self, tree: PyTree, state: LossScaleState) -> PyTree:
        """Float leaves in float32, divided by the scale; other leaves as they are."""
        return unscale_tree(tree, self.current(state))


type LossScaleRule = DynamicLossScale | StaticLossScale


def scales_in_use(
    rules: Sequence[LossScaleRule], states: Sequence[LossScaleState]
) -> Any:
    """What losses are multiplied by: the scale, or of several losses a tuple."""
    pairs = zip(rules, states, strict=True)
    scales = tuple(_like(rule.current(s), s.scale) for rule, s in pairs)
    return scales[0] if len(scales) == 1 else scales


def _like(scale: Any, of_state: Any) -> Any:
    """A scale with the shape, and in the place, of that in a state."""
    if scale is of_state or not isinstance(of_state, jax.Array):
        return of_state
    return jnp.full_like(of_state, scale)


def loss_scale_rule(
    loss_scale: Any, min_loss_scale: float | None, max_loss_scale: float | None
) -> LossScaleRule:
    """The rule for `initialize`'s arguments: "dynamic", a number, or a rule itself."""
    if loss_scale == "dynamic":
        start = max(DynamicLossScale.init_scale, min_loss_scale or 0.0)
        return DynamicLossScale(
            init_scale=start, min_scale=min_loss_scale, max_scale=max_loss_scale
        )
    if isinstance(loss_scale, float):
        return StaticLossScale(loss_scale)
    return loss_scale


def unscale_tree(tree: PyTree, scale: Float[Array, ""] | float) -> PyTree:
    """Multiplies float leaves, in float32, by `1 / scale`, as apex's kernel does."""
    inverse = 1.0 / jnp.asarray(scale, jnp.float32)

    def leaf(x):
        if not is_differentiable(x):
            return x
        x = widen(jnp.asarray(x))
        return lax.mul(x, lax.convert_element_type(inverse, x.dtype))

    return jax.tree.map(leaf, tree)


def _state(scale: float, hysteresis: int) -> LossScaleState:
    # One array per field: a donated buffer must not occur twice.
    return LossScaleState(
        scale=jnp.asarray(scale, jnp.float32),
        unskipped=jnp.asarray(0, jnp.int32),
        hysteresis=jnp.asarray(hysteresis, jnp.int32),
        consecutive_skips=jnp.asarray(0, jnp.int32),
    )


def count_skips(state: LossScaleState, finite: Bool[Array, ""]) -> Int[Array, ""]:
    """`consecutive_skips` after one more step."""
    return lax.select(finite, _ZERO, optax.safe_increment(state.consecutive_skips))


def check_scale(name: str, scale: float, capped: bool = False) -> None:
    """Raises unless float32 holds a scale and, if nothing caps it, its reciprocal."""
    most, limit = LARGEST_SCALE, "2**126, where float32 holds it and its reciprocal"
    if capped:
        most, limit = FLOAT32_MAX, "3.4e38, float32's largest"
    if not SMALLEST_SCALE <= scale <= most:
        raise ValueError(
            f"`{name}` must be a number between 2**-126 and {limit}, got {scale}."
        )
