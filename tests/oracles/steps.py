"""Skipping, unscaling, norms and masks for the oracles of the fused optimizers.

Imports neither JAX nor the library. A tree is a list of arrays here. An oracle is a
generator that yields a `Result` after each of the steps, the skipped ones included.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import repeat
from typing import Any, NamedTuple

import numpy as np

type Leaves = Sequence[np.ndarray]
type LearningRate = float | Callable[[int], float]


class Result(NamedTuple):
    """`state` has the field names of the optimizer's own state; its trees are lists."""

    params: list[np.ndarray]
    state: dict[str, Any]


def float64(leaves: Leaves) -> list[np.ndarray]:
    """The leaves, widened."""
    return [np.asarray(x, np.float64) for x in leaves]


def unscaled_steps(
    grads: Iterable[Leaves], grad_scale: float, skip: Sequence[bool] | None
) -> Iterator[list[np.ndarray] | None]:
    """The gradients of each step, divided by the scale; None for a skipped step."""
    skipped = repeat(False) if skip is None else skip
    for now, skips in zip(grads, skipped, strict=skip is not None):
        yield None if skips else [g / grad_scale for g in float64(now)]


def rate(learning_rate: LearningRate, count: int) -> float:
    """The learning rate after `count` steps, skipped ones not counted."""
    return learning_rate(count) if callable(learning_rate) else learning_rate


def decay_of_leaves(
    weight_decay: float, decays: Sequence[bool] | None, leaves: int
) -> list[float]:
    """One weight decay per leaf: 0 where `decays`, the mask, says no."""
    decays = [True] * leaves if decays is None else decays
    return [weight_decay if yes else 0.0 for yes in decays]


def norm(x: np.ndarray) -> np.float64:
    """The 2-norm of one leaf; 0 for an empty one."""
    return np.sqrt(np.sum(np.square(x)))


def global_norm(leaves: Leaves) -> np.float64:
    """The 2-norm of all leaves together."""
    return np.sqrt(sum((np.sum(np.square(x)) for x in leaves), np.float64(0)))
