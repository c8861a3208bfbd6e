"""FusedLAMB in NumPy float64, from apex_semantics 8.5.

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
    global_norm,
    norm,
    rate,
    unscaled_steps,
)


def fused_lamb(
    params: Leaves,
    grads: Iterable[Leaves],
    *,
    learning_rate: LearningRate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    bias_correction: bool = True,
    adam_w_mode: bool = True,
    grad_averaging: bool = True,
    max_grad_norm: float | None = 1.0,
    use_nvlamb: bool = False,
    decays: Sequence[bool] | None = None,
    grad_scale: float = 1.0,
    skip: Sequence[bool] | None = None,
) -> Iterator[Result]:
    """Yields parameters, count, mu and nu after each of the steps."""
    p = float64(params)
    m = [np.zeros_like(x) for x in p]
    v = [np.zeros_like(x) for x in p]
    wd = decay_of_leaves(weight_decay, decays, len(p))
    b3 = 1 - b1 if grad_averaging else 1.0
    t = 0
    for g in unscaled_steps(grads, grad_scale, skip):
        if g is not None:
            lr = rate(learning_rate, t)
            t += 1
            c1 = 1 - b1**t if bias_correction else 1.0
            c2 = 1 - b2**t if bias_correction else 1.0
            n = global_norm(g)
            # A NaN compares false, so it clips nothing.
            k = n / max_grad_norm if max_grad_norm and n > max_grad_norm else 1.0
            for i in range(len(p)):
                s = g[i] / k
                if not adam_w_mode:
                    s = s + wd[i] * p[i]
                m[i] = b1 * m[i] + b3 * s
                v[i] = b2 * v[i] + (1 - b2) * s * s
                u = (m[i] / c1) / (np.sqrt(v[i] / c2) + eps)
                if adam_w_mode:
                    u = u + wd[i] * p[i]
                ratio = lr
                if use_nvlamb or wd[i] != 0:
                    p_norm, u_norm = norm(p[i]), norm(u)
                    if p_norm != 0 and u_norm != 0:
                        ratio = lr * p_norm / u_norm
                p[i] = p[i] - ratio * u
        yield Result(list(p), {"count": t, "mu": list(m), "nu": list(v)})
