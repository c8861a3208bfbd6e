"""A primitive that runs once before a loop, not in each iteration.

    scan { c. q = quantize w; ... }     q = quantize w; scan { c. ... }

This uses undocumented parts of JAX; tests check each of them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive

from jamp._core.tracers import equation_of


class Outermost(Primitive):
    """A primitive of one operand, bound in the program that defines the operand.

    While JAX traces the body of a loop, the body closes over tracers of the outer
    program, and JAX writes the loop into that program afterwards. So an operation that
    is bound there runs before the loop. XLA for a GPU does not move it out of the loop.
    Casts and rearrangements of the operand move too.
    """

    def __init__(self, name: str, kept: Callable[..., bool]):
        """`kept(**params)` says whether checkpoints of `jax_remat3` keep the result."""
        super().__init__(name)
        self._kept = kept

    def bind_with_trace(self, trace: Any, args: Any, avals: Any, params: Any) -> Any:
        """Binds the primitive in this trace or an outer one; JAX calls this."""
        (x,) = args
        # This trace has each value twice: once to keep, and once to recompute.
        if type(trace).__name__ == "RematTrace" and self._kept(**params):
            in_trace = getattr(x, "_trace", None) is trace
            trace, x = trace.parent_trace, x.val if in_trace else x
        own = _closed_over(x, type(trace))
        trace = own._trace if _is_of(own, type(trace)) else trace
        return super().bind_with_trace(trace, [own], avals, params)


_MOVES = ("convert_element_type", "reshape", "squeeze", "transpose")


def _closed_over(x: Any, kind: type) -> Any:
    """Returns the outer value that a value in a loop equals, or the same value."""
    eqn = equation_of(x)
    if eqn is None or eqn.primitive.name not in _MOVES:
        own = x.get_referent() if isinstance(x, Tracer) else x
        # Under `vmap`, use the whole batch.
        return own if _is_of(own, kind) and jnp.shape(own) == jnp.shape(x) else x
    (operand,) = eqn.invars
    own = _closed_over(operand, kind)
    if own is operand:
        return x
    primitive = eqn.primitive
    return primitive.bind_with_trace(own._trace, [own], [own.aval], eqn.params)


def _is_of(x: Any, kind: type) -> bool:
    """Returns whether a value is from such a trace, inside the same `shard_map`."""
    if not isinstance(x, Tracer) or type(x._trace) is not kind:
        return False
    aval: Any = x.aval
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return aval.sharding.mesh.manual_axes == manual
