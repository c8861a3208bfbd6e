"""FusedAdam in NumPy float64, from apex_semantics 8.3, and the older one, from 8.1.

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
    rate,
    unscaled_steps,
)


def fused_adam(
    params: Leaves,
    grads: Iterable[Leaves],
    *,
    learning_rate: LearningRate = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    adam_w_mode: bool = True,
    bias_correction: bool = True,
    max_grad_norm: float | None = None,
    legacy: bool = False,
    eps_inside_sqrt: bool = False,
    decays: Sequence[bool] | None = None,
    grad_scale: float = 1.0,
    skip: Sequence[bool] | None = None,
) -> Iterator[Result]:
    """Yields parameters, count, mu and nu after each of the steps."""
    assert legacy or not eps_inside_sqrt
    assert adam_w_mode or not legacy
    p = float64(params)
    m = [np.zeros_like(x) for x in p]
    v = [np.zeros_like(x) for x in p]
    wd = decay_of_leaves(weight_decay, decays, len(p))
    t = 0
    for g in unscaled_steps(grads, grad_scale, skip):
        if g is not None:
            lr = rate(learning_rate, t)
            t += 1
            c1 = 1 - b1**t if bias_correction else 1.0
            c2 = 1 - b2**t if bias_correction else 1.0
            if max_grad_norm:
                divisor = _divisor(global_norm(g), max_grad_norm, legacy)
                g = [x / divisor for x in g]
            for i in range(len(p)):
                s = g[i] if adam_w_mode else g[i] + wd[i] * p[i]
                m[i] = b1 * m[i] + (1 - b1) * s
                v[i] = b2 * v[i] + (1 - b2) * s * s
                if legacy:
                    denom = (
                        np.sqrt(v[i] + eps) if eps_inside_sqrt else np.sqrt(v[i]) + eps
                    )
                    u = m[i] / denom + wd[i] * p[i]
                    p[i] = p[i] - lr * np.sqrt(c2) / c1 * u
                else:
                    u = (m[i] / c1) / (np.sqrt(v[i] / c2) + eps)
                    if adam_w_mode:
                        u = u + wd[i] * p[i]
                    p[i] = p[i] - lr * u
        yield Result(list(p), {"count": t, "mu": list(m), "nu": list(v)})


def _divisor(norm: np.float64, max_grad_norm: float, legacy: bool) -> np.float64:
    if legacy:
        # A NaN compares false, so it clips nothing.
        clip = (norm + 1e-6) / max_grad_norm
        return clip if clip > 1 else np.float64(1)
    # optax.clip_by_global_norm: a NaN norm makes every gradient NaN.
    return np.maximum(norm, max_grad_norm) / max_grad_norm
