"""Moments in 8 bits: two formats, relative to a scale, and stochastic rounding.

A scale for each block is the idea of Dettmers et al., *8-bit Optimizers via Block-wise
Quantization*, 2022, arXiv:2110.02861. The formats are not theirs: both are floats, a
second moment is stored as its root, and no positive one becomes 0.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float, UInt8, UInt32

from jamp._core.tree import KeyPath, select
from pallas_kernels import computed_once, noise_like

FIRST, SECOND = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.uint8)
BLOCKS, SMALLEST = (256, 128, 64), 4096
NEAREST = np.uint32(0x8000)  # instead of random bits
# The largest numbers of the formats. The smallest root is 1.
_MOST, _MOST_ROOT = np.float32(448), np.float32(31 * 2**14)


class EightBit(NamedTuple):
    """A moment in 8 bits per element, in blocks along the last axis.

    Attributes:
        codes: shape (..., n). A first moment has float8_e4m3fn. A second moment has
            uint8: floats of 4 exponent and 4 mantissa bits for the root.
        scales: the magnitude or root that the largest code means, shape (...,
            n / block), float32.
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
        base, start = _start(code < 16)
        units = _float((code + base) << 19) - start
        return units * spread(self.scales / _MOST_ROOT, self.codes)

    @property
    def value(self) -> Float[Array, "..."]:
        """The moment."""
        if self.codes.dtype == SECOND:
            return self.root * self.root
        return self.codes.astype(jnp.float32) * spread(self.scales / _MOST, self.codes)


def is_eight_bit(x: object) -> bool:
    """Returns whether `x` is a moment in 8 bits."""
    return isinstance(x, EightBit)


def block_of(x: Any) -> int | None:
    """Returns the length of the blocks of an array, or None if it has no blocks."""
    shape = np.shape(x)
    if np.prod(shape) < SMALLEST:
        return None
    return next((b for b in BLOCKS if shape[-1] % b == 0), None)


def check_dtype(path: KeyPath, param: Any) -> None:
    """Raises a TypeError for a param whose moments cannot have 8 bits."""
    if param.dtype == jnp.float64 or jnp.iscomplexobj(param):
        raise TypeError(
            f"params{jax.tree_util.keystr(path)} is {param.dtype}: moments in 8 bits "
            "need float16, bfloat16 or float32 params. Keep its moments in float64 or "
            "complex numbers with optax.multi_transform."
        )


def zeros_like(x: Array, dtype: Any) -> EightBit:
    """Returns a moment of zeros, sharded like `x`."""
    return EightBit(jnp.zeros_like(x, dtype), jnp.zeros_like(largest(x)))


def encoded(
    x: Float[Array, "..."], like: EightBit, bits: UInt32[Array, "..."] | np.uint32
) -> EightBit:
    """Returns a moment in the format of `like`, relative to the blocks' maxima."""
    scales = largest(x)
    if like.codes.dtype == FIRST:
        return EightBit(first_codes(x, spread(scales, x), bits), scales)
    scales = jnp.sqrt(scales)
    return EightBit(second_codes(jnp.sqrt(x), spread(scales, x), bits), scales)


@jax.jit
def widened(leaf: Mapping[str, Any]) -> dict[str, Array]:
    """Returns the moments of one leaf of a fused optimizer, without 8-bit formats."""
    wide = {name: x.value if is_eight_bit(x) else x for name, x in leaf.items()}
    if is_relative(leaf):
        wide["mu"] = leaf["mu"].astype(jnp.float32) * (leaf["nu"].root / 8)
    return wide


