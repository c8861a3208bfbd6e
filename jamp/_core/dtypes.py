"""The dtypes that mixed precision casts, and the one function that rounds to half."""

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
# float8 and float4 arrays have their own scales, which a cast would lose.
CASTABLE_DTYPES = (*MODEL_DTYPES, jnp.dtype(jnp.float64))


def is_castable(x: Any) -> bool:
    """Returns whether `x` is an array (or its shape) of 16, 32 or 64-bit floats."""
    return hasattr(x, "dtype") and x.dtype in CASTABLE_DTYPES


def is_float(x: Any) -> bool:
    """Returns whether `x` is an array (or its shape) of floats, float8 included."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def is_half(x: Any) -> bool:
    """Returns whether `x` is an array (or its shape) in float16 or bfloat16."""
    return hasattr(x, "dtype") and x.dtype in HALF_DTYPES


def is_differentiable(x: object) -> bool:
    """Returns whether `jax.grad` accepts `x`: a float or complex number or array.

    It does not accept a reference, such as `jax.new_ref` returns.
    """
    dtype = getattr(x, "dtype", None)
    if dtype is None:
        return isinstance(x, float | complex)
    return _is_inexact(dtype) and not isinstance(x, jax.Ref)


@functools.cache  # a model has many leaves, and few dtypes
def _is_inexact(dtype: DTypeLike) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


@functools.partial(jax.jit, static_argnames="dtype", inline=True)
def cast(x: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Rounds `x` to `dtype`, and clamps it to the finite range of a half dtype.

    A param at infinity would become NaN at the next step; a clamped one recovers.
    Without jit, the casts of a model with a thousand leaves take five times as long.
    """
    x = jnp.asarray(x)
    if x.dtype != dtype:
        x = saturate(widen(x), dtype)
    return x.astype(dtype)


def cast_floats[T](tree: T, dtype: DTypeLike) -> T:
    """Casts the float arrays in the inputs or outputs of a model.

    Numbers of Python and NumPy do not change, so that Python can branch on them.
    """

    def leaf(x):
        is_array = isinstance(x, jax.Array | np.ndarray) and is_castable(x)
        return jnp.asarray(x).astype(dtype) if is_array else x

    return jax.tree.map(leaf, tree)
