"""The warnings of jamp: the program runs, but probably not as intended."""

import os
import pathlib
import warnings

import flax
import jax

_SKIPPED = (pathlib.Path(__file__).parents[1], jax.__path__[0], flax.__path__[0])


class PrecisionWarning(UserWarning):
    """A value is computed in a precision that is probably not intended."""


class UnusedOptionWarning(UserWarning):
    """An option has no effect here."""


class AutocastWarning(UserWarning):
    """Autocast does not know an operation, and leaves it unchanged."""


def warn(message: str, category: type[Warning]) -> None:
    """Warns at the line of user code that called jamp, directly or through JAX."""
    prefixes = tuple(f"{folder}{os.sep}" for folder in _SKIPPED)
    warnings.warn(message, category, skip_file_prefixes=prefixes)
