"""A primitive that is bound before a loop, and not in each trip.

    scan { c. q = quantize w; ... }     q = quantize w; scan { c. ... }

JAX documents none of what this uses; the tests hold each fact.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.extend.core import Primitive

from jamp._autocast.tracers import equation_of


class Outermost(Primitive):
    """A primitive of one operand, bound in the program that this is of.

    The body of a loop, traced, closes over tracers of the program around the loop, and
    JAX writes the loop there once it has the body: what is bound there before stands
    before the loop. XLA for a GPU would compute it on each trip. Casts and
    rearrangements of a value in the body are bound there too.
    """

    def __init__(self, name: str, kept: Callable[..., bool]):
        """By its parameters, what is bound is `kept` by `jax_remat3`'s checkpoints."""
        super().__init__(name)
        self._kept = kept

    def bind_with_trace(self, trace: Any, args: Any, avals: Any, params: Any) -> Any:
        """Binds it, in that trace or in one around it; JAX calls this."""
        (x,) = args
        # Such a trace has each value twice: for now, and to be computed again.
        if type(trace).__name__ == "RematTrace" and self._kept(**params):
            in_trace = getattr(x, "_trace", None) is trace
            trace, x = trace.parent_trace, x.val if in_trace else x
        own = _closed_over(x, type(trace))
        trace = own._trace if _is_of(own, type(trace)) else trace
        return super().bind_with_trace(trace, [own], avals, params)


_MOVES = ("convert_element_type", "reshape", "squeeze", "transpose")


def _closed_over(x: Any, kind: type) -> Any:
    """The value in a program around a loop that a value of its body stands for.

    It is the value itself if there is none.
    """
    eqn = equation_of(x)
    if eqn is None or eqn.primitive.name not in _MOVES:
        own = x.get_referent() if isinstance(x, Tracer) else x
        # An example of `vmap` stands for the whole batch.
        return own if _is_of(own, kind) and jnp.shape(own) == jnp.shape(x) else x
    (operand,) = eqn.invars
    own = _closed_over(operand, kind)
    if own is operand:
        return x
    primitive = eqn.primitive
    return primitive.bind_with_trace(own._trace, [own], [own.aval], eqn.params)


def _is_of(x: Any, kind: type) -> bool:
    """Whether a value is of such a trace, and not of one around a `shard_map`."""
    if not isinstance(x, Tracer) or type(x._trace) is not kind:
        return False
    aval: Any = x.aval
    manual = jax.sharding.get_abstract_mesh().manual_axes
    return aval.sharding.mesh.manual_axes == manual