@jax.jit
def narrowed(
    new: Mapping[str, Array],
    old: Mapping[str, Any],
    skip: Array | None,
    key: Array,
    scales: Array | None,
) -> dict[str, Any]:
    """Returns the moments of one leaf in the formats of `old`.

    Args:
        new, old: the new moments in float32, and those before.
        skip: whether to keep `old`.
        key: the key of the random bits.
        scales: bounds of the roots of the second moment in each block.
    """
    new = dict(new)
    for name, x in new.items():
        if name == "nu" and scales is not None:
            bits, root = noise_like(x, key).bits(1), jnp.sqrt(x)
            codes = second_codes(root, spread(scales, x), bits)
            new[name] = computed_once(EightBit(codes, scales))
        elif is_eight_bit(old[name]):
            new[name] = encoded(x, old[name], noise_like(x, key).bits(0))
    if is_relative(old):
        # 8 m / sqrt(v), which is at most 448
        m, root = new["mu"], new["nu"].root
        new["mu"] = first_codes(m, root * (_MOST / 8), noise_like(m, key).bits(0))
    return new if skip is None else select(~skip, new, dict(old))


def is_relative(leaf: Mapping[str, Any]) -> bool:
    """Returns whether the first moment is stored relative to the second one's root."""
    return getattr(leaf.get("mu"), "dtype", None) == FIRST


def first_codes(x: Array, scale: Array, bits: Any) -> Array:
    """Rounds elements to float8_e4m3fn, relative to the scale of each."""
    size = jnp.minimum(_ratio(jnp.abs(x), scale) * _MOST, _MOST)
    upper, is_low = _rounded(size, 2.0**-6, 20, bits)
    size = _float(upper << 20) - jnp.where(is_low, np.float32(2.0**-6), 0)
    return jnp.copysign(size, x).astype(FIRST)


def second_codes(root: Array, scale: Array, bits: Any) -> UInt8[Array, "..."]:
    """Rounds roots to floats of 4 exponent and 4 mantissa bits, and none to 0."""
    size = jnp.minimum(_ratio(root, scale) * _MOST_ROOT, _MOST_ROOT)
    upper, is_low = _rounded(size, 16.0, 19, bits)
    code = upper - _start(is_low)[0]
    return jnp.maximum(code, (root > 0).astype(jnp.uint32)).astype(SECOND)


def _start(is_low: Array) -> tuple[Array, Array]:
    """Returns where codes of subnormal or normal roots start, as bits and as float.

    The roots 0, ..., 15 are subnormal. Their bits are those of 16, ..., 31.
    """
    base = jnp.where(is_low, np.uint32(131 * 16), np.uint32(130 * 16))
    return base, jnp.where(is_low, np.float32(16), np.float32(0))


def _rounded(size: Array, least: float, dropped: int, bits: Any) -> tuple[Array, Array]:
    """Drops bits of the mantissa, and rounds up with their probability.

    Below `least`, all numbers have the spacing at `least`: `size + least` is rounded.
    """
    is_low = size < np.float32(least)
    size = jnp.where(is_low, size + np.float32(least), size)
    # The middle of 65536 intervals, so that an error of rounding flips no exact number.
    noise = (bits << (dropped - 16)) + np.uint32(1 << (dropped - 17))
    return (jax.lax.bitcast_convert_type(size, jnp.uint32) + noise) >> dropped, is_low


def _ratio(size: Array, scale: Array) -> Array:
    return jnp.where(scale == 0, 0, size / scale)


def _float(bits: Array) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def largest(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Returns the largest magnitude of each block, in float32; NaN if one is."""
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
    mesh, (*rest, last) = (where := jax.typeof(x).sharding).mesh, where.spec
    axes = last if isinstance(last, tuple) else (last,)
    shards = math.prod([mesh.shape[a] for a in axes if a is not None])
    spec = PartitionSpec(*rest, None if shape[-2] % shards else last, None)
    return jax.lax.reshape(x, shape, out_sharding=NamedSharding(mesh, spec))


def spread(scales: Float[Array, "..."], like: Array) -> Float[Array, "..."]:
    """Returns the scale of each element."""
    block = like.shape[-1] // scales.shape[-1]
    each = jnp.broadcast_to(scales[..., None], (*scales.shape, block))
    return jax.lax.reshape(each, like.shape, out_sharding=jax.typeof(like).sharding)
