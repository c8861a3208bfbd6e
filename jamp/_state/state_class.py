"""AmpState's subclasses for undeclared extra fields, and where pickle finds states."""

import functools
import re
from collections.abc import Collection
from typing import Any

from jamp._state.amp_state import AmpState

_NAME = re.compile(r"AmpState\[(\w+(?:,\w+)*)\]")


def state_class_with[S: AmpState](
    state_class: type[S], fields: Collection[str]
) -> type[S]:
    """`state_class`, with the fields that it does not declare.

    Raises:
        TypeError: a subclass of the user's does not declare a field.
    """
    undeclared = sorted(set(fields) - set(state_class.__dataclass_fields__))
    if not undeclared:
        return state_class
    if state_class is not AmpState:
        raise TypeError(
            f"{state_class.__name__} declares no field {undeclared[0]!r}: add "
            f"`{undeclared[0]}: Any` to it."
        )
    return _subclass(tuple(undeclared))  # pyright: ignore[reportReturnType]


def __getattr__(name: str) -> Any:
    """Where pickle finds `AmpState[batch_stats]`."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _subclass(tuple(match[1].split(",")))


@functools.cache
def _subclass(names: tuple[str, ...]) -> type[AmpState]:
    """Made once per set of names: a fresh class per call would retrace."""
    body = {"__annotations__": dict.fromkeys(names, Any), "__module__": __name__}
    return type(f"AmpState[{','.join(names)}]", (AmpState,), body)
