"""Stochastic rounding to bfloat16, with a hash instead of a random generator.

Rounding to nearest loses every change below half a unit. Stochastic rounding keeps the
mean. The bits are a hash of step, leaf and element. So the state has no key, and every
backend, sharding and resumed run has the same bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, BFloat16, Float, UInt32

WEIGHT = 2

# The bits of a float32 without its sign: the largest finite bfloat16, inf and NaN.
_LARGEST, INFINITY = np.uint32(0x7F7F0000), np.uint32(0x7F800000)
NAN, SIGN = np.uint32(0x7FC00000), np.uint32(0x80000000)


def mix(x: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    """Permutes the 32-bit numbers without a pattern: Wellons' lowbias32."""
    x = x + np.uint32(0x9E3779B9)  # otherwise, 0 would stay 0
    x = (x ^ (x >> 16)) * np.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * np.uint32(0x846CA68B)
    return x ^ (x >> 16)


def keys_of(count: ArrayLike, salts: Sequence[int]) -> UInt32[Array, " n"]:
    """Returns a key per leaf for the step after `count` steps, from the leaf's salt."""
    step = mix(jnp.asarray(count).astype(jnp.uint32))
    return mix(step + np.array(salts, np.uint32))


class Noise(NamedTuple):
    """Random bits for the elements of a leaf.

    Attributes:
        key: a key from `keys_of`, shape ().
        elements: the row-major indices of the elements in the whole leaf.
    """

    key: UInt32[Array, ""]
    elements: UInt32[Array, "*s"]

    def bits(self, place: int) -> UInt32[Array, "*s"]:
        """Returns 16 bits for a purpose: moment 0 or 1, or `WEIGHT`."""
        hashed = mix(self.key + self.elements)
        if place == WEIGHT:
            hashed = mix(hashed)
        return hashed >> 16 if place == 1 else hashed & np.uint32(0xFFFF)


@jax.custom_jvp
def rounded(x: Float[Array, "*s"], bits: UInt32[Array, "*s"]) -> Float[Array, "*s"]:
    """Rounds to one of the two bfloat16 around `x`, as a float32.

    The nearer one is more likely. Infinity stays, all NaNs of a sign become one NaN,
    and finite numbers stay finite. The derivative is 1.
    """
    # Bit operations, because arithmetic would flush subnormal numbers on a CPU.
    raw = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    size = raw & np.uint32(0x7FFFFFFF)
    finite = jnp.minimum((size + bits) & np.uint32(0xFFFF0000), _LARGEST)
    special = jnp.where(size > INFINITY, NAN, INFINITY)
    size = jnp.where(size < INFINITY, finite, special)
    return jax.lax.bitcast_convert_type((raw & SIGN) | size, jnp.float32)


rounded.defjvps(lambda tangent, *_: tangent.astype(jnp.float32), None)


def stochastic(x: Float[Array, "*s"], key: UInt32[Array, ""]) -> BFloat16[Array, "*s"]:
    """Rounds a leaf to bfloat16 with a key from `keys_of`, and keeps it finite."""
    limit = float(jnp.finfo(jnp.bfloat16).max)
    x = rounded(jnp.clip(x, -limit, limit), noise_like(x, key).bits(WEIGHT))
    return x.astype(jnp.bfloat16)


def noise_like(x: Array, key: UInt32[Array, ""]) -> Noise:
    """Returns random bits for a whole leaf with a key from `keys_of`."""
    return Noise(key, numbers_like(x, strides_of(x.shape)))


def strides_of(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the row-major strides of a shape, in elements."""
    return tuple(int(np.prod(shape[d + 1 :])) for d in range(len(shape)))


def numbers_like(x: Array, strides: Sequence[int]) -> UInt32[Array, "*s"]:
    """Returns the index of each element of `x` in a whole array with these strides."""
    sharding = jax.typeof(x).sharding
    number = jnp.zeros_like(x, jnp.uint32)
    for d, stride in enumerate(strides):
        place = jax.lax.broadcasted_iota(jnp.uint32, x.shape, d, out_sharding=sharding)
        number += place * np.uint32(stride % 2**32)
    return number


def numbers_of_flat(
    flat: UInt32[Array, "*s"], shape: Sequence[int], strides: Sequence[int]
) -> UInt32[Array, "*s"]:
    """Returns the index in the whole array of elements at flat indices of a part."""
    number, inner, reached = flat, 1, 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if stride != reached:  # the whole array is wider than the part
            further = np.uint32((stride - reached) % 2**32)
            number += flat // np.uint32(inner) * further
        inner, reached = inner * size, stride * size
    return number
