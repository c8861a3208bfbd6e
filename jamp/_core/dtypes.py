"""Which dtypes mixed precision touches, and the one way to round to half."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from pallas_kernels import saturate, widen as widen

FLOAT32 = jnp.dtype(jnp.float32)
HALF_DTYPES = (jnp.dtype(jnp.float16), jnp.dtype(jnp.bfloat16))
MODEL_DTYPES = (FLOAT32, *HALF_DTYPES)
# float8 and float4 carry scales of their own: casting them here would lose those.
CASTABLE_DTYPES = (*MODEL_DTYPES, jnp.dtype(jnp.float64))


def is_castable(x: Any) -> bool:
    """Whether `x` is an array (or its shape) of 16, 32 or 64-bit floats."""
    return hasattr(x, "dtype") and x.dtype in CASTABLE_DTYPES


def is_float(x: Any) -> bool:
    """Whether `x` is an array (or its shape) of floats, float8 included."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def is_half(x: Any) -> bool:
    """Whether `x` is an array (or its shape) in float16 or bfloat16."""
    return hasattr(x, "dtype") and x.dtype in HALF_DTYPES


def is_differentiable(x: object) -> bool:
    """Whether `jax.grad` takes `x`: floats and complex numbers, arrays or Python's."""
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, float | complex)
    return _is_inexact(dtype)


@functools.cache  # a model has a thousand leaves of two dtypes
def _is_inexact(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


def names_dtype(field: Any, dtypes: tuple[Any, ...]) -> bool:
    """Whether a module's field, which may hold anything, names one of these dtypes."""
    try:
        return jnp.dtype(field) in dtypes
    except TypeError:
        return False


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def cast(x: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Rounds `x` to `dtype`; below float32, what is out of range is its largest finite.

    A half parameter at infinity would stay NaN; a clamped one recovers. It is jitted
    because a model has a thousand leaves: one operation at a time takes five times as
    long.
    """
    x = jnp.asarray(x)
    if x.dtype != dtype:
        x = saturate(widen(x), dtype)
    return x.astype(dtype)


def cast_floats[T](tree: T, dtype: DTypeLike) -> T:
    """Casts the float arrays of a tree of inputs or outputs; leaves all else alone.

    Numbers, NumPy's too, stay what Python can branch on.
    """

    def leaf(x):
        is_array = isinstance(x, jax.Array | np.ndarray) and is_castable(x)
        return jnp.asarray(x).astype(dtype) if is_array else x

    return jax.tree.map(leaf, tree)
