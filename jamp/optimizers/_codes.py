"""Three formats of moments in 8 bits, relative to a scale, with stochastic rounding.

A scale for each block is the idea of Dettmers et al., *8-bit Optimizers via Block-wise
Quantization*, 2022, arXiv:2110.02861. The formats are not theirs:

- `FIRST`: a float for a moment that a root divides, so that small ones are precise too.
- `SECOND`: a float for the root of a second moment. No positive one becomes 0.
- `MOMENTUM`: a square, for a moment that is the update, so that large ones are precise.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from jamp._core.tree import KeyPath, select
from pallas_kernels import Noise, computed_once

FIRST, SECOND = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.uint8)
MOMENTUM = jnp.dtype(jnp.int8)
_MOST_SQUARE = np.float32(127**2)
_MOST_FIRST, _MOST_ROOT = np.float32(448), np.float32(31 * 2**14)
_NEAREST = np.uint32(0x8000)  # instead of 16 random bits


class EightBit(NamedTuple):
    """A moment in 8 bits per element, in blocks along the last axis.

    Attributes:
        codes: shape (..., n). A first moment has float8_e4m3fn. A momentum has int8,
            for signed squares. A second moment has uint8: floats of 4 exponent and 4
            mantissa bits for the root.
        scales: the magnitude or the root of the largest code, shape (..., n / block),
            float32.
    """

    codes: Array
    scales: Float[Array, "..."]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the moment."""
        return self.codes.shape

    @property
    def root(self) -> Float[Array, "..."]:
        """The root of a second moment."""
        code = self.codes.astype(jnp.uint32)
        base, least = _bounds(code < 16)
        size = jax.lax.bitcast_convert_type((code + base) << 19, jnp.float32) - least
        return size * _each(self.scales / _MOST_ROOT, self.codes)

    @property
    def value(self) -> Float[Array, "..."]:
        """The moment."""
        if self.codes.dtype == SECOND:
            return self.root * self.root
        code = self.codes.astype(jnp.float32)
        if self.codes.dtype == FIRST:
            return code * _each(self.scales / _MOST_FIRST, self.codes)
        return code * jnp.abs(code) * _each(self.scales / _MOST_SQUARE, self.codes)


def is_eight_bit(x: object) -> bool:
    """Returns whether `x` is a moment with codes and scales."""
    return isinstance(x, EightBit)


def block_of(x: Any) -> int | None:
    """Returns the length of an array's blocks. Without any, moments are bfloat16."""
    shape = np.shape(x)
    if math.prod(shape) < 4096:
        return None
    return next((block for block in (256, 128, 64) if shape[-1] % block == 0), None)


def zeros_like(x: Array, dtype: Any) -> EightBit:
    """Returns a moment of zeros, sharded like `x`."""
    return EightBit(jnp.zeros_like(x, dtype), jnp.zeros_like(largest(x)))


def encoded(
    x: Array, dtype: Any, bits: Any = _NEAREST, scales: Array | None = None
) -> EightBit:
    """Returns a moment in 8 bits.

    Args:
        x: the moment in float32.
        dtype: the dtype of its codes.
        bits: 16 random bits for each element, or the bits that round to nearest.
        scales: bounds of its roots in each block; None means its maxima.
    """
    if dtype != SECOND:
        scales, to_codes = largest(x), _first_codes if dtype == FIRST else _squares
        return EightBit(to_codes(x, _each(scales, x), bits), scales)
    scales = jnp.sqrt(largest(x)) if scales is None else scales
    root = jnp.sqrt(x)
    upper, is_low = _rounded(root, _each(scales, x), _MOST_ROOT, 16.0, 19, bits)
    code = upper - _bounds(is_low)[0]
    code = jnp.maximum(code, (x > 0).astype(jnp.uint32))
    return EightBit(code.astype(SECOND), scales)


def is_relative(leaf: Mapping[str, Any]) -> bool:
    """Returns whether the first moment of a leaf is relative to the second one."""
    return getattr(leaf.get("mu"), "dtype", None) == FIRST


