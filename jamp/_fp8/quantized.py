"""Products of quantized operands: their numbers, and their derivatives.

    x8:f8_e4m3fn[] e:i32[] = quantize x                     x ~ x8 * 2**e
    y:bf16 = product x x8 e w                               (x8 . w8) * 2**(e + e_w)
    dx:bf16 = (g8 . w8^T) * 2**..   dw:bf16 = (x8^T . g8) * 2**..      g8:f8_e5m2

Each tensor is scaled by a power of two, the largest that keeps its largest number
finite: current scaling, with the formats of "FP8 Formats for Deep Learning", arXiv
2209.05433. A power of two rounds nothing and is undone exactly; it is kept as its
exponent, an integer with no derivative. XLA makes cuBLAS's fp8 products of this form:
fp8 operands straight into a `dot_general`, a scalar factor on its result.

XLA for a GPU takes nothing out of loops. JAX does, of a scan that it differentiates:
what only depends on the scan's constants, and is kept for the backward pass. Before a
scan around the gradient, `Outermost` binds it.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jamp._autocast.sums import apart
from jamp._core.dtypes import FLOAT32
from jamp._fp8.outermost import Outermost
from pallas_kernels._compat import varying_axes

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2
# The exponents of their largest numbers, 1.75 * 2**8 and 1.75 * 2**15.
_TOP = {np.dtype(FORWARD): 8, np.dtype(BACKWARD): 15}
_BIAS, _DIGITS, _INFINITY = 127, 23, 0x7F800000  # of float32
_ONE = np.int32(1)
_PAST_1_75 = 0x1FFFFF  # from 1.75, what its digits lack to the next power of two

type _Axes = tuple[Sequence[int], Sequence[int]]
type Numbers = tuple[_Axes, _Axes]  # those that are contracted, and those of a batch


class Of(enum.Enum):
    """The kinds of quantized arrays."""

    INPUT = enum.auto()  # for products that know its derivative, as the next one
    WEIGHT = enum.auto()
    SHARED = enum.auto()  # a weight, by all trips of a loop: `with_shared_kept`
    COTANGENT = enum.auto()


def quantize(x: Array, of: Of) -> tuple[Array, Array]:
    """An array in fp8, and the exponent of the power of two that it is to be times.

    The scale is 1 if all are zero, or one is not finite: that is nan then. Under `vmap`
    there is one scale for the whole batch.
    """
    return tuple(_quantize.bind(x, of=of))


@functools.lru_cache(maxsize=256)
def product_of(
    numbers: Numbers, first: bool, half: DTypeLike, grad_weight: bool, again: bool
) -> Callable[..., Array]:
    """What multiplies an array by a weight, each given quantized too, in fp8.

    `jax.lax.dot_general` takes the `numbers`, and the weight as `first` or second. The
    result is in `half`, and so is an operand, or in float32 if its gradients are to be
    summed so. Unless `grad_weight`, the gradient of the weight is a product in half.
    The weight is kept for the gradient of the other operand, to be quantized `again`,
    or in fp8.
    """

    def in_order(x: Array, weight: Array) -> tuple[Array, Array]:
        return (weight, x) if first else (x, weight)

    @jax.custom_jvp
    def product(x: Array, x8: Array, of_x8: Array, w: Array, w8: Array, of_w8: Array):
        return _multiplied(*in_order(x8, w8), of_x8 + of_w8, numbers, half)

    def derivative(primals, tangents):
        x, x8, of_x8, weight, w8, of_w8 = primals
        of_x, _, _, of_weight, *_ = tangents
        linear = functools.partial(_linear.bind, numbers=numbers, half=half)
        known = []
        if not isinstance(of_x, SymbolicZero):
            of_x, kept = _varying_like(of_x, weight), (w8, of_w8)
            known.append(linear(of_x, *((weight,) if again else kept), first=not first))
        if not isinstance(of_weight, SymbolicZero) and grad_weight:
            of_weight = _varying_like(of_weight, x8)
            known.append(linear(of_weight, x8, of_x8, first=first))
        elif not isinstance(of_weight, SymbolicZero):
            operands = in_order(x.astype(half), of_weight.astype(half))
            known.append(
                lax.dot_general(*operands, numbers, preferred_element_type=half)
            )
        return product(*primals), sum(known[1:], known[0])

    product.defjvp(derivative, symbolic_zeros=True)
    return product


def _multiplied(
    a: Array, b: Array, exponent: Array, numbers: Any, half: Any, sharding: Any = None
) -> Array:
    """A product of fp8 arrays times a power of two, in half."""
    # Before the factor it may be too large for float16.
    dtype = FLOAT32 if half == jnp.float16 else half
    product = lax.dot_general(
        a, b, numbers, preferred_element_type=dtype, out_sharding=sharding
    )
    return (product * _power(exponent).astype(dtype)).astype(half)


def _power(exponent: Array) -> Array:
    """2 to that power, as far as float32 goes."""
    bits = lax.clamp(_ONE, exponent + _BIAS, _ONE * (2 * _BIAS)) << _DIGITS
    return lax.bitcast_convert_type(bits, FLOAT32)


def _varying_like(tangent: Array, other: Array) -> Array:
    """A tangent that varies over all axes of `shard_map` that another array does.

    Its cotangent is summed over them.
    """
    axes = tuple(varying_axes(other) - varying_axes(tangent))
    return lax.pcast(tangent, axes, to="varying") if axes else tangent


# ---- quantize: a primitive, for one scale under `vmap`


def _quantized(x: Array, of: Of) -> list[Array]:
    dtype = np.dtype(BACKWARD if of is Of.COTANGENT else FORWARD)
    largest = jnp.max(jnp.abs(x)).astype(FLOAT32)
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    # 1.75 times the smallest such power of two is at least the largest number.
    exponent = ((bits + _PAST_1_75) >> _DIGITS) - _BIAS - _TOP[dtype]
    exponent = lax.clamp(_ONE * (1 - _BIAS), exponent, _ONE * (_BIAS - 1))
    exponent = jnp.where((bits > 0) & (bits < _INFINITY), exponent, 0)
    # A cast that saturates, as NVIDIA's instruction does, would hide an infinity.
    if of in (Of.WEIGHT, Of.SHARED):
        # Times zero it is nan. A mask XLA would transpose by a kernel of its own.
        scaled = (x + x * 0).astype(FLOAT32) * _power(-exponent)
    else:
        # XLA for a GPU would write in float32 what the maximum and this read.
        wide = apart(x).astype(FLOAT32)
        scaled = jnp.where(jnp.isfinite(wide), wide, jnp.nan) * _power(-exponent)
    return [scaled.astype(dtype), exponent]


def _types_of_quantized(x: Any, **params: Any) -> list[Any]:
    return jax.make_jaxpr(functools.partial(_quantized, **params))(x).out_avals


_SECOND = (
    "A product in fp8 has no second derivative. Leave fp8 out of what is "
    "differentiated twice: `with jamp.disable_fp8():` around it, or "
    "`fp8=jamp.Fp8(keep=...)`."
)


def _jvp_of_quantize(primals: Any, tangents: Any, of: Of) -> Any:
    if of is Of.COTANGENT:
        raise NotImplementedError(_SECOND)
    x8, exponent = _quantize.bind(*primals, of=of)
    # Products read none, and give it no cotangent: it says what depends on what.
    tangent = tangents[0].astype(x8.dtype)
    return [x8, exponent], [tangent, np.zeros((), jax.dtypes.float0)]


def _batched_quantize(args: Any, dims: Any, **params: Any) -> Any:
    return _quantize.bind(*args, **params), [*dims, None]


_quantize = Outermost("quantize", lambda of: of is Of.SHARED)
_quantize.multiple_results = True
_quantize.def_impl(jax.jit(_quantized, static_argnames="of"))
_quantize.def_abstract_eval(_types_of_quantized)
ad.primitive_jvps[_quantize] = _jvp_of_quantize
batching.primitive_batchers[_quantize] = _batched_quantize
mlir.register_lowering(_quantize, mlir.lower_fun(_quantized, multiple_results=True))


@dataclasses.dataclass(frozen=True)
class SharedKept:
    """A policy of `jax.checkpoint` that also keeps the fp8 weights that a loop shares.

    They are kept once for all trips, and not computed in each. Equal policies make
    equal ones, so that JAX finds its traces again without a cache of ours.
    """

    policy: Callable[..., Any] | None

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is _quantize and params["of"] is Of.SHARED:
            return True
        return self.policy is not None and self.policy(primitive, *avals, **params)


# ---- what a gradient is made of: an error in a second derivative


def _raise(*_: Any) -> Any:
    raise NotImplementedError(_SECOND)


_once = Primitive("fp8_once")
_once.def_impl(lambda x: x)
_once.def_abstract_eval(lambda x: x)
ad.primitive_jvps[_once] = _raise
batching.defvectorized(_once)
mlir.register_lowering(_once, lambda _, x: [x])


# ---- the derivative: a linear function of a tangent, whose cotangent is quantized


def _of_tangent(
    tangent: Array, *kept: Array, numbers: Numbers, half: DTypeLike, first: bool
) -> Array:
    """A tangent, as `first` or second operand, times what is kept, in fp8."""
    t8, of_t8 = quantize(tangent, Of.INPUT)
    k8, of_k8 = _unpacked(kept)
    operands = (t8, k8) if first else (k8, t8)
    return _multiplied(*operands, of_t8 + of_k8, numbers, half)


def _unpacked(kept: Sequence[Array]) -> tuple[Array, Array]:
    """The fp8 array and the exponent that were kept, or of the half array that was."""
    return quantize(kept[0], Of.WEIGHT) if len(kept) == 1 else (kept[0], kept[1])


def _transposed(
    cotangent: Any, tangent: Any, *kept: Array, numbers: Numbers, first: bool, **_: Any
) -> list[Any]:
    """The gradient of the primal: the cotangent times the kept operand."""
    nothing = [None] * len(kept)
    if isinstance(cotangent, ad.Zero):
        return [ad.Zero(tangent.aval), *nothing]
    g8, of_g8 = quantize(cotangent, Of.COTANGENT)
    k8, of_k8 = _unpacked(kept)
    k8 = _once.bind(k8)
    (t_sum, k_sum), (t_batch, k_batch) = (p if first else p[::-1] for p in numbers)
    t_free = _others(tangent.aval.ndim, t_sum, t_batch)
    k_free = _others(k8.ndim, k_sum, k_batch)
    begin = len(t_batch) + (len(t_free) if first else 0)
    summed = tuple(range(begin, begin + len(k_free))), k_free
    batch = tuple(range(len(t_batch))), tuple(k_batch)
    # The axes of the tangent, in the order of the axes of the gradient.
    axes = [*t_batch, *t_free, *(t_sum[i] for i in np.argsort(k_sum))]
    gradient = _multiplied(
        g8,
        k8,
        of_g8 + of_k8,
        (summed, batch),
        tangent.aval.dtype,
        _sharding(tangent.aval, axes),
    )
    return [lax.transpose(gradient, np.argsort(axes)), *nothing]


def _sharding(aval: Any, axes: Sequence[int]) -> NamedSharding | None:
    """How the axes of an array are sharded, in an order, if they are explicitly."""
    sharding = getattr(aval, "sharding", None)
    if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types:
        return None
    spec = PartitionSpec(*(sharding.spec[i] for i in axes))
    return NamedSharding(sharding.mesh, spec)


def _others(ndim: int, *axes: Sequence[int]) -> tuple[int, ...]:
    return tuple(i for i in range(ndim) if not any(i in some for some in axes))


def _jvp_of_linear(primals: Any, tangents: Any, **params: Any) -> Any:
    of_tangent, *of_kept = tangents
    if any(not isinstance(t, ad.Zero) for t in of_kept):
        raise NotImplementedError(_SECOND)
    out = _linear.bind(*primals, **params)
    return out, _linear.bind(of_tangent, *primals[1:], **params)


def _batched_linear(
    args: Any, dims: Any, numbers: Numbers, half: DTypeLike, first: bool
) -> Any:
    """A batch is one more free axis of an operand, or of both a batch of products."""
    (t, k, *exponent), (of_t, of_k, *_) = args, dims
    sides = [[p[0] for p in numbers], [p[1] for p in numbers]]
    batched = [of_t is not None, of_k is not None]
    t = t if of_t is None else jnp.moveaxis(t, of_t, 0)
    k = k if of_k is None else jnp.moveaxis(k, of_k, 0)
    left, right = batched if first else batched[::-1]
    ndim = (t if first else k).ndim
    both = left and right
    for side, moved in zip(sides, (left, right), strict=True):
        if moved:
            side[:] = [tuple(i + 1 for i in axes) for axes in side]
        if both:
            side[1] = (0, *side[1])
    (left_sum, left_batch), (right_sum, right_batch) = sides
    numbers = (left_sum, right_sum), (left_batch, right_batch)
    out = _linear.bind(t, k, *exponent, numbers=numbers, half=half, first=first)
    place = 0 if both else len(left_batch)
    if right and not both:  # after the free axes of the other
        place += ndim - len(left_sum) - len(left_batch)
    return out, place


def _type_of_linear(*avals: Any, **params: Any) -> Any:
    fn = functools.partial(_of_tangent, **params)
    return jax.make_jaxpr(fn)(*avals).out_avals[0]


_linear = Primitive("fp8_derivative")
_linear.def_impl(jax.jit(_of_tangent, static_argnames=("numbers", "half", "first")))
_linear.def_abstract_eval(_type_of_linear)
ad.primitive_jvps[_linear] = _jvp_of_linear
ad.primitive_transposes[_linear] = _transposed
batching.primitive_batchers[_linear] = _batched_linear
mlir.register_lowering(_linear, mlir.lower_fun(_of_tangent, multiple_results=False))
