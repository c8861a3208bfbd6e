"""FusedSGD in NumPy float64, from apex_semantics 8.4.

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


def fused_sgd(
    params: Leaves,
    grads: Iterable[Leaves],
    *,
    learning_rate: LearningRate,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
    decays: Sequence[bool] | None = None,
    grad_scale: float = 1.0,
    skip: Sequence[bool] | None = None,
) -> Iterator[Result]:
    """Yields parameters, count and trace, which is None without momentum."""
    assert not nesterov or (momentum > 0 and dampening == 0)
    p = float64(params)
    buf = [np.zeros_like(x) for x in p]
    wd = decay_of_leaves(weight_decay, decays, len(p))
    count = 0
    for g in unscaled_steps(grads, grad_scale, skip):
        if g is not None:
            lr = rate(learning_rate, count)
            for i in range(len(p)):
                d = g[i] if wd_after_momentum else g[i] + wd[i] * p[i]
                if momentum != 0:
                    if count == 0:  # the first run: no dampening
                        buf[i] = d
                    else:
                        buf[i] = momentum * buf[i] + (1 - dampening) * d
                    d = d + momentum * buf[i] if nesterov else buf[i]
                if wd_after_momentum:
                    d = d + wd[i] * p[i]
                p[i] = p[i] - lr * d
            count += 1
        trace = list(buf) if momentum != 0 else None
        yield Result(list(p), {"count": count, "trace": trace})
