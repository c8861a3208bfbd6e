"""LARC around any of the oracles, in NumPy float64, from apex_semantics 8.8.

Imports neither JAX nor the library.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from tests.oracles.fused_sgd import fused_sgd
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


def larc(
    params: Leaves,
    grads: Iterable[Leaves],
    *,
    learning_rate: LearningRate,
    trust_coefficient: float = 0.02,
    clip: bool = True,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    inner: Callable[..., Iterator[Result]] = fused_sgd,
    decays: Sequence[bool] | None = None,
    grad_scale: float = 1.0,
    skip: Sequence[bool] | None = None,
) -> Iterator[Result]:
    """Yields parameters, count and the state of `inner`, an oracle without decay.

    `inner` gets the same learning rate; bind its other options by functools.partial.
    """
    p = float64(params)
    wd = decay_of_leaves(weight_decay, decays, len(p))
    count = 0

    def adapted() -> Iterator[list[np.ndarray] | None]:
        # `inner` asks for a step's gradients after the parameters of the last are in.
        nonlocal count
        for g in unscaled_steps(grads, grad_scale, skip):
            if g is not None:
                lr = rate(learning_rate, count)
                count += 1
                g = [
                    adapt(p[i], g[i], lr, wd[i], trust_coefficient, clip, eps)
                    for i in range(len(p))
                ]
            yield g

    for p, state in inner(params, adapted(), learning_rate=learning_rate, skip=skip):
        yield Result(list(p), {"count": count, "inner_state": state})


def adapt(
    p: np.ndarray,
    g: np.ndarray,
    lr: float,
    wd: float,
    trust_coefficient: float,
    clip: bool,
    eps: float,
) -> np.ndarray:
    """One leaf's gradient, as `inner` sees it: untouched where a norm is zero."""
    p_norm, g_norm = norm(p), norm(g)
    if p_norm == 0 or g_norm == 0:
        return g
    a = trust_coefficient * p_norm / (g_norm + p_norm * wd + eps)
    if clip:
        a = a / max(a, lr)  # min(a / lr, 1), and 1 where lr is 0
    return (g + wd * p) * a
