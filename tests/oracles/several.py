"""Several models, optimizers and losses in float64, after apex's own test of them.

Imports neither JAX nor the library. A model is two vectors, `w0` and `w1`. A loss joins
its models in a ring: it sums `w0 * w1` of each with the next, so with one model it is
apex's `(w0 * w1).sum()`, and with several a group that stood still shows in the
gradients of the others. An optimizer is SGD with momentum over a group of models.
"""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from tests.oracles import loss_scale

type Group = int
type Loss = int
# (models, 2, 2): of each model, w0 and w1.
type Weights = np.ndarray


class Setup(NamedTuple):
    """Who optimizes and who loses what.

    Attributes:
        groups: the models of each optimizer.
        losses: the models in the ring of each loss.
        covers: the groups that each loss is differentiated for.
        learning_rates: one per model, or more.
        momentum: one per group, or more.
    """

    groups: tuple[tuple[int, ...], ...]
    losses: tuple[tuple[int, ...], ...]
    covers: tuple[tuple[Group, ...], ...]
    learning_rates: tuple[float, ...] = (0.25, 0.5, 0.125)
    momentum: tuple[float, ...] = (0.125, 0.25, 0.5)

    @property
    def models(self) -> int:
        return sum(map(len, self.groups))


class Scaling(NamedTuple):
    """What the scales of the losses do.

    Attributes:
        rule: the rule of all scales.
        first: the scales to begin with.
        loss_ids: which scale each loss uses.
    """

    rule: loss_scale.Rule
    first: tuple[float, ...]
    loss_ids: tuple[int, ...]


class Result(NamedTuple):
    """After an iteration; `grads` of each loss are those that it was made of."""

    losses: list[float]
    grads: list[Weights]
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


def value(models: Sequence[int], w: Weights) -> float:
    """The loss over a ring of models."""
    return sum(float(w[a, 0] @ w[b, 1]) for a, b in _ring(models))


def gradient(models: Sequence[int], w: Weights) -> Weights:
    """Its gradient for all models, zero for those outside of the ring."""
    g = np.zeros_like(w)
    for a, b in _ring(models):
        g[a, 0] += w[b, 1]
        g[b, 1] += w[a, 0]
    return g


def _ring(models: Sequence[int]) -> list[tuple[int, int]]:
    return list(zip(models, (*models[1:], models[0]), strict=True))


def plain(
    setup: Setup, stepping: Sequence[Collection[Group]]
) -> Iterator[tuple[list[float], list[Weights], Weights, Weights]]:
    """Training without scales: each iteration steps the groups that it names.

    Yields the values and gradients of each loss, then weights and traces after it.
    """
    w = weights(setup.models)
    trace = np.zeros_like(w)
    for groups in stepping:
        values = [value(models, w) for models in setup.losses]
        grads = [gradient(models, w) for models in setup.losses]
        w, trace = w.copy(), trace.copy()
        for g in groups:
            mine = list(setup.groups[g])
            covering = [x for x, c in zip(grads, setup.covers, strict=True) if g in c]
            trace[mine] = setup.momentum[g] * trace[mine] + sum(covering)[mine]
            rates = np.array(setup.learning_rates)[mine, None, None]
            w[mine] -= rates * trace[mine]
        yield values, grads, w, trace


def skips(setup: Setup, overflow: Collection[Loss]) -> list[bool]:
    """Which groups skip: those that an overflowing loss covers."""
    return [
        any(g in setup.covers[loss] for loss in overflow)
        for g in range(len(setup.groups))
    ]


def train(
    setup: Setup, scaling: Scaling, overflows: Sequence[Collection[Loss]]
) -> Iterator[Result]:
    """Training where in each iteration the losses that it names overflow.

    It is the plain run with the skipped steps left out, and what was counted.
    """
    covered = {g for groups in setup.covers for g in groups}
    skipping = [skips(setup, overflow) for overflow in overflows]
    stepping = [[g for g in sorted(covered) if not skip[g]] for skip in skipping]
    scales = [
        dataclasses.replace(loss_scale.init(scaling.rule), scale=first)
        for first in scaling.first
    ]
    step, counts = 0, [0] * len(setup.groups)
    last = [False] * len(setup.groups)
    runs = zip(plain(setup, stepping), overflows, skipping, stepping, strict=True)
    for (values, grads, w, trace), overflow, skip, groups in runs:
        scales = _after_backward(scaling, scales, overflow)
        step += bool(groups)
        counts = [n + s for n, s in zip(counts, skip, strict=True)]
        last = [s if g in covered else last[g] for g, s in enumerate(skip)]
        yield Result(values, grads, w, trace, step, counts, last, list(scales))


def _after_backward(
    scaling: Scaling, before: Sequence[loss_scale.State], overflow: Collection[Loss]
) -> list[loss_scale.State]:
    """4.5, 5.4: each backward pass moves its scale, in order; skips count steps."""
    scales = list(before)
    for loss, i in enumerate(scaling.loss_ids):
        finite = loss not in overflow
        scales[i] = loss_scale.update(scaling.rule, scales[i], finite)
    bad = {scaling.loss_ids[loss] for loss in overflow}
    skips = [s.consecutive_skips + 1 if i in bad else 0 for i, s in enumerate(before)]
    return [
        dataclasses.replace(s, consecutive_skips=n)
        for s, n in zip(scales, skips, strict=True)
    ]
