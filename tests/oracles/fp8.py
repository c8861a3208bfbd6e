"""fp8 matmuls in float64 NumPy, from the definition of the formats.

"FP8 Formats for Deep Learning", arXiv 2209.05433, table 1. E4M3 is the variant without
infinities (e4m3fn).
"""

from typing import Any

import numpy as np

# The largest number, digits after the point, exponent of the smallest normal.
E4M3, E5M2 = (448.0, 3, -6), (57344.0, 2, -14)


def rounded(x: Any, form: tuple[float, int, int]) -> np.ndarray:
    """Rounds to the nearest number of a format, ties to even."""
    _, digits, least = form
    x = np.asarray(x, np.float64)
    exponent = np.maximum(np.floor(np.log2(np.abs(np.where(x == 0, 1, x)))), least)
    step = 2.0 ** (exponent - digits)
    return np.round(x / step) * step  # NumPy rounds halves to even


def scale(x: Any, form: tuple[float, int, int]) -> float:
    """Returns the largest power of two that keeps the largest number finite."""
    largest = np.abs(np.asarray(x, np.float64)).max()
    return 2.0 ** np.floor(np.log2(form[0] / largest)) if largest else 1.0


def quantized(x: Any, form: tuple[float, int, int]) -> np.ndarray:
    """Rounds an array to fp8 on its own scale."""
    times = scale(x, form)
    return rounded(np.asarray(x, np.float64) * times, form) / times


def product(x: Any, w: Any, g: Any) -> dict[str, np.ndarray]:
    """Returns a matmul with a weight, and both gradients of a cotangent."""
    x, w, g = quantized(x, E4M3), quantized(w, E4M3), quantized(g, E5M2)
    return {"y": x @ w, "x": g @ w.T, "w": x.T @ g}
