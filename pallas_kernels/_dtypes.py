"""Widening to float32, and the dtypes that a kernel can hold."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

_FLOAT32 = jnp.dtype(jnp.float32)
_HALF = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
_ON_GPU = (*_HALF, _FLOAT32, jnp.dtype(jnp.uint16))


def widen(x: Array) -> Array:
    """Half as float32; all else as it is."""
    return x.astype(widened_dtype(x.dtype))


def widened_dtype(dtype: Any) -> Any:
    """The dtype in which a formula sees a column."""
    return _FLOAT32 if dtype in _HALF else dtype


def fits_kernel(x: Array) -> bool:
    """Whether Mosaic kernels handle the dtype of `x`."""
    return x.dtype in _ON_GPU
