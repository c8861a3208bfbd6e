"""Where inf and NaN come from: each value that is not finite knows those before it."""

import dataclasses
from collections.abc import Iterable

from jamp.diagnostics._location import Location


@dataclasses.dataclass(frozen=True, eq=False)
class Cause:
    """A value that is not finite.

    Attributes:
        order: the place of what made it, in order of execution.
        parents: what is not finite among what it was made of.
        has_nan: whether it holds NaN.
        intended: whether it may be meant so: an infinity in the program, as a mask's,
            or in the arguments, and no NaN.
        location: what to report if it is the first; None if that cannot be.
    """

    order: int
    parents: tuple["Cause", ...]
    has_nan: bool
    intended: bool
    location: Location | None


def parents_of(has_nan: bool, causes: Iterable[Cause]) -> tuple[Cause, ...]:
    """Those of some causes that account for a result: for a NaN, NaNs if there are."""
    parents = tuple(dict.fromkeys(causes))
    nans = tuple(cause for cause in parents if cause.has_nan)
    return nans if has_nan and nans else parents


def first_location(causes: Iterable[Cause]) -> Location | None:
    """The first operation, or argument, that some values are not finite for.

    In order of execution, among all that these were made of: what came in not finite,
    what overflowed on finite operands, and what made NaN of infinities that may be
    meant so, such as a mask's. If there is none of these, the first of such infinities.
    """
    ordered = sorted(
        (o for o in _with_ancestors(causes) if o.location), key=lambda o: o.order
    )
    for cause in ordered:
        parents = cause.parents
        if not parents and not cause.intended:
            return cause.location
        if parents and cause.has_nan and all(p.intended for p in parents):
            return cause.location
    return ordered[0].location if ordered else None


def names_of(causes: Iterable[Cause]) -> tuple[str, ...]:
    """What came in not finite, of all that some values were made of."""
    locations = (
        cause.location for cause in _with_ancestors(causes) if not cause.parents
    )
    return tuple(dict.fromkeys(e.primitive or e.operation for e in locations if e))


def _with_ancestors(causes: Iterable[Cause]) -> list[Cause]:
    """Some causes, and all those before them."""
    found: dict[Cause, None] = {}
    waiting = list(causes)
    while waiting:
        cause = waiting.pop()
        if cause not in found:
            found[cause] = None
            waiting += cause.parents
    return list(found)
