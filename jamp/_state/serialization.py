"""Flax's serialization of states: as its own, but no dtype passes for another.

Flax itself puts whatever it finds into a target: a float16 state's params into a state
of bfloat16.
"""

from typing import Any

from flax import serialization
from jaxtyping import PyTree

from jamp._core.names import check_same
from jamp._scaling.incoming import check_counters, check_scale_state


def register(state_class: type) -> None:
    """Makes Flax check what it restores into states of a class."""
    serialization.register_serialization_state(
        state_class, _to_state_dict, _from_state_dict, override=True
    )


def _to_state_dict(state: PyTree) -> dict[str, Any]:
    return {
        name: serialization.to_state_dict(getattr(state, name))
        for name in array_fields(state)
    }


def _from_state_dict(state: PyTree, state_dict: dict[str, Any]) -> Any:
    check_same(
        state_dict,
        _to_state_dict(state),
        "The checkpoint",
        "Restore into a state that jamp.initialize made with the same options; a "
        "checkpoint for any opt level is made by jamp.to_checkpoint.",
    )
    for i, rule in enumerate(state.loss_scale_rules):
        scale_state = state_dict["loss_scales"][str(i)]
        check_scale_state(f"loss_scales/{i}", scale_state, rule)
    check_counters(state_dict)
    fields = {name: _restored(state, name, x) for name, x in state_dict.items()}
    return state.replace(**fields)


def _restored(state: PyTree, name: str, value: PyTree) -> Any:
    try:
        return serialization.from_state_dict(getattr(state, name), value, name=name)
    except KeyError as error:  # of what holds no arrays, which the check does not see
        raise ValueError(f"The checkpoint has no {error} in {name}.") from None


def array_fields(state: PyTree) -> list[str]:
    """The names of the fields that hold arrays; the others are static."""
    fields = state.__dataclass_fields__.values()
    return [f.name for f in fields if f.metadata.get("pytree_node", True)]
