"""The warnings that jamp gives: a program that runs, but hardly as it was meant."""

import os
import pathlib
import warnings

import flax
import jax

_SKIPPED = (pathlib.Path(__file__).parents[1], jax.__path__[0], flax.__path__[0])


class PrecisionWarning(UserWarning):
    """A value is computed in a precision that is unlikely to be meant."""


class UnusedOptionWarning(UserWarning):
    """An option was given that has no effect here."""


class AutocastWarning(UserWarning):
    """Autocast leaves an operation as it is, because it does not know it."""


def warn(message: str, category: type[Warning]) -> None:
    """Warns of the line of the user's from which jamp was called, by way of JAX too."""
    prefixes = tuple(f"{folder}{os.sep}" for folder in _SKIPPED)
    warnings.warn(message, category, skip_file_prefixes=prefixes)
