"""Measure relative errors in norm."""

from typing import Any

import jax
import numpy as np


def distance(got: Any, expected: Any, least: float = 0.0) -> float:
    """Divides the norm of the error by the expected norm, or by a larger `least`."""
    got, expected = (np.asarray(x, np.float64) for x in (got, expected))
    return np.linalg.norm(got - expected) / max(np.linalg.norm(expected), least)


def assert_near(got: Any, expected: Any, most: float) -> None:
    """Checks the shape, dtype and relative error of each leaf."""

    def check(path, got, expected):
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype), path
        assert distance(got, expected, 1e-3) <= most, (path, got, expected)

    jax.tree_util.tree_map_with_path(check, got, expected)
