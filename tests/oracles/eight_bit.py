"""Moments in 8 bits in float64 NumPy: tables of all numbers, and a search.

Imports neither JAX nor jamp.
"""

import numpy as np


def numbers(exponent: int, mantissa: int, drop: int = 0) -> np.ndarray:
    """Returns the numbers of a small float, in order, with 1 as the largest.

    `drop` leaves out the largest ones: float8_e4m3fn has a NaN there.
    """
    steps = [
        (m / 2**mantissa + (e > 0)) * 2.0 ** max(e, 1)
        for e in range(2**exponent)
        for m in range(2**mantissa)
    ]
    kept = np.array(steps[: len(steps) - drop])
    return kept / kept[-1]


FIRST, ROOT = numbers(4, 3, drop=1), numbers(4, 4)
SQUARES = (np.arange(128) / 127) ** 2


def spread(scales: np.ndarray, n: int) -> np.ndarray:
    return np.repeat(np.float64(scales), n // scales.shape[-1], -1)


def maxima(x: np.ndarray, block: int) -> np.ndarray:
    return np.abs(x).reshape(*x.shape[:-1], -1, block).max(-1)


def rounded(
    size: np.ndarray, scale: np.ndarray, book: np.ndarray, random: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the code of each number, and whether float32 can choose another one.

    The upper neighbor is taken if the fraction plus `(random + 0.5) / 65536` reaches 1.
    """
    y = np.float64(size) / np.where(scale > 0, np.float64(scale), 1)
    low = np.clip(np.searchsorted(book, y, "right") - 1, 0, len(book) - 2)
    fraction = (y - book[low]) / (book[low + 1] - book[low])
    margin = fraction + (random + 0.5) / 65536 - 1
    return low + (margin >= 0), np.abs(margin) < 1e-4
