"""Several models, optimizers and losses in float64, after apex's own test of them.

Imports neither JAX nor the library. A model is two vectors, `w0` and `w1`. A loss joins
its models in a ring: it sums `w0 * w1` of each with the next, so with one model it is
apex's `(w0 * w1).sum()`, and with several a group that stood still shows in the
gradients of the others. An optimizer is SGD with momentum over a group of models.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from tests.oracles import loss_scale

# (models, 2, 2): of each model, w0 and w1.
type Weights = np.ndarray
LEARNING_RATES, MOMENTUM = (0.25, 0.5, 0.125), (0.125, 0.25, 0.5)  # of each group


class Setup(NamedTuple):
    """Who optimizes and who loses what.

    `groups` has the models of each optimizer, `losses` those in the ring of each loss,
    and `covers` the groups that each loss is differentiated for. `pack` makes a
    container of groups; None where there is one.
    """

    groups: tuple[tuple[int, ...], ...]
    losses: tuple[tuple[int, ...], ...]
    covers: tuple[tuple[int, ...], ...]
    pack: Any = None

    @property
    def models(self) -> int:
        return sum(map(len, self.groups))

    def trained(self, loss: int) -> list[int]:
        """The models that a loss is differentiated for."""
        return [m for g in self.covers[loss] for m in self.groups[g]]


class Scaling(NamedTuple):
    """The rule of all scales, those to begin with, and which one each loss uses."""

    rule: loss_scale.Rule
    first: tuple[float, ...]
    loss_ids: tuple[int, ...]


class Result(NamedTuple):
    """After an iteration."""

    weights: Weights
    trace: Weights
    step: int
    skipped_steps: list[int]
    last_step_skipped: list[bool]
    scales: list[loss_scale.State]


def weights(models: int) -> Weights:
    """Those of apex's `MyModel(u)` for u = 1, 2, ...: u + (0, 1) and 1 + u + (0, 1)."""
    unique = np.arange(1.0, models + 1)[:, None, None]
    return unique + np.array([[0.0, 1.0], [1.0, 2.0]])


def gradient(models: Sequence[int], w: Weights) -> Weights:
    """Of the loss over a ring of models; zero for those outside of it."""
    g = np.zeros_like(w)
    for a, b in zip(models, (*models[1:], models[0]), strict=True):
        g[a, 0] += w[b, 1]
        g[b, 1] += w[a, 0]
    return g


def train(
    setup: Setup, scaling: Scaling, overflows: Sequence[Collection[int]]
) -> Iterator[Result]:
    """Training where in each iteration the losses that it names overflow.

    A group skips where a loss that covers it does. So it is plain training, which knows
    no scales, with the skipped steps left out, and what was counted.
    """
    w = weights(setup.models)
    trace, groups = np.zeros_like(w), len(setup.groups)
    start = loss_scale.init(scaling.rule)
    scales = [dataclasses.replace(start, scale=first) for first in scaling.first]
    step, counts, last = 0, [0] * groups, [False] * groups
    for overflow in overflows:
        grads = [gradient(models, w) for models in setup.losses]
        w, trace, stepped = w.copy(), trace.copy(), False
        for g, models in enumerate(setup.groups):
            covering = [i for i, covers in enumerate(setup.covers) if g in covers]
            last[g] = any(loss in overflow for loss in covering)
            counts[g] += last[g]
            if not last[g]:
                mine, stepped = list(models), True
                total = sum(grads[loss] for loss in covering)
                trace[mine] = MOMENTUM[g] * trace[mine] + total[mine]
                w[mine] -= LEARNING_RATES[g] * trace[mine]
        step += stepped
        scales = _after_backward(scaling, scales, overflow)
        yield Result(w, trace, step, [*counts], [*last], scales)


def _after_backward(
    scaling: Scaling, before: Sequence[loss_scale.State], overflow: Collection[int]
) -> list[loss_scale.State]:
    """4.5, 5.4: each backward pass moves its scale, in order; skips count steps."""
    scales = list(before)
    for loss, i in enumerate(scaling.loss_ids):
        scales[i] = loss_scale.update(scaling.rule, scales[i], loss not in overflow)
    bad = {scaling.loss_ids[loss] for loss in overflow}
    skips = [s.consecutive_skips + 1 if i in bad else 0 for i, s in enumerate(before)]
    replaced = zip(scales, skips, strict=True)
    return [dataclasses.replace(s, consecutive_skips=n) for s, n in replaced]
