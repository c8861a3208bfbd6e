"""The warnings of jamp. The program runs, but probably not as the user intends."""

import os
import pathlib
import warnings

import flax
import jax

_SKIPPED = (pathlib.Path(__file__).parents[1], jax.__path__[0], flax.__path__[0])


class PrecisionWarning(UserWarning):
    """A computation has a precision that the user probably does not intend."""


class UnusedOptionWarning(UserWarning):
    """An option has no effect here."""


class AutocastWarning(UserWarning):
    """Autocast does not know an operation, and leaves it unchanged."""


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the line of user code that called jamp, directly or through JAX."""
    prefixes = tuple(f"{folder}{os.sep}" for folder in _SKIPPED)
    warnings.warn(message, category, skip_file_prefixes=prefixes)
