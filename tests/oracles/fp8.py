"""Products in fp8 in float64, from the definition of the formats: NumPy alone.

"FP8 Formats for Deep Learning", arXiv 2209.05433, table 1; e4m3 is that without
infinities (e4m3fn), whose largest number is 448.
"""

from typing import Any

import numpy as np

# Largest number, digits after the point, exponent of the smallest normal number.
E4M3, E5M2 = (448.0, 3, -6), (57344.0, 2, -14)


def rounded(x: Any, form: tuple[float, int, int]) -> np.ndarray:
    """The nearest number of a format, of two the one with an even last digit."""
    _, digits, least = form
    x = np.asarray(x, np.float64)
    exponent = np.maximum(np.floor(np.log2(np.abs(np.where(x == 0, 1, x)))), least)
    step = 2.0 ** (exponent - digits)
    return np.round(x / step) * step  # NumPy rounds halves to even


def scale(x: Any, form: tuple[float, int, int]) -> float:
    """The largest power of two by which the largest number stays finite."""
    largest = np.abs(np.asarray(x, np.float64)).max()
    return 2.0 ** np.floor(np.log2(form[0] / largest)) if largest else 1.0


def quantized(x: Any, form: tuple[float, int, int]) -> np.ndarray:
    """Rounds an array to fp8 on its own scale."""
    times = scale(x, form)
    return rounded(np.asarray(x, np.float64) * times, form) / times


def product(x: Any, w: Any, g: Any) -> dict[str, np.ndarray]:
    """A product by a weight and, of its cotangent, both gradients, of matrices."""
    x, w, g = quantized(x, E4M3), quantized(w, E4M3), quantized(g, E5M2)
    return {"y": x @ w, "x": g @ w.T, "w": x.T @ g}
