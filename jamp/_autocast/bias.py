"""The cast of a bias that was repeated: what its gradient is summed from."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax import Array


@functools.cache
def rounding(half: Any) -> Callable[[Array], Array]:
    """A cast to half whose gradient is read in half, and in float32 only then.

    The gradient of a bias is a sum over all examples of what the product's own gradient
    is made of. Without a barrier XLA takes that as it was before it was rounded, and so
    writes it twice: in half for the product, in float32 for the sum.
    """

    @jax.custom_jvp
    def rounded(x):
        return x.astype(half)

    @rounded.defjvp
    def derivative(primals, tangents):
        (t,) = tangents
        return rounded(*primals), jax.lax.optimization_barrier(t.astype(half))

    return rounded
