"""Dynamic loss scaling in plain Python, from apex_semantics 5.4 and 5.6.

Imports neither JAX nor jamp. Each operation rounds to IEEE single precision through
`struct`.
"""

import dataclasses
import math
import struct

SMALLEST_NORMAL = 2.0**-126


def fp32(x: float) -> float:
    """Rounds to single precision; a magnitude beyond its range becomes infinite."""
    try:
        return struct.unpack("<f", struct.pack("<f", x))[0]
    except OverflowError:
        return math.copysign(math.inf, x)


@dataclasses.dataclass(frozen=True)
class Rule:
    """The settings; `window` is apex's scale_window, and 5.6 defines `hysteresis`."""

    init_scale: float = 2.0**16
    factor: float = 2.0
    window: int = 2000
    min_scale: float | None = None
    max_scale: float = 2.0**24
    hysteresis: int = 1


@dataclasses.dataclass(frozen=True)
class State:
    """The state of a rule between two steps."""

    scale: float
    unskipped: int
    hysteresis: int
    consecutive_skips: int


def init(rule: Rule) -> State:
    """5.1: the ceiling also caps the initial scale."""
    return State(fp32(min(rule.max_scale, rule.init_scale)), 0, rule.hysteresis, 0)


def update(rule: Rule, state: State, finite: bool) -> State:
    """Returns the state after a backward pass."""
    if not finite:
        return _after_overflow(rule, state)
    scale, unskipped = state.scale, state.unskipped + 1
    if unskipped == rule.window:
        scale, unskipped = min(rule.max_scale, fp32(scale * rule.factor)), 0
    return State(scale, unskipped, rule.hysteresis, 0)


def _after_overflow(rule: Rule, state: State) -> State:
    left = state.hysteresis - 1
    scale = state.scale
    if left <= 0:
        # 5.4: the floor holds only on the way down, and without one apex falls to 0.
        floor = max(rule.min_scale or 0.0, SMALLEST_NORMAL)
        scale = max(floor, fp32(scale / rule.factor))
    return State(scale, 0, left, state.consecutive_skips + 1)
