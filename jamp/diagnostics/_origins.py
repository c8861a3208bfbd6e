"""Where inf and NaN come from: each value that is not finite knows those before it."""

import dataclasses
from collections.abc import Iterable

from jamp.diagnostics._location import Location


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """A value that is not finite.

    Attributes:
        order: the place of what made it, in order of execution.
        parents: what is not finite among what it was made of.
        has_nan: whether it holds NaN.
        intended: whether it may be meant so: an infinity in the program, as a mask's,
            or in the arguments, and no NaN.
        event: what to report if it is the first; None if that cannot be.
    """

    order: int
    parents: tuple["Origin", ...]
    has_nan: bool
    intended: bool
    event: Location | None


def parents_of(has_nan: bool, origins: Iterable[Origin]) -> tuple[Origin, ...]:
    """Those of some origins that account for a result: for a NaN, NaNs if there are."""
    parents = tuple(dict.fromkeys(origins))
    nans = tuple(origin for origin in parents if origin.has_nan)
    return nans if has_nan and nans else parents


def first_event(origins: Iterable[Origin]) -> Location | None:
    """The first operation, or argument, that some values are not finite for.

    In order of execution, among all that these were made of: what came in not finite,
    what overflowed on finite operands, and what made NaN of infinities that may be
    meant so, such as a mask's. If there is none of these, the first of such infinities.
    """
    ordered = sorted((o for o in _all(origins) if o.event), key=lambda o: o.order)
    for origin in ordered:
        parents = origin.parents
        if not parents and not origin.intended:
            return origin.event
        if parents and origin.has_nan and all(p.intended for p in parents):
            return origin.event
    return ordered[0].event if ordered else None


def names_of(origins: Iterable[Origin]) -> tuple[str, ...]:
    """What came in not finite, of all that some values were made of."""
    events = (origin.event for origin in _all(origins) if not origin.parents)
    return tuple(dict.fromkeys(e.primitive or e.operation for e in events if e))


def _all(origins: Iterable[Origin]) -> list[Origin]:
    """Some origins, and all those before them."""
    found: dict[Origin, None] = {}
    waiting = list(origins)
    while waiting:
        origin = waiting.pop()
        if origin not in found:
            found[origin] = None
            waiting += origin.parents
    return list(found)
