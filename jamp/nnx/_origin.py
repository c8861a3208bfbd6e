"""Which model an optimizer was made with, of models that are equal in shape.

Models and optimizer have an `Origin`. To JAX all are equal, so that a step is not
compiled again for a model of the same shapes: whether two belong together is asked
where a step is traced, and outside of jit.
"""

import dataclasses
import uuid
from typing import Any

from flax import nnx

from jamp.nnx._variables import Models, entries

_NAME = "_jamp_origin"
_REMEDY = (
    "it is not the one of this optimizer. Pass what one call of jamp.nnx.initialize "
    "returned."
)


@dataclasses.dataclass(frozen=True, eq=False)
class Origin:
    """A call of `initialize`, and the key of a model there."""

    call: str
    key: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Origin)

    def __hash__(self) -> int:
        return 0


def mark(models: Models) -> Origin:
    """Gives models an origin, and returns the optimizer's."""
    call = uuid.uuid4().hex
    for key, model in entries(models).items():
        if _can_be_marked(model):
            setattr(model, _NAME, Origin(call, key))
    return Origin(call, None)


def check_origin(models: Models, optimizer: Origin) -> None:
    """Raises for a model that another optimizer was made with."""
    for key, model in entries(models).items():
        origin = getattr(model, _NAME, None)
        if not _can_be_marked(model):
            continue
        if origin is None:
            whence = "has not gone through jamp.nnx.initialize"
        elif origin.call != optimizer.call:
            whence = "comes from another call of jamp.nnx.initialize"
        elif origin.key != key:
            whence = f"was {origin.key!r} in jamp.nnx.initialize"
        else:
            continue
        which = "The model" if key is None else f"The model {key!r}"
        raise ValueError(f"{which} {whence}: {_REMEDY}")


def _can_be_marked(model: nnx.Module) -> bool:
    """All that a bridged Linen model has goes to Linen as its variables."""
    return not isinstance(model, nnx.bridge.ToNNX)
