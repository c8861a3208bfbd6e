"""The warnings that jamp gives: a program that runs, but hardly as it was meant."""


class PrecisionWarning(UserWarning):
    """A value is computed in a precision that is unlikely to be meant."""


class UnusedOptionWarning(UserWarning):
    """An option was given that has no effect here."""


class AutocastWarning(UserWarning):
    """Autocast leaves an operation as it is, because it does not know it."""
