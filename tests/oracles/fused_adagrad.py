"""FusedAdagrad in NumPy float64, from apex_semantics 8.7.

Imports neither JAX nor the library.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from tests.oracles.steps import (
    LearningRate,
    Leaves,
    Result,
    decay_of_leaves,
    float64,
    rate,
    unscaled_steps,
)


def fused_adagrad(
    params: Leaves,
    grads: Iterable[Leaves],
    *,
    learning_rate: LearningRate = 1e-2,
    eps: float = 1e-10,
    weight_decay: float = 0.0,
    adagrad_w_mode: bool = False,
    decays: Sequence[bool] | None = None,
    grad_scale: float = 1.0,
    skip: Sequence[bool] | None = None,
) -> Iterator[Result]:
    """Yields parameters, count and sum_of_squares after each of the steps."""
    p = float64(params)
    h = [np.zeros_like(x) for x in p]
    wd = decay_of_leaves(weight_decay, decays, len(p))
    count = 0
    for g in unscaled_steps(grads, grad_scale, skip):
        if g is not None:
            lr = rate(learning_rate, count)
            count += 1
            for i in range(len(p)):
                s = g[i] if adagrad_w_mode else g[i] + wd[i] * p[i]
                h[i] = h[i] + s * s
                u = s / (np.sqrt(h[i]) + eps)
                if adagrad_w_mode:
                    u = u + wd[i] * p[i]
                p[i] = p[i] - lr * u
        yield Result(list(p), {"count": count, "sum_of_squares": list(h)})
