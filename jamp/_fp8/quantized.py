"""Matmuls of quantized operands, with their derivatives.

    x8:f8_e4m3fn[] e:i32[] = quantize x                     x ~ x8 * 2**e
    y:bf16 = matmul x x8 e w                               (x8 . w8) * 2**(e + e_w)
    dx:bf16 = (g8 . w8^T) * 2**..   dw:bf16 = (x8^T . g8) * 2**..      g8:f8_e5m2

The scale of a tensor is the largest power of two that keeps its largest number finite:
current scaling, with the formats of "FP8 Formats for Deep Learning", arXiv 2209.05433.
Multiplying by a power of two is exact. The scale is stored as its exponent, an integer
without a derivative. XLA turns this form into cuBLAS's fp8 matmuls: a `dot_general` of
fp8 operands, and a scalar factor on its result.

XLA for a GPU does not move operations out of loops. JAX moves operations out of a scan
that it differentiates, if they depend only on constants and the backward pass needs
them. For a scan around the gradient, `Outermost` does this.
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
# The exponents of the largest numbers, 1.75 * 2**8 and 1.75 * 2**15.
_TOP = {np.dtype(FORWARD): 8, np.dtype(BACKWARD): 15}
_BIAS, _DIGITS, _INFINITY = 127, 23, 0x7F800000  # float32's
_ONE = np.int32(1)
_PAST_1_75 = 0x1FFFFF  # digits from 1.75 to the next power of two

type _Axes = tuple[Sequence[int], Sequence[int]]
type Numbers = tuple[_Axes, _Axes]  # contracted axes, batch axes


class Of(enum.Enum):
    """The kinds of quantized arrays."""

    INPUT = enum.auto()  # an activation, or a tangent
    WEIGHT = enum.auto()
    SHARED = enum.auto()  # a weight that all iterations of a loop share
    COTANGENT = enum.auto()


def quantize(x: Array, of: Of) -> tuple[Array, Array]:
    """Returns an array in fp8, and the exponent of its scale.

    The scale is 1 if all elements are zero. If one is not finite, the scale is 1 and
    that element is nan. Under `vmap`, the whole batch has one scale.
    """
    return tuple(_quantize.bind(x, of=of))


@functools.lru_cache(maxsize=256)
def matmul_of(
    numbers: Numbers, first: bool, half: DTypeLike, grad_weight: bool, again: bool
) -> Callable[..., Array]:
    """Returns a function that multiplies an array by a weight in fp8.

    The function takes each operand twice: quantized, and in half (or in float32, to sum
    its gradients in float32). `numbers` are the dimension numbers of
    `jax.lax.dot_general`. The weight is the `first` or the second operand. The result
    is `half`. Without `grad_weight`, the gradient of the weight is a half matmul. With
    `again`, the backward pass reads the weight in half and quantizes it again.
    Otherwise it reads the fp8 weight.
    """

    def in_order(x: Array, weight: Array) -> tuple[Array, Array]:
        return (weight, x) if first else (x, weight)

    @jax.custom_jvp
    def matmul(x: Array, x8: Array, of_x8: Array, w: Array, w8: Array, of_w8: Array):
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
        return matmul(*primals), sum(known[1:], known[0])

    matmul.defjvp(derivative, symbolic_zeros=True)
    return matmul


def _multiplied(
    a: Array, b: Array, exponent: Array, numbers: Any, half: Any, sharding: Any = None
) -> Array:
    """Returns a half matmul of fp8 arrays times a power of two."""
    # The unscaled product may exceed float16.
    dtype = FLOAT32 if half == jnp.float16 else half
    matmul = lax.dot_general(
        a, b, numbers, preferred_element_type=dtype, out_sharding=sharding
    )
    return (matmul * _power(exponent).astype(dtype)).astype(half)


def _power(exponent: Array) -> Array:
    """Returns 2 to this power, clamped to float32's range."""
    bits = lax.clamp(_ONE, exponent + _BIAS, _ONE * (2 * _BIAS)) << _DIGITS
    return lax.bitcast_convert_type(bits, FLOAT32)


def _varying_like(tangent: Array, other: Array) -> Array:
    """Makes a tangent vary over all `shard_map` axes of another array.

    This sums its cotangent over these axes.
    """
    axes = tuple(varying_axes(other) - varying_axes(tangent))
    return lax.pcast(tangent, axes, to="varying") if axes else tangent


# `quantize` is a primitive, so that `vmap` uses one scale.


