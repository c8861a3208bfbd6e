"""Marks of a model in a program: its params, and where it begins and ends.

    w:f32 = name[name=jamp_half_param] p      what depends on w is in half
    x:f32 = name[name=jamp_model_boundary] a  here it begins: no longer on what a did

At O2, O3 and O5 a program is written in half for the sake of a model whose params are
half: its products are cast, and no others. The user's program sees these params in
float32, under a name, as `jax.ad_checkpoint.checkpoint_name` gives.
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
    """What a name says of a value."""

    source: Source  # what it depends on from here on
    is_half: bool  # whether it asks for half, or for float32


_HALF_PARAM, _KEPT_PARAM = "jamp_half_param", "jamp_kept_param"
_BOUNDARY = "jamp_model_boundary"
_MARKS = {
    _HALF_PARAM: Mark(Source.HALF, is_half=True),
    _KEPT_PARAM: Mark(Source.KEPT, is_half=False),
    _BOUNDARY: Mark(Source.DATA, is_half=False),
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


def at_boundary[T](tree: T) -> T:
    """Marks the float32 arrays of a tree as inputs or outputs of a model."""

    def leaf(x):
        is_array = isinstance(x, jax.Array | np.ndarray) and x.dtype == FLOAT32
        return checkpoint_name(x, _BOUNDARY) if is_array else x

    return jax.tree.map(leaf, tree)
