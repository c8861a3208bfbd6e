"""Replaces a softmax in an island by one whose derivative reads its half result.

    e = exp x; s = reduce_sum e; r = broadcast_in_dim s; y = div e r
    y = custom_jvp_call[name=softmax] x

A softmax divides an exponential by its own sum. In a checkpoint, JAX's derivative reads
the scores again and recomputes their maximum and the exponential. But the derivative
needs only the result, and the next matmul saves the result in half anyway. Reading this
copy, XLA moves as many bytes as in a half model.

If dropout follows, the matmul saves the output of the dropout, and the result would be
one more saved array. Then the derivative reads the half scores and the saved sum.

On a TPU, XLA does not save the half result. It recomputes the exponential from the half
scores inside each matmul that reads it, and the derivative does the same.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.extend import core as jc
from jax.extend.core.primitives import name_p
from jax.typing import DTypeLike

from jamp._autocast.jax_internals import call
from jamp._autocast.program import Atom, dtype_of, shape_of

_REPEATS = ("broadcast_in_dim", "reshape", "expand_dims")


class _Softmax(NamedTuple):
    """The equations of a softmax without its division."""

    exp: jc.JaxprEqn
    axes: tuple[int, ...]
    others: list[jc.JaxprEqn]


def with_softmax(
    eqns: Sequence[jc.JaxprEqn],
    users: Mapping[jc.Var, set[int]],
    known: dict[Any, Any],
) -> list[jc.JaxprEqn]:
    """Replaces each softmax among the equations of an island by one equation.

    The last equation is the cast to half that ends the island. `users` has the
    equations inside and outside that read each value. `known` is a cache for `call`.
    """
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    half, written = dtype_of(eqns[-1].outvars[0]), list[jc.JaxprEqn]()
    for eqn in eqns:
        found = _ending_in(eqn, makers, users)
        one = found and call(
            _softmax(found.axes, half, _is_rounded(eqn, eqns)),
            found.exp.invars,
            eqn.outvars,
            eqn,
            known,
        )
        if one is not None and found is not None:
            gone = set(map(id, [found.exp, *found.others]))
            written = [e for e in written if id(e) not in gone]
        written.append(one or eqn)
    return written


def _ending_in(
    eqn: jc.JaxprEqn,
    makers: Mapping[jc.Var, jc.JaxprEqn],
    users: Mapping[jc.Var, set[int]],
) -> _Softmax | None:
    """Returns the softmax that ends in a division, if there is one."""
    if eqn.primitive.name != "div":
        return None
    exp, total = (_maker(v, makers) for v in eqn.invars)
    repeats = []
    while total is not None and total.primitive.name in _REPEATS:
        repeats.append(total)
        total = _maker(total.invars[0], makers)
    if exp is None or total is None or total.invars[0] is not exp.outvars[0]:
        return None
    names = (exp.primitive.name, total.primitive.name)
    others = [total, *repeats]
    read_once = all(len(users[e.outvars[0]]) == 1 for e in others)
    if names != ("exp", "reduce_sum") or not read_once:
        return None
    if isinstance(exp.invars[0], jc.Literal) or len(users[exp.outvars[0]]) > 2:
        return None
    axes, shape = total.params["axes"], shape_of(exp.outvars[0])
    # Each row must be divided by its own sum, without a broadcast along other axes.
    kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
    shapes = [shape_of(e.outvars[0]) for e in reversed(repeats)]
    of_same_row = shapes[:1] == [kept] and {kept, shape}.issuperset(shapes)
    return _Softmax(exp, axes, others) if of_same_row else None


def rounds_softmax(written: Sequence[jc.JaxprEqn], eqns: Sequence[jc.JaxprEqn]) -> bool:
    """Returns whether `with_softmax` wrote a softmax that saves its result in half.

    A barrier inside it protects this copy, so the island needs no other barrier.
    """
    new = set(map(id, written)) - set(map(id, eqns))
    return any(id(e) in new and _is_rounded(e, written) for e in written)


def _is_rounded(eqn: jc.JaxprEqn, eqns: Sequence[jc.JaxprEqn]) -> bool:
    """Returns whether the last equation casts a result of `eqn`."""
    return eqns[-1].invars[0] in eqn.outvars


def _maker(atom: Atom, makers: Mapping[jc.Var, jc.JaxprEqn]) -> jc.JaxprEqn | None:
    return None if isinstance(atom, jc.Literal) else makers.get(atom)


@functools.cache
def _softmax(
    axes: tuple[int, ...], half: DTypeLike, is_rounded: bool
) -> Callable[[Array], Array]:
    @jax.custom_jvp
    def softmax(x):
        y = jnp.exp(x)
        return y / y.sum(axes, keepdims=True)

    @softmax.defjvp
    def derivative(primals, tangents):
        (x,), (t,) = primals, tangents
        if not is_rounded:
            y = jnp.exp(x)
            y = y / y.sum(axes, keepdims=True)
            return y, linear(y, t)
        y = softmax(x)
        kept = name_p.bind(y.astype(half), name="softmax")
        x, total = jax.lax.platform_dependent(kept, y, tpu=exact, default=rounded)
        return y, linear(x / name_p.bind(total, name="softmax"), t)

    def exact(_, y):
        return y, jnp.ones_like(y.sum(axes, keepdims=True))

    def rounded(kept, y):
        # Without a barrier, XLA would save the float32 value instead of the half one.
        x = jax.lax.optimization_barrier(kept).astype(y.dtype)
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

    return softmax