def _quantized(x: Array, of: Of) -> list[Array]:
    dtype = np.dtype(BACKWARD if of is Of.COTANGENT else FORWARD)
    largest = jnp.max(jnp.abs(x)).astype(FLOAT32)
    bits = lax.bitcast_convert_type(largest, jnp.int32)
    # Find the smallest power of two whose product with 1.75 is at least `largest`.
    exponent = ((bits + _PAST_1_75) >> _DIGITS) - _BIAS - _TOP[dtype]
    exponent = lax.clamp(_ONE * (1 - _BIAS), exponent, _ONE * (_BIAS - 1))
    exponent = jnp.where((bits > 0) & (bits < _INFINITY), exponent, 0)
    # NVIDIA's cast saturates, which would hide an infinity.
    if of in (Of.WEIGHT, Of.SHARED):
        # inf * 0 is nan. XLA would transpose a mask in a separate kernel.
        scaled = (x + x * 0).astype(FLOAT32) * _power(-exponent)
    else:
        # `apart` separates this cast from the cast for the maximum. XLA for a GPU would
        # otherwise write one float32 copy for both.
        wide = apart(x).astype(FLOAT32)
        scaled = jnp.where(jnp.isfinite(wide), wide, jnp.nan) * _power(-exponent)
    return [scaled.astype(dtype), exponent]


def _types_of_quantized(x: Any, **params: Any) -> list[Any]:
    return jax.make_jaxpr(functools.partial(_quantized, **params))(x).out_avals


_SECOND = (
    "A matmul in fp8 has no second derivative. Keep the code that you differentiate "
    "twice in half: call it inside `with jamp.disable_fp8():`, or name its weights in "
    "`fp8=jamp.Fp8(keep=...)`."
)


def _jvp_of_quantize(primals: Any, tangents: Any, of: Of) -> Any:
    if of is Of.COTANGENT:
        raise NotImplementedError(_SECOND)
    x8, exponent = _quantize.bind(*primals, of=of)
    # Matmuls do not read this tangent. It only records the dependence.
    tangent = tangents[0].astype(x8.dtype)
    return [x8, exponent], [tangent, np.zeros((), jax.dtypes.float0)]


def _batched_quantize(args: Any, dims: Any, **params: Any) -> Any:
    return _quantize.bind(*args, **params), [*dims, None]


_quantize = Outermost("jamp_quantize", lambda of: of is Of.SHARED)
_quantize.multiple_results = True
_quantize.def_impl(jax.jit(_quantized, static_argnames="of"))
_quantize.def_abstract_eval(_types_of_quantized)
ad.primitive_jvps[_quantize] = _jvp_of_quantize
batching.primitive_batchers[_quantize] = _batched_quantize
mlir.register_lowering(_quantize, mlir.lower_fun(_quantized, multiple_results=True))


@dataclasses.dataclass(frozen=True)
class SharedKept:
    """A policy of `jax.checkpoint` that also keeps the fp8 weights that a loop shares.

    All iterations share one copy. Equal policies give equal instances, so that JAX's
    caches work.
    """

    policy: Callable[..., Any] | None

    def __call__(self, primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive is _quantize and params["of"] is Of.SHARED:
            return True
        return self.policy is not None and self.policy(primitive, *avals, **params)


# A second derivative differentiates the operands of gradients, which raises an error.


def _raise(*_: Any) -> Any:
    raise NotImplementedError(_SECOND)


_once = Primitive("jamp_fp8_once")
_once.def_impl(lambda x: x)
_once.def_abstract_eval(lambda x: x)
ad.primitive_jvps[_once] = _raise
batching.defvectorized(_once)
mlir.register_lowering(_once, lambda _, x: [x])


# The derivative is a linear function of a tangent, with a quantized cotangent.


def _of_tangent(
    tangent: Array, *kept: Array, numbers: Numbers, half: DTypeLike, first: bool
) -> Array:
    """Multiplies a tangent, the `first` or second operand, by the kept one in fp8."""
    t8, of_t8 = quantize(tangent, Of.INPUT)
    k8, of_k8 = _unpacked(kept)
    operands = (t8, k8) if first else (k8, t8)
    return _multiplied(*operands, of_t8 + of_k8, numbers, half)


def _unpacked(kept: Sequence[Array]) -> tuple[Array, Array]:
    """Returns the kept fp8 array and exponent, or quantizes the kept half array."""
    return quantize(kept[0], Of.WEIGHT) if len(kept) == 1 else (kept[0], kept[1])


def _transposed(
    cotangent: Any, tangent: Any, *kept: Array, numbers: Numbers, first: bool, **_: Any
) -> list[Any]:
    """Returns the gradient of the primal: the cotangent times the kept operand."""
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
    # The axes of the tangent in the order of the gradient's axes.
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
    """Returns the sharding of an array with permuted axes, if it is explicit."""
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
    """Adds a free axis to one batched operand, or a batch axis to two."""
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
    if right and not both:  # after the other operand's free axes
        place += ndim - len(left_sum) - len(left_batch)
    return out, place


def _type_of_linear(*avals: Any, **params: Any) -> Any:
    fn = functools.partial(_of_tangent, **params)
    return jax.make_jaxpr(fn)(*avals).out_avals[0]


_linear = Primitive("jamp_fp8_derivative")
_linear.def_impl(jax.jit(_of_tangent, static_argnames=("numbers", "half", "first")))
_linear.def_abstract_eval(_type_of_linear)
ad.primitive_jvps[_linear] = _jvp_of_linear
ad.primitive_transposes[_linear] = _transposed
batching.primitive_batchers[_linear] = _batched_linear
mlir.register_lowering(_linear, mlir.lower_fun(_of_tangent, multiple_results=False))
