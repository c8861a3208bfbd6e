"""Adam and momentum in NumPy float64, written from the papers.

Imports neither JAX nor the library. A tree is a list of arrays here.
"""

from collections.abc import Iterator, Sequence

import numpy as np

type Leaves = Sequence[np.ndarray]


def adam(
    params: Leaves,
    grads: Sequence[Leaves],
    *,
    learning_rate: float,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> Iterator[list[np.ndarray]]:
    """Yields the parameters after each of the steps; `grads` has one entry per step."""
    p = [np.asarray(x, np.float64) for x in params]
    m = [np.zeros_like(x) for x in p]
    v = [np.zeros_like(x) for x in p]
    for t, now in enumerate(grads, 1):
        for i, g in enumerate(now):
            g = np.asarray(g, np.float64)
            m[i] = b1 * m[i] + (1 - b1) * g
            v[i] = b2 * v[i] + (1 - b2) * g**2
            step = (m[i] / (1 - b1**t)) / (np.sqrt(v[i] / (1 - b2**t)) + eps)
            p[i] = p[i] - learning_rate * step
        yield list(p)


def momentum(
    params: Leaves,
    grads: Sequence[Leaves],
    *,
    learning_rate: float,
    decay: float,
    storage: type | None = None,
) -> Iterator[list[np.ndarray]]:
    """Heavy ball; with `storage` the parameters are rounded to it after each step."""
    p = [np.asarray(x, np.float64) for x in params]
    m = [np.zeros_like(x) for x in p]
    for now in grads:
        for i, g in enumerate(now):
            m[i] = decay * m[i] + np.asarray(g, np.float64)
            p[i] = p[i] - learning_rate * m[i]
            if storage is not None:
                p[i] = p[i].astype(storage).astype(np.float64)
        yield list(p)
