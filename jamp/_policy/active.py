"""Which policy a model runs under, and what it does where a model begins and ends.

A policy is entered together with a `jax.make_user_context` value, which is part of the
key of JAX's trace caches: a function jitted outside is traced again inside, and back.
"""

import jax

from jamp._autocast.model import at_boundary
from jamp._core.dtypes import FLOAT32, cast_floats
from jamp._policy.levels import Properties

# `policy.value` is the innermost; `with policy(properties)` makes these the innermost.
policy = jax.make_user_context(default_value=None)


def model_inputs[T](tree: T, properties: Properties) -> T:
    """What enters a model: float32, at the half levels rounded where half reads it."""
    tree = cast_floats(tree, FLOAT32) if properties.cast_model_type else tree
    return at_boundary(tree) if properties.half_dtype else tree


def model_outputs[T](tree: T, properties: Properties) -> T:
    """What leaves a model: in float32, or as `cast_model_outputs` says."""
    if properties.half_dtype:
        tree = at_boundary(cast_floats(tree, FLOAT32))
    dtype = properties.output_dtype
    return tree if dtype is None else cast_floats(tree, dtype)
