"""Sums of gradients, in float32: of a bias, and of a weight that a loop shares.

    y = add(dot_general(a, w), b)          y = with_bias(dot_general(a, w), b)
    scan { w c. y = dot_general(c, w) }    scan { w c. y = product(c, w, half of w) }

The gradient of a bias is a sum over all examples. XLA adds up float16 in float16; cast
to float32 first, as JAX would be told by a cast of the bias, XLA keeps the cotangent in
float32 as well, twice as large, for this sum alone. So the rounded cotangent is made
first, which the product's own gradients read, and the sum reads that. XLA for a TPU
adds up where it makes the cotangent, at no cost.

The gradient of a weight that all trips of a loop share is a sum of products, one of
each trip. Rounded to half, each would be written, read and added by kernels of their
own. XLA for CUDA adds a float32 product of half operands where it computes it: two
thirds of the bytes, and one rounding less. It would merge the products of several
weights with one cotangent, and add slices of the result; with copies of the cotangent
it does not.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.typing import DTypeLike

from jamp._core.dtypes import FLOAT32

# Compute capabilities before Ampere: XLA refuses an algorithm for bfloat16 there.
_BEFORE_AMPERE = ("5.", "6.", "7.")


@jax.custom_jvp
def with_bias(product: Array, bias: Array) -> Array:
    """The sum of a half product and a float32 bias of as many axes, in half."""
    return product + bias.astype(product.dtype)


def _derivative(primals, tangents):
    (product, bias), (of_product, of_bias) = primals, tangents
    if isinstance(of_bias, SymbolicZero):
        return with_bias(product, bias), of_product
    repeated = jnp.ones_like(product, of_bias.dtype) * of_bias
    tangent = apart(repeated.astype(product.dtype))
    if not isinstance(of_product, SymbolicZero):
        tangent = of_product + tangent
    return with_bias(product, bias), tangent


with_bias.defjvp(_derivative, symbolic_zeros=True)


def apart(tangent: Array) -> Array:
    """A tangent whose cotangent is there before it is read, on a GPU."""
    return _apart.bind(tangent)


# A primitive, since `jax.lax.platform_dependent` would trace two programs for each.
_apart = Primitive("apart")
_apart.def_impl(lambda x: x)
_apart.def_abstract_eval(lambda x: x)
ad.deflinear2(_apart, lambda cotangent, _: [apart(cotangent)])
batching.defvectorized(_apart)
mlir.register_lowering(_apart, lambda _, x: [x])
for _gpu in ("cuda", "rocm"):
    barrier = mlir.lower_fun(jax.lax.optimization_barrier, multiple_results=False)
    mlir.register_lowering(_apart, barrier, platform=_gpu)


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