def widened(leaf: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the moments of a leaf without 8-bit formats, by name."""
    wide = {name: x.value if is_eight_bit(x) else x for name, x in leaf.items()}
    if is_relative(leaf):
        wide["mu"] = leaf["mu"].astype(jnp.float32) * (leaf["nu"].root / 8)
    return wide


def narrowed(
    wide: Mapping[str, Array],
    like: Mapping[str, Any],
    noise: Noise | None = None,
    scales: Array | None = None,
    skip: Array | None = None,
) -> dict[str, Any]:
    """Returns the moments of a leaf in the formats of `like`.

    Args:
        wide, like: moments by name.
        noise: random bits; None rounds to nearest.
        scales: bounds of the roots of `nu` in each block; None means their maxima.
        skip: whether to return `like`, shape (), bool.
    """
    new = {}
    for name, x in wide.items():
        bits = _NEAREST if noise is None else noise.bits(int(name == "nu"))
        if is_eight_bit(like[name]):
            new[name] = encoded(x, like[name].codes.dtype, bits, scales)
        else:
            new[name] = x.astype(like[name].dtype)
    if is_relative(like):
        # The codes are 8 m / sqrt(v), and at most 448. A ratio needs no block.
        new["nu"] = computed_once(new["nu"])
        bits = _NEAREST if noise is None else noise.bits(0)
        scale = new["nu"].root * (_MOST_FIRST / 8)
        new["mu"] = _first_codes(wide["mu"], scale, bits)
    return new if skip is None else select(~skip, new, dict(like))


def check_dtype(path: KeyPath, param: Any) -> None:
    """Raises a TypeError for a param whose moments cannot have 8 bits."""
    if jnp.result_type(param) == jnp.float64 or jnp.iscomplexobj(param):
        raise TypeError(
            f"params{jax.tree_util.keystr(path)} is {jnp.result_type(param)}: moments "
            "in 8 bits need float16, bfloat16 or float32 params. Step the others with "
            "another optimizer: optax.multi_transform."
        )


def largest(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the largest magnitude of each block, in float32; NaN if one is."""
    x = x.astype(jnp.float32) if x.dtype == jnp.float64 else x
    # XLA's maximum of floats on a CPU loses NaN. The bits of NaN are the largest.
    kind, sign = (np.uint16, 2**15) if x.dtype.itemsize == 2 else (np.uint32, 2**31)
    size = jax.lax.bitcast_convert_type(x, kind) & kind(sign - 1)
    most = jnp.max(_blocks(size), -1)
    return jax.lax.bitcast_convert_type(most, x.dtype).astype(jnp.float32)


def _blocks(x: Array) -> Array:
    """Splits the last axis into blocks. They are sharded, unless a shard cuts one."""
    block = block_of(x)
    assert block is not None
    shape = (*x.shape[:-1], x.shape[-1] // block, block)
    sharding = jax.typeof(x).sharding
    *rest, last = sharding.spec
    axes = last if isinstance(last, tuple) else (last,)
    shards = math.prod([sharding.mesh.shape[a] for a in axes if a is not None])
    spec = PartitionSpec(*rest, None if shape[-2] % shards else last, None)
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(sharding.mesh, spec))


def _each(scales: Array, like: Array) -> Array:
    """Returns the scale of each element."""
    block = like.shape[-1] // scales.shape[-1]
    each = jnp.broadcast_to(scales[..., None], (*scales.shape, block))
    return jax.lax.reshape(each, like.shape, out_sharding=jax.typeof(like).sharding)


def _first_codes(x: Array, scale: Array, bits: Any) -> Array:
    """Rounds elements to float8_e4m3fn, relative to the scale of each."""
    least = np.float32(2.0**-6)
    upper, is_low = _rounded(jnp.abs(x), scale, _MOST_FIRST, least, 20, bits)
    size = jax.lax.bitcast_convert_type(upper << 20, jnp.float32)
    size = size - jnp.where(is_low, least, np.float32(0))
    return jnp.copysign(size, x).astype(FIRST)


def _squares(x: Array, scale: Array, bits: Any) -> Array:
    """Rounds elements to signed squares of integers, relative to the scale of each."""
    size = _ratio(jnp.abs(x), scale) * _MOST_SQUARE
    low = jnp.floor(jnp.sqrt(size))
    limit = (65535.5 - bits.astype(jnp.float32)) / 65536
    low = low + (size - low * low >= limit * (2 * low + 1))
    return jnp.copysign(low, x).astype(MOMENTUM)


def _ratio(size: Array, scale: Array) -> Array:
    return jnp.where(scale == 0, 0, size / scale)


def _rounded(
    size: Array, scale: Array, most: Any, least: Any, dropped: int, bits: Any
) -> tuple[Array, Array]:
    """Returns the upper bits of `size / scale * most`, and whether it is subnormal.

    It drops bits of the mantissa, and rounds up with the probability of what it drops.
    Below `least`, all numbers have one spacing: the bits are those of a number that is
    larger by `least`.
    """
    size = jnp.minimum(
        _ratio(size, scale) * most, most
    )  # the scale may be a rounded bound
    is_low = size < least
    size = jnp.where(is_low, size + np.float32(least), size)
    # The centers of 65536 intervals: rounding errors in `size` do not change a code.
    noise = (bits << (dropped - 16)) + np.uint32(1 << (dropped - 17))
    upper = jax.lax.bitcast_convert_type(size, jnp.uint32) + noise
    return upper >> np.uint32(dropped), is_low


def _bounds(is_low: Array) -> tuple[Array, Array]:
    """Returns the bits and the value that subnormal roots have too much.

    Subnormal roots are 0, ..., 15, with the bits of 16, ..., 31.
    """
    base = jnp.where(is_low, np.uint32(131 * 16), np.uint32(130 * 16))
    return base, jnp.where(is_low, np.float32(16), np.float32(0))
