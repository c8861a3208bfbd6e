"""Replaces a softmax in an island with one whose derivative reads its half result.

    e = exp x; s = reduce_sum e; r = broadcast_in_dim s; y = div e r
    y = custom_jvp_call[name=softmax] x

A softmax divides an exponential by its own sum. The next matmul saves the result of the
island in half anyway. If the derivative of the softmax reads this copy, the scores need
not be saved, and XLA moves as many bytes as for a half model.

If dropout follows, the matmul saves the output of the dropout, and the result would be
one more saved array. If the scores are read in any case, such as by the derivative of a
cap or a temperature, the same holds. Such a softmax keeps JAX's derivative.

On a TPU, XLA does not save the half result. It recomputes the exponential from the half
scores inside each matmul that reads it, and the derivative does the same.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast.barriers import kept, kept_on_tpu
from jamp._autocast.calls import call
from jamp._autocast.graph import Graph, is_costly, variables_in
from jamp._autocast.primitives import primitive_name, traits_of
from jamp._autocast.scope import Atom, dtype_of, shape_of, size_of

_REPEATS = ("broadcast_in_dim", "reshape", "expand_dims")


def with_softmax(
    eqns: Sequence[jc.JaxprEqn], graph: Graph, jaxprs: dict[Any, Any]
) -> tuple[list[jc.JaxprEqn], bool]:
    """Replaces the softmax that ends an island with one equation.

    The last equation is the cast to half that ends the island. The second result says
    whether a softmax was replaced. A barrier inside it protects the half copy, so the
    island needs no other barrier.
    """
    makers: dict[Atom, jc.JaxprEqn] = {v: eqn for eqn in eqns for v in eqn.outvars}
    (rounded,), (result,) = eqns[-1].invars, eqns[-1].outvars
    end, size = makers.get(rounded), size_of(result)
    read_again = [e for e in eqns if variables_in(e.outvars, size) and _reads_large(e)]
    if end is not None and (replaced := _softmax_ending_in(end, makers, graph)):
        exp, total, *_ = replaced
        if read_again != [exp, end]:
            return list(eqns), False
        function = _softmax(total.params["axes"], dtype_of(result))
        if new := call(function, exp.invars, end.outvars, end, jaxprs):
            gone = set(map(id, replaced))
            left = (new if e is end else [e] for e in eqns if id(e) not in gone)
            return [e for part in left for e in part], True
    return list(eqns), False


def _reads_large(eqn: jc.JaxprEqn) -> bool:
    """Returns whether a derivative reads an operand or the result of an equation."""
    reads_operands = traits_of(primitive_name(eqn)).reads_operands
    return is_costly(eqn) or reads_operands and len(variables_in(eqn.invars)) > 1


def _softmax_ending_in(
    eqn: jc.JaxprEqn, makers: Mapping[Atom, jc.JaxprEqn], graph: Graph
) -> list[jc.JaxprEqn]:
    """Returns the exponential, the sum and its broadcasts if a softmax ends here.

    Otherwise returns no equations.
    """

    def maker(atom: Atom) -> jc.JaxprEqn | None:
        return None if isinstance(atom, jc.Literal) else makers.get(atom)

    def readers(made: jc.JaxprEqn) -> int:
        return len(graph.readers_of(made.outvars))

    if eqn.primitive.name != "div":
        return []
    exp, total = map(maker, eqn.invars)
    repeats = []
    while total is not None and total.primitive.name in _REPEATS:
        repeats.append(total)
        total = maker(total.invars[0])
    if exp is None or total is None or total.invars[0] is not exp.outvars[0]:
        return []
    names = exp.primitive.name, total.primitive.name
    read_once = all(readers(e) == 1 for e in [total, *repeats])
    if names != ("exp", "reduce_sum") or not read_once:
        return []
    if isinstance(exp.invars[0], jc.Literal) or readers(exp) > 2:
        return []
    axes, shape = total.params["axes"], shape_of(exp.outvars[0])
    # Each row must be divided by its own sum, without a broadcast along other axes.
    kept_shape = tuple(1 if i in axes else n for i, n in enumerate(shape))
    shapes = [shape_of(e.outvars[0]) for e in reversed(repeats)]
    of_same_row = shapes[:1] == [kept_shape] and {kept_shape, shape}.issuperset(shapes)
    return [exp, total, *repeats] if of_same_row else []


@functools.cache
def _softmax(axes: tuple[int, ...], half: DTypeLike) -> Callable[[Array], Array]:
    """Returns a softmax whose derivative reads its result in `half`."""

    def softmax(x):
        y = jnp.exp(x)
        return y / kept_on_tpu(y.sum(axes, keepdims=True))

    derived = jax.custom_jvp(softmax)

    @derived.defjvp
    def derivative(primals, tangents):
        (y,), (t,) = map(softmax, primals), tangents
        copy = kept(y.astype(half))
        x, total = jax.lax.platform_dependent(copy, y, tpu=exact, default=rounded)
        return y, linear(x / kept(total), t)

    def exact(_, y):
        return y, jnp.ones_like(y.sum(axes, keepdims=True))

    def rounded(copy, y):
        # Without a barrier, XLA would save the float32 value instead of the half one.
        x = jax.lax.optimization_barrier(copy).astype(y.dtype)
        # A rounded row does not sum to 1. Without its true sum, a constant along a row
        # of `t` would not cancel.
        return x, x.sum(axes, keepdims=True)

    def linear(y, t):
        """Returns `y * t - y * sum(y * t)`, which is its own transpose.

        XLA's softmax fusion starts at an array minus its own reduction. With
        `g = y * t` and `less = g - sum(g)`, JAX transposes this order of operations to
        `g + y * (less - g)`. XLA compiles it to one kernel that reads `y` and `t` once.
        """
        product = y * t
        negative = -product
        total = -product.sum(axes, keepdims=True)
        return y * ((t + negative) + (product + total))

    return derived
