"""One model or several: the groups of a state, and the containers that hold them.

A group is a params tree with an optimizer of its own. A state has one group, whose key
is None, or several in a list, tuple or dict, with the keys of that container.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Protocol

from flax.core import FrozenDict

from jamp._core.tree import mapping_like

type Key = Hashable | None
# What `wrt=` takes: a key, several, or None for all groups.
type Wrt = Key | Sequence[Key]

SINGLE: Key = None


class HasGroups(Protocol):
    """The per-group parts of a state, in one tree or in containers."""

    @property
    def params(self) -> Any: ...
    @property
    def tx(self) -> Any: ...
    @property
    def opt_state(self) -> Any: ...


def is_transformation(tx: object) -> bool:
    """Whether `tx` is an optax transformation: which is itself a tuple."""
    return hasattr(tx, "init") and hasattr(tx, "update")


def check_transformation(name: str, tx: object) -> None:
    """Raises unless `tx`, which an optimizer of a name wraps, is optax's pair."""
    if not is_transformation(tx):
        raise TypeError(f"{name} takes an optax transformation, got {tx!r}.")


def group_keys(tx: Any) -> tuple[Key, ...]:
    """The keys of the groups, given a state's `tx`."""
    if tx is None or is_transformation(tx):
        return (SINGLE,)
    return tuple(tx) if isinstance(tx, Mapping) else tuple(range(len(tx)))


def get(container: Any, key: Key) -> Any:
    """The entry of one group."""
    return container if key is SINGLE else container[key]


def split(container: Any, keys: tuple[Key, ...]) -> dict[Key, Any]:
    """The entries of all groups, by key."""
    return {key: get(container, key) for key in keys}


def pack(values: Mapping[Key, Any], like: Any) -> Any:
    """The values of all groups in a container of the kind of `like`.

    A group without a value has no entry in a mapping, and None elsewhere.
    """
    if SINGLE in values:
        return values[SINGLE]
    if isinstance(like, Mapping):
        return mapping_like(like, {key: values[key] for key in like if key in values})
    entries = [values.get(key) for key in range(len(like))]
    return like._make(entries) if hasattr(like, "_make") else type(like)(entries)


def pack_hashable(values: Mapping[Key, Any], like: Any) -> Any:
    """Like `pack`, in a container that hashes by value: a tuple or a FrozenDict."""
    packed = pack(values, like)
    if SINGLE in values:
        return packed
    return FrozenDict(packed) if isinstance(like, Mapping) else tuple(packed)


def is_per_group(value: object, keys: tuple[Key, ...]) -> bool:
    """Whether a field holds one entry per group: a mapping with exactly their keys.

    The keys of groups in a list or tuple are their positions. A sequence is never per
    group: a NamedTuple of an optimizer may be as long as there are groups.
    """
    several = keys != (SINGLE,)
    return several and isinstance(value, Mapping) and set(value) == set(keys)


def resolve_wrt(wrt: Wrt, keys: tuple[Key, ...]) -> tuple[Key, ...]:
    """The groups that `wrt` names: a key, a sequence of keys, or None for all."""
    if wrt is None:
        return keys
    named = tuple(wrt) if isinstance(wrt, list | tuple) else (wrt,)
    if not named or len(set(named)) < len(named):
        raise ValueError(f"wrt={wrt!r} must name groups, each once.")
    if keys == (SINGLE,):
        raise ValueError(f"wrt={wrt!r}, but the state has one group: leave wrt out.")
    if unknown := set(named).difference(keys):
        raise ValueError(
            f"wrt={wrt!r}: {unknown.pop()!r} is not one of the groups {list(keys)}."
        )
    return named


def pack_wrt(values: Mapping[Key, Any], wrt: Wrt, like: Any) -> Any:
    """The value of the one group that `wrt` names, else the container of all."""
    if wrt is None or isinstance(wrt, list | tuple):
        return pack(values, like)
    return values[wrt]
