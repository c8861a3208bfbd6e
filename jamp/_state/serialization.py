"""Flax's serialization of states: as its own, but no dtype passes for another.

Flax itself puts whatever it finds into a target: a float16 state's params into a state
of bfloat16.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import serialization


def register(state_class: type) -> None:
    """Makes Flax check what it restores into states of a class."""
    serialization.register_serialization_state(
        state_class, _to_state_dict, _from_state_dict, override=True
    )


def _to_state_dict(state: Any) -> dict[str, Any]:
    return {
        name: serialization.to_state_dict(getattr(state, name))
        for name in _array_fields(state)
    }


def _from_state_dict(state: Any, state_dict: dict[str, Any]) -> Any:
    names = _array_fields(state)
    if set(names) != set(state_dict):
        raise ValueError(
            f"The state dict has the fields {sorted(state_dict)}, but a "
            f"{type(state).__name__} has {sorted(names)}. {_ADVICE}"
        )
    restored = state.replace(
        **{name: _field(name, getattr(state, name), state_dict[name]) for name in names}
    )
    jax.tree_util.tree_map_with_path(_check_leaf, state, restored)
    return restored


def _field(name: str, like: Any, value: Any) -> Any:
    try:
        return serialization.from_state_dict(like, value, name=name)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"The checkpoint's {name} differ from the state's: {error}. {_ADVICE}"
        ) from error


_ADVICE = (
    "Restore into a state that jamp.initialize made with the same options; a "
    "checkpoint for any opt level is made by jamp.to_checkpoint."
)


def _check_leaf(path: Any, like: Any, leaf: Any) -> None:
    given = jnp.shape(leaf), jnp.result_type(leaf)
    expected = jnp.shape(like), jnp.result_type(like)
    if given != expected:
        where = f"state{jax.tree_util.keystr(path)}"
        raise ValueError(
            f"The checkpoint has {where} of shape {given[0]} and dtype {given[1]}, but "
            f"the state wants {expected[0]} and {expected[1]}. {_ADVICE}"
        )


def _array_fields(state: Any) -> list[str]:
    fields = state.__dataclass_fields__.values()
    return [f.name for f in fields if f.metadata.get("pytree_node", True)]
