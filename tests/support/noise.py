"""Other last digits, as another processor or compiler gives them: `make noise`.

Half of all products, sums, quotients and exponentials move by a unit in the last place,
but for round numbers: nothing that a page or a doctest prints may change.
"""

import jax.numpy as jnp
from jax import lax
from jax._src.interpreters.mlir import _lowerings, lower_fun, register_lowering
from jax.extend.core import Primitive

# By the size of a float: its bits, and those of the last digits, 0 in round numbers.
_BITS = {2: (jnp.uint16, 0x7), 4: (jnp.uint32, 0xFF)}
_MOVED = (
    lax.dot_general_p,
    lax.reduce_sum_p,
    lax.mul_p,
    lax.div_p,
    lax.exp_p,
    lax.log_p,
)


def install() -> None:
    """For all that JAX compiles for the CPU from now on."""
    for primitive in _MOVED:
        exact = Primitive(f"{primitive.name}_exact")
        exact.def_effectful_abstract_eval(primitive.abstract_eval)
        _lowerings[exact] = _lowerings[primitive]

        def moved(*args, exact=exact, **params):
            return _moved(exact.bind(*args, **params))

        register_lowering(primitive, lower_fun(moved, multiple_results=False))


def _moved(x):
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize not in _BITS:
        return x
    dtype, last = _BITS[x.dtype.itemsize]
    bits = lax.bitcast_convert_type(x, dtype)
    coin = (bits.astype(jnp.uint32) * jnp.uint32(2246822519)) >> 31 == 1
    moves = coin & (bits & dtype(last) != 0) & jnp.isfinite(x)
    return lax.bitcast_convert_type(bits ^ moves.astype(dtype), x.dtype)
