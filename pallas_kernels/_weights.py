"""How weights are stored, and how a step writes them.

An optimizer's formula sees float32 weights and returns what to add to them. Here is
what that means for each way to keep them.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt16

from pallas_kernels._xla import computed_once, widen

type Kind = Literal["own", "copied", "split"]

_LOW = jnp.dtype(jnp.uint16)


class Weight(NamedTuple):
    """A param, and the master beside it.

    Attributes:
        param: what the model consumes.
        master: what an optimizer steps in its place: a float32 copy, from which `param`
            is rounded; or its 16 low bits, uint16, beside a bfloat16 `param`.
            None for a param that is its own master.
    """

    param: Array
    master: Array | None = None

    @property
    def kind(self) -> Kind:
        """How its master is kept."""
        if self.master is None:
            return "own"
        return "split" if self.master.dtype == _LOW else "copied"

    @property
    def value(self) -> Array:
        """What an optimizer steps, in float32 at least."""
        if self.master is None:
            return widen(self.param)
        split = self.kind == "split"
        return join(self.param, self.master) if split else self.master

    @property
    def columns(self) -> dict[str, Array]:
        """Its arrays by the names under which kernels know them."""
        if self.master is None:
            return {"weight": self.param}
        if self.kind == "split":
            return {"weight": self.param, "low": self.master}
        return {"weight": self.master, "copy": self.param}

    def written(self, columns: dict[str, Array]) -> "Weight":
        """The same weight with what a kernel wrote."""
        weight = columns["weight"]
        if self.kind == "copied":
            return Weight(columns["copy"], weight)
        return Weight(weight, columns.get("low"))


def join(high: Array, low: UInt16[Array, "..."]) -> Float[Array, "..."]:
    """The float32 whose halves `split` returned, bit for bit.

    >>> import jax.numpy as jnp
    >>> x = jnp.float32(0.1)
    >>> print(bool(join(*split(x)) == x))
    True
    """
    bits = jax.lax.bitcast_convert_type(high.astype(jnp.float32), jnp.uint32)
    low = low.astype(jnp.uint32)
    return jax.lax.bitcast_convert_type((bits - ((low >> 15) << 16)) | low, jnp.float32)


def split(
    x: Float[Array, "..."],
) -> tuple[Float[Array, "..."], UInt16[Array, "..."]]:
    """A float32 as a bfloat16 and its 16 low bits.

    The bfloat16 is `x` rounded to nearest, exact ties away from zero: of an even
    bfloat16 round-to-nearest-even has 65,537 preimages, one more than 16 bits can tell
    apart. NaNs become one NaN of either sign. What would round to infinity stays the
    largest finite.
    """
    high, low = split_wide(computed_once(x))
    return high.astype(jnp.bfloat16), low.astype(jnp.uint16)


def split_wide(x: Array) -> tuple[Array, Array]:
    """Like `split`, in float32 and uint32."""
    # On bits: a clip of floats would flush denormals on a CPU.
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    size = bits & 0x7FFFFFFF
    size = jnp.where(size > _INFINITY, _NAN, jnp.minimum(size, _LARGEST))
    bits = (bits & _SIGN) | size
    high = ((bits + 0x8000) >> 16) << 16
    return jax.lax.bitcast_convert_type(high, jnp.float32), bits & 0xFFFF


# As bits: what is above infinity is NaN; the largest float32 that does not round to
# infinity in bfloat16.
_SIGN, _INFINITY = np.uint32(0x80000000), np.uint32(0x7F800000)
_NAN, _LARGEST = np.uint32(0x7FC00000), np.uint32(0x7F7F7FFF)


def saturate(x: Array, dtype: DTypeLike) -> Array:
    """`x` within the finite range of a half dtype; NaN stays."""
    if jnp.dtype(dtype).itemsize > 2:
        return x
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit)
