"""Marks of a model in a program: its params, what goes in, what comes out.

At O2, O3 and O5 a program is written in half for the sake of a model whose params are
half: its products are cast, and no others. The user's program sees these params in
float32, under a name, as `jax.ad_checkpoint.checkpoint_name` gives; other names say
where the model begins and ends.
"""

import enum
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jc

from jamp._core.dtypes import FLOAT32


class Source(enum.Flag):
    """What a value depends on."""

    HALF = enum.auto()  # params in half
    KEPT = enum.auto()  # params that stay float32
    DATA = enum.auto()  # all else that is not known while tracing


class Mark(NamedTuple):
    """What a name says of a value.

    Attributes:
        source: what it depends on from here on.
        is_half: whether it asks for half; None for what takes the dtype of what it
            meets.
    """

    source: Source
    is_half: bool | None


_HALF_PARAM, _KEPT_PARAM = "jamp_half_param", "jamp_kept_param"
_INPUT, _OUTPUT = "jamp_model_input", "jamp_model_output"
_MARKS = {
    _HALF_PARAM: Mark(Source.HALF, True),
    _KEPT_PARAM: Mark(Source.KEPT, False),
    _INPUT: Mark(Source.DATA, None),
    _OUTPUT: Mark(Source.DATA, False),
}


def mark_of(eqn: jc.JaxprEqn) -> Mark | None:
    """The mark that an equation sets, if it does."""
    is_name = eqn.primitive.name == "name"
    return _MARKS.get(eqn.params["name"]) if is_name else None


def shown_params[T](tree: T, half: Any) -> T:
    """Params as the user's program sees them: those in half as float32."""

    def leaf(x):
        dtype = getattr(x, "dtype", None)
        if dtype == half:
            return checkpoint_name(x.astype(FLOAT32), _HALF_PARAM)
        return checkpoint_name(x, _KEPT_PARAM) if dtype == FLOAT32 else x

    return jax.tree.map(leaf, tree)


def as_model_input[T](tree: T) -> T:
    """The float32 arrays of a tree as what goes into a model."""
    return _named(tree, _INPUT)


def as_model_output[T](tree: T) -> T:
    """The float32 arrays of a tree as what comes out of a model."""
    return _named(tree, _OUTPUT)


def _named[T](tree: T, name: str) -> T:
    def leaf(x):
        is_array = isinstance(x, jax.Array | np.ndarray) and x.dtype == FLOAT32
        return checkpoint_name(x, name) if is_array else x

    return jax.tree.map(leaf, tree)
