"""Multiplies by a weight that all trips of a loop share, and sums its gradient apart.

That gradient is a sum of products, one of each trip. Rounded to half, each would be
written, read and added by kernels of their own. XLA for CUDA adds a float32 product of
half operands where it computes it: two thirds of the bytes, and one rounding less. It
would merge the products of several weights with one cotangent, and add slices of the
result; with copies of the cotangent it does not.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.typing import DTypeLike

from jamp._autocast.bias import apart
from jamp._core.dtypes import FLOAT32

# Compute capabilities before Ampere: XLA refuses an algorithm for bfloat16 there.
_BEFORE_AMPERE = ("5.", "6.", "7.")


@functools.lru_cache(maxsize=256)
def with_weight(numbers: Any, first: bool, copies: int) -> Callable[..., Array]:
    """What multiplies a half array by a float32 weight, given a half copy of that too.

    Args:
        numbers: the axes, as `jax.lax.dot_general` takes them.
        first: whether the weight is the first operand there.
        copies: how many copies of the cotangent other products read.
    """

    def dot(x: Array, weight: Array, dtype: DTypeLike, precision: Any = None) -> Array:
        operands = (weight, x) if first else (x, weight)
        return jax.lax.dot_general(
            *operands, numbers, precision=precision, preferred_element_type=dtype
        )

    @jax.custom_jvp
    def product(x: Array, weight: Array, in_half: Array) -> Array:
        return dot(x, in_half, x.dtype)

    def in_float32(x: Array, weight: Array) -> Array:
        # The algorithm says what the operands are cast to, the cotangent too.
        half_operands = jax.lax.DotAlgorithm(x.dtype, x.dtype, FLOAT32)
        return dot(x, weight, FLOAT32, half_operands).astype(x.dtype)

    def derivative(primals, tangents):
        (x, weight, in_half), (of_x, of_weight, _) = primals, tangents
        half = x.dtype
        known = [] if isinstance(of_x, SymbolicZero) else [dot(of_x, in_half, half)]
        if not isinstance(of_weight, SymbolicZero):
            rounded = lambda x, w: dot(x, w.astype(half), half)  # noqa: E731
            on_cuda = in_float32 if has_algorithm(half) else rounded
            tangent = jax.lax.platform_dependent(
                x, of_weight, cuda=on_cuda, default=rounded
            )
            for _ in range(copies):
                tangent = apart(tangent)
            known.append(tangent)
        return product(x, weight, in_half), sum(known[1:], known[0])

    product.defjvp(derivative, symbolic_zeros=True)
    return product


def has_algorithm(half: DTypeLike) -> bool:
    """Whether XLA takes an algorithm for a half dtype on the GPUs here."""
    found = [getattr(d, "compute_capability", "") for d in jax.local_devices()]
    old = any(str(capability).startswith(_BEFORE_AMPERE) for capability in found)
    return half == jnp.float16 or not old
