"""apex's FP16_Optimizer of apex.optimizers, and scalers: apex_semantics 7.4 and 8.2.

Imports neither JAX nor the library. A tree is a list of arrays. Gradients are given as
they are, unscaled; `backward` scales them and rounds them to the parameters' dtypes, as
a backward pass does. Scales are rounded to float32.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tests.oracles import fused
from tests.oracles.loss_scale import fp32
from tests.oracles.steps import Leaves, float64, norm


def scaled(grads: Leaves, params: Leaves, scale: float) -> list[np.ndarray]:
    """What a backward pass of `scale` times the loss leaves in the parameters' `.grad`.

    Beyond the range of half it is inf, or NaN where it was NaN.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        return [
            (np.float32(g) * np.float32(scale)).astype(p.dtype)
            for g, p in zip(grads, params, strict=True)
        ]


def added(a: Leaves, b: Leaves) -> list[np.ndarray]:
    with np.errstate(over="ignore", invalid="ignore"):
        return [x + y for x, y in zip(a, b, strict=True)]


def clip(
    leaves: Leaves, max_norm: float, norm_type: float
) -> tuple[float, list[np.ndarray]]:
    """torch's clip_grad_norm_: the norm before clipping, and clipped gradients."""
    before = float(np.linalg.norm(flat(leaves), norm_type))
    factor = min(1.0, max_norm / (before + 1e-6))
    return before, [x * factor for x in float64(leaves)]


@dataclasses.dataclass
class DynamicLossScaler:
    """7.4, and 8.2 with other numbers."""

    init_scale: float = 2.0**32
    scale_factor: float = 2.0
    scale_window: int = 1000
    cur_iter: int = 0
    last_overflow_iter: int = -1

    def __post_init__(self) -> None:
        self.cur_scale = fp32(self.init_scale)

    @property
    def state(self) -> tuple[float, int, int]:
        return self.cur_scale, self.cur_iter, self.last_overflow_iter

    def update_scale(self, overflow: bool) -> None:
        if overflow:
            self.cur_scale = max(fp32(self.cur_scale / self.scale_factor), 1.0)
            self.last_overflow_iter = self.cur_iter
        elif (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
            self.cur_scale = fp32(self.cur_scale * self.scale_factor)
        self.cur_iter += 1


def cut_down(
    groups: Sequence[Leaves],
    rules: Sequence[tuple[str, dict[str, Any]]],
    steps: Sequence[Sequence[Leaves]],
) -> Iterator[tuple[list[np.ndarray], tuple[float, int, int]]]:
    """8.2: groups of half parameters, each flattened; norms and clipping per group.

    A rule is an oracle of `fused` and its options. Yields the masters per group and the
    state of the scaler after each step.
    """
    scaler, grads, skips, states = DynamicLossScaler(2.0**16), [], [], []
    for step in steps:
        pairs, scale = zip(step, groups, strict=True), scaler.cur_scale
        now = [flat(scaled(x, group, scale)) for x, group in pairs]
        skips.append(not np.isfinite([norm(g) for g in now]).all())
        grads.append([g / scale for g in now])
        scaler.update_scale(skips[-1])
        states.append(scaler.state)
    runs = [
        getattr(fused, name)([flat(x)], [[g[i]] for g in grads], skip=skips, **options)
        for i, (x, (name, options)) in enumerate(zip(groups, rules, strict=True))
    ]
    for state, *results in zip(states, *runs, strict=True):
        yield [result.params[0] for result in results], state


def flat(leaves: Leaves) -> np.ndarray:
    return np.concatenate([x.ravel() for x in float64(leaves)])
