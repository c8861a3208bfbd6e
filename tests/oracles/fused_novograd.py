"""FusedNovoGrad in NumPy float64, from apex_semantics 8.6.

Imports neither JAX nor the library.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np

from tests.oracles.steps import (
    LearningRate,
    Leaves,
    Result,
    decay_of_leaves,
    float64,
    norm,
    rate,
    unscaled_steps,
)


def fused_novograd(
    params: Leaves,
    grads: Iterable[Leaves],
    *,
    learning_rate: LearningRate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    bias_correction: bool = True,
    reg_inside_moment: bool = False,
    grad_averaging: bool = True,
    norm_type: Literal[2, "inf"] = 2,
    init_zero: bool = False,
    decays: Sequence[bool] | None = None,
    grad_scale: float = 1.0,
    skip: Sequence[bool] | None = None,
) -> Iterator[Result]:
    """Yields parameters, count, mu and nu; nu holds one norm per leaf, not squared."""
    assert norm_type in (2, "inf")
    p = float64(params)
    m = [np.zeros_like(x) for x in p]
    n = [0.0] * len(p)
    wd = decay_of_leaves(weight_decay, decays, len(p))
    b3 = 1 - b1 if grad_averaging else 1.0
    t = 0
    for g in unscaled_steps(grads, grad_scale, skip):
        if g is not None:
            lr = rate(learning_rate, t)
            t += 1
            c1 = 1 - b1**t if bias_correction else 1.0
            c2_root = np.sqrt(1 - b2**t) if bias_correction else 1.0
            for i in range(len(p)):
                now = norm(g[i]) if norm_type == 2 else np.max(np.abs(g[i]), initial=0)
                if t == 1 and not init_zero:
                    n[i] = now
                if norm_type == 2:
                    n[i] = np.sqrt(b2 * n[i] ** 2 + (1 - b2) * now**2)
                else:
                    n[i] = b2 * n[i] + (1 - b2) * now
                d = n[i] / c2_root + eps
                if reg_inside_moment:
                    m[i] = b1 * m[i] + b3 * (g[i] / d + wd[i] * p[i])
                    p[i] = p[i] - lr * (m[i] / c1)
                else:
                    m[i] = b1 * m[i] + b3 * g[i]
                    p[i] = p[i] - lr * ((m[i] / c1) / d + wd[i] * p[i])
        yield Result(list(p), {"count": t, "mu": list(m), "nu": list(n)})
