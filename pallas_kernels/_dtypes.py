"""Widening to float32."""

import jax.numpy as jnp
from jaxtyping import Array


def widen(x: Array) -> Array:
    """Half as float32; all else as it is."""
    return x.astype(jnp.float32) if x.dtype in (jnp.float16, jnp.bfloat16) else x
