"""Which policy a model runs under, and what it does where a model begins and ends.

A policy is entered together with a `jax.make_user_context` value, which is part of the
key of JAX's trace caches: a function jitted outside is traced again inside, and back.
"""

import jax

from jamp._core.dtypes import cast_floats
from jamp._policy.levels import Properties

# `policy.value` is the innermost; `with policy(properties)` makes these the innermost.
policy = jax.make_user_context(default_value=None)


def cast_inputs[T](tree: T, properties: Properties) -> T:
    """Casts the float arrays that enter a model."""
    dtype = properties.cast_model_type
    return cast_floats(tree, dtype) if dtype else tree


def cast_outputs[T](tree: T, properties: Properties) -> T:
    """Casts the float arrays that leave a model."""
    dtype = properties.output_dtype
    return tree if dtype is None else cast_floats(tree, dtype)
