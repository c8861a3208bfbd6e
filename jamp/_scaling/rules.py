"""Rules of loss scaling, and the state that a rule updates after each step.

Based on apex/amp/scaler.py and on apex's update_scale_hysteresis kernel.
"""

import dataclasses
import math
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
from jamp._core.numbers import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    check_count,
    check_scale,
    number,
)

_ZERO, _ONE = np.int32(0), np.int32(1)


class LossScaleState(NamedTuple):
    """The state of a loss scale between steps.

    Attributes:
        scale: the factor of the loss, shape (), float32.
        unskipped: finite steps since the scale last grew or a step was skipped, shape
            (), int32.
        hysteresis: non-finite steps until the scale falls, counted by the rule of the
            last step, shape (), int32.
        consecutive_skips: skipped steps in a row, shape (), int32.
    """

    scale: Float[Array, ""]
    unskipped: Int[Array, ""]
    hysteresis: Int[Array, ""]
    consecutive_skips: Int[Array, ""]


class HasLossScales(HasGroups, Protocol):
    """The fields of an `AmpState` that this package reads."""

    @property
    def loss_scales(self) -> Any: ...
    @property
    def loss_scale_rules(self) -> Any: ...
    @property
    def properties(self) -> Any: ...


def check_state(state: object, call: str) -> None:
    """Raises unless `state` is an AmpState; `call` is the code of the caller."""
    if hasattr(state, "loss_scale_rules") and hasattr(state, "apply_gradients"):
        return
    remedy = ""
    if any(cls.__module__.startswith("flax.nnx") for cls in type(state).__mro__):
        remedy = (
            " For NNX, write `jamp.nnx.scaled_grad(loss_fn)(model, optimizer, ...)`; "
            "`optimizer.amp_state(model)` and `jamp.nnx.pure` return states for other "
            "functions."
        )
    raise TypeError(
        f"{call} takes the AmpState that `jamp.initialize` returned, got "
        f"{type(state).__name__}.{remedy}"
    )


def check_single(state: Any, call: str) -> None:
    """Raises unless `state` is one AmpState, neither replicated nor an ensemble."""
    check_state(state, call)
    shape = jnp.shape(state.step)
    if shape:
        raise ValueError(
            f"{call} takes one state. `state.step` has shape {shape}, so the state is "
            "replicated or an ensemble. Call the function inside `pmap` or `vmap`, or "
            "pass `flax.jax_utils.unreplicate(state)` or, for member i, "
            "`jax.tree.map(lambda x: x[i], state)`."
        )


class _Rule:
    """The methods that both rules share."""

    def scale_loss(self, loss: Array, state: LossScaleState) -> Float[Array, ""]:
        """Multiplies the loss by the scale in float32."""
        return jnp.asarray(loss).astype(jnp.float32) * current_scale(self, state)

    def unscale(self, tree: PyTree, state: LossScaleState) -> PyTree:
        """Divides float leaves by the scale in float32, and keeps other leaves."""
        return unscale_tree(tree, current_scale(self, state))


@dataclasses.dataclass(frozen=True)
class DynamicLossScale(_Rule):
    """Multiplies the scale after `window` finite steps, and divides it on overflow.

    A step is finite if its loss and all its gradients are:

        finite:      unskipped += 1;  at unskipped == window:
                     scale = min(scale * factor, max_scale), unskipped = 0
        not finite:  unskipped = 0;  on the hysteresis-th non-finite step in a row, and
                     each one after it: scale = max(scale / factor, min_scale)

    Attributes:
        init_scale: the first scale; capped at `max_scale`, as in apex.
        factor: greater than 1. apex accepts a factor and ignores it.
        window: finite steps until the scale grows. Flax grows it one step later.
        min_scale: floor; None or 0 means 2**-126, so the scale is never 0.
        max_scale: ceiling; None means 2**126.
        hysteresis: non-finite steps in a row until the scale falls.

    Raises:
        ValueError: an attribute is out of its range.

    >>> rule = DynamicLossScale(init_scale=8.0, window=2)
    >>> state = rule.init()
    >>> [float((state := rule.update(state, ok)).scale) for ok in (True, True, False)]
    [8.0, 16.0, 8.0]
    """

    check: ClassVar[bool] = True  # checks gradients, and skips steps
    moves: ClassVar[bool] = True  # the scale can change

    init_scale: float = 2.0**16
    factor: float = 2.0
    window: int = 2000
    min_scale: float | None = None
    max_scale: float | None = 2.0**24
    hysteresis: int = 1

    def __post_init__(self) -> None:
        if not 1 < number(self.factor) < math.inf:
            raise ValueError(f"`factor` must be greater than 1, got {self.factor!r}.")
        check_scale("init_scale", self.init_scale)
        if self.min_scale is not None and number(self.min_scale) != 0:
            check_scale("min_scale", self.min_scale)
        if self.max_scale is not None:
            check_scale("max_scale", self.max_scale)
        for name in ("init_scale", "factor", "min_scale", "max_scale"):
            if getattr(self, name) is not None:  # a float hashes, an array does not
                object.__setattr__(self, name, number(getattr(self, name)))
        for name in ("window", "hysteresis"):
            check_count(name, getattr(self, name), least=1)
            object.__setattr__(self, name, int(getattr(self, name)))
        if lowest_scale(self) > min(self.max_scale or LARGEST_SCALE, self.init_scale):
            raise ValueError(
                "`min_scale` must not exceed `init_scale` or `max_scale`, got "
                f"{self.min_scale}, {self.init_scale} and {self.max_scale}."
            )

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        first = min(self.init_scale, self.max_scale or LARGEST_SCALE)
        return _state(first, self.hysteresis)

    def update(self, state: LossScaleState, finite: Bool[Array, ""]) -> LossScaleState:
        """Returns the state after a step with gradients that are all finite, or not."""
        # Functions of `jnp` are jitted and would be traced; functions of `lax` are not.
        finite, scale = jnp.asarray(finite), jnp.asarray(state.scale, FLOAT32)
        lowest = np.float32(self.min_scale or SMALLEST_SCALE)
        highest = np.float32(self.max_scale or LARGEST_SCALE)
        # Counted from the skips, because another rule may have set `state.hysteresis`.
        skips = count_skips(state, finite)
        left = lax.max(lax.sub(np.int32(self.hysteresis), skips), _ZERO)
        unskipped = lax.select(finite, lax.add(state.unskipped, _ONE), _ZERO)
        # `unskipped` can exceed `window` after a restart with a shorter window.
        grows = lax.ge(unskipped, np.int32(self.window))
        falls = lax.bitwise_and(lax.bitwise_not(finite), lax.eq(left, _ZERO))
        grown = lax.min(lax.mul(scale, np.float32(self.factor)), highest)
        fallen = lax.clamp(lowest, lax.div(scale, np.float32(self.factor)), highest)
        return LossScaleState(
            scale=lax.select(grows, grown, lax.select(falls, fallen, scale)),
            unskipped=lax.select(grows, _ZERO, unskipped),
            hysteresis=left,
            consecutive_skips=skips,
        )


