"""The groups of a state, and the containers that hold one value per group.

A group is a params tree with its own optimizer. A state has one group, whose key is
None, or several groups in a list, tuple or dict, with the keys of that container.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from flax.core import FrozenDict

from jamp._core.tree import mapping_like

type Key = Hashable | None
# The argument `wrt=`: a key, several keys, or None for all groups.
type Wrt = Key | Sequence[Key]

SINGLE: Key = None
CONTAINERS = list, tuple, dict, FrozenDict


class HasGroups(Protocol):
    """The fields of a state with one value per group."""

    @property
    def params(self) -> Any: ...
    @property
    def tx(self) -> Any: ...
    @property
    def opt_state(self) -> Any: ...


def is_transformation(tx: object) -> bool:
    """Returns whether `tx` is a transformation. A plain tuple may be a container."""
    return hasattr(tx, "init") and hasattr(tx, "update")


def check_transformation(name: str, tx: object) -> None:
    """Raises unless `tx`, an argument of the optimizer `name`, is a transformation."""
    if not is_transformation(tx):
        raise TypeError(f"{name} takes an optax transformation, got {tx!r}.")


def split(container: Any, tx: Any) -> dict[Key, Any]:
    """Returns the values of the groups by key, which are the keys of `tx`."""
    if type(tx) not in CONTAINERS:  # a transformation is a namedtuple
        return {SINGLE: container}
    keys = tx if isinstance(tx, Mapping) else range(len(tx))
    return {key: container[key] for key in keys}


def get(container: Any, key: Key) -> Any:
    """Returns the value of one group."""
    return container if key is SINGLE else container[key]


def pack(values: Mapping[Key, Any], like: Any) -> Any:
    """Puts the values of all groups into a container of the same type as `like`.

    A group without a value has no entry in a mapping, and None in a sequence.
    """
    if SINGLE in values:
        return values[SINGLE]
    if isinstance(like, Mapping):
        return mapping_like(like, {key: values[key] for key in like if key in values})
    return type(like)(values.get(key) for key in range(len(like)))


def pack_hashable(values: Mapping[Key, Any], like: Any) -> Any:
    """Like `pack`, but returns a tuple or a FrozenDict, which hash by value."""
    packed = pack(values, like)
    if SINGLE in values:
        return packed
    return FrozenDict(packed) if isinstance(like, Mapping) else tuple(packed)


def resolve_wrt(wrt: Wrt, keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """Returns the keys that `wrt` names."""
    if wrt is None:
        return keys
    several: Any = wrt
    named = (wrt,) if _is_key(wrt, keys) else tuple(several)
    if not named or len(set(named)) < len(named):
        raise ValueError(f"wrt={wrt!r} must name groups, each once.")
    if keys == (SINGLE,):
        raise ValueError(f"wrt={wrt!r}, but the state has one group: leave wrt out.")
    if unknown := [key for key in named if key not in keys]:
        raise ValueError(
            f"wrt={wrt!r}: {unknown[0]!r} is not one of the groups {list(keys)}."
        )
    return named


def pack_wrt(values: Mapping[Key, Any], wrt: Wrt, like: Any) -> Any:
    """Returns the value of one group if `wrt` is a key, and otherwise the container."""
    if wrt is None or not _is_key(wrt, tuple(values)):
        return pack(values, like)
    return values[wrt]


def _is_key(wrt: Any, keys: tuple[Key, ...]) -> bool:
    """Returns whether `wrt` is one key rather than several; a key may be a tuple."""
    return not isinstance(wrt, list | tuple) or wrt in keys
