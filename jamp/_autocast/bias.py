"""Adds a bias to a product in half, and sums its gradient in float32.

The gradient of a bias is a sum over all examples. XLA adds up float16 in float16; cast
to float32 first, as JAX would be told by a cast of the bias, XLA keeps the cotangent in
float32 as well, twice as large, for this sum alone. So the rounded cotangent is made
first, which the product's own gradients read, and the sum reads that. XLA for a TPU
adds up where it makes the cotangent, at no cost.
"""

import jax
import jax.numpy as jnp
from jax import Array
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


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