@dataclasses.dataclass(frozen=True)
class StaticLossScale(_Rule):
    """A scale that never moves.

    Attributes:
        scale: the factor of the loss, positive and finite.
        check: whether non-finite gradients skip the step. By default they reach the
            optimizer, as in apex.

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
        check_scale("scale", self.scale)
        object.__setattr__(self, "scale", number(self.scale))

    def init(self) -> LossScaleState:
        """Returns the state before the first step."""
        return _state(self.scale, 1)

    def update(self, state: LossScaleState, finite: Bool[Array, ""]) -> LossScaleState:
        """Counts a step, and keeps the scale."""
        finite = jnp.asarray(finite)
        counted = optax.safe_increment(state.unskipped)
        if not self.check:
            return state._replace(unskipped=counted)
        return state._replace(
            unskipped=lax.select(finite, counted, _ZERO),
            consecutive_skips=count_skips(state, finite),
        )


type LossScaleRule = DynamicLossScale | StaticLossScale


def current_scale(rule: Any, state: LossScaleState) -> Float[Array, ""]:
    """Returns the scale, as a constant if it is static, so that XLA folds x * 1."""
    if isinstance(rule, StaticLossScale):
        return jnp.asarray(rule.scale, FLOAT32)
    return state.scale


def lowest_scale(rule: LossScaleRule) -> float:
    """Returns the floor of the scale."""
    if isinstance(rule, StaticLossScale):
        return rule.scale
    return rule.min_scale or SMALLEST_SCALE


def scales_in_use(
    rules: Sequence[LossScaleRule], states: Sequence[LossScaleState]
) -> Any:
    """Returns the scale of the next loss; for several losses, a tuple."""
    pairs = zip(rules, states, strict=True)
    scales = tuple(
        # keeps the shape and sharding of the scale in the state
        jnp.full_like(s.scale, rule.scale)
        if isinstance(rule, StaticLossScale) and isinstance(s.scale, jax.Array)
        else s.scale
        for rule, s in pairs
    )
    return scales[0] if len(scales) == 1 else scales


def loss_scale_rule(
    loss_scale: Any, min_loss_scale: float | None, max_loss_scale: float | None
) -> LossScaleRule:
    """Returns the rule for the arguments of `initialize`."""
    if loss_scale == "dynamic":
        start = max(DynamicLossScale.init_scale, min_loss_scale or 0.0)
        return DynamicLossScale(
            init_scale=start, min_scale=min_loss_scale, max_scale=max_loss_scale
        )
    if loss_scale is None:
        return StaticLossScale(1.0, check=True)
    if isinstance(loss_scale, float):
        return StaticLossScale(loss_scale)
    return loss_scale


def unscale_tree(tree: PyTree, scale: Float[Array, ""] | float) -> PyTree:
    """Multiplies float leaves by `1 / scale` in float32, like apex's kernel.

    It multiplies float64 and complex128 leaves in float64.
    """
    scale, inverses = jnp.asarray(scale, jnp.float32), {}
    leaves, structure = jax.tree.flatten(tree)
    for i, x in enumerate(leaves):
        if is_differentiable(x):
            x = widen(jnp.asarray(x))
            real = jnp.finfo(x.dtype).dtype
            if real not in inverses:
                inverses[real] = 1.0 / scale.astype(real)
            leaves[i] = lax.mul(x, lax.convert_element_type(inverses[real], x.dtype))
    return structure.unflatten(leaves)


def _state(scale: float, hysteresis: int) -> LossScaleState:
    # Each field has its own array, because a buffer can only be donated once.
    counts = [jnp.asarray(x, jnp.int32) for x in (0, hysteresis, 0)]
    return LossScaleState(jnp.asarray(scale, jnp.float32), *counts)


def count_skips(state: LossScaleState, finite: Bool[Array, ""]) -> Int[Array, ""]:
    """Returns `consecutive_skips` after one more step."""
    return lax.select(finite, _ZERO, optax.safe_increment(state.consecutive_skips))
