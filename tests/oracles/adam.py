"""Adam and momentum in NumPy float64, as what `oracles.fused` has without its options.

Imports neither JAX nor the library. A tree is a list of arrays here.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tests.oracles.fused import Grads, fused_adam
from tests.oracles.steps import Leaves, float64


def adam(params: Leaves, grads: Grads, **options: Any) -> Iterator[list[np.ndarray]]:
    """Yields the parameters after each of the steps; `grads` has one entry per step."""
    return (result.params for result in fused_adam(params, grads, **options))


def momentum(
    params: Leaves,
    grads: Grads,
    *,
    learning_rate: float,
    decay: float,
    storage: type | None = None,
) -> Iterator[list[np.ndarray]]:
    """Heavy ball; with `storage` the parameters are rounded to it after each step."""
    p = float64(params)
    m = [np.zeros_like(x) for x in p]
    for now in map(float64, grads):
        m = [decay * old + g for old, g in zip(m, now, strict=True)]
        p = [x - learning_rate * step for x, step in zip(p, m, strict=True)]
        if storage is not None:
            p = [x.astype(storage).astype(np.float64) for x in p]
        yield p
