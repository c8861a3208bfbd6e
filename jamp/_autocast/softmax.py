"""Gives a softmax in an island a derivative that reads its result in half.

    e = exp x; s = reduce_sum e; r = broadcast_in_dim s; y = div e r
    y = custom_jvp_call[name=softmax] x

An exponential over its own sum, as `jax.nn.softmax` has it inlined. Differentiated as
it stands, its scores are read again, and their maximum and the exponential computed
again. But the derivative needs no more than the result, of which the product that
follows keeps a half copy anyway: then XLA reads no more than in a model in half.

Where dropout follows, the product keeps what that left, and the result would be a third
array: then its scores are read again, in half, with the sum that is kept.

On a TPU, XLA does not keep that copy: it computes the exponential again inside of each
product that reads it, from the scores in half. There the derivative does so too.
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
    """The equations of a softmax: the exponential, and all others but the division."""

    exp: jc.JaxprEqn
    axes: tuple[int, ...]
    others: list[jc.JaxprEqn]


def with_softmax(
    eqns: Sequence[jc.JaxprEqn],
    users: Mapping[jc.Var, set[int]],
    known: dict[Any, Any],
) -> list[jc.JaxprEqn]:
    """The equations of an island, with one in the place of those of each softmax.

    The last is the cast to half that ends it; `users` are in it and outside, and
    `known` is as for `call`.
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
    """The softmax that ends in a division, if it is one."""
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
    # The sum is of the same row: not repeated along other axes.
    kept = tuple(1 if i in axes else n for i, n in enumerate(shape))
    shapes = [shape_of(e.outvars[0]) for e in reversed(repeats)]
    of_same_row = shapes[:1] == [kept] and {kept, shape}.issuperset(shapes)
    return _Softmax(exp, axes, others) if of_same_row else None


def rounds_softmax(written: Sequence[jc.JaxprEqn], eqns: Sequence[jc.JaxprEqn]) -> bool:
    """Whether what `with_softmax` made of equations ends in one that keeps its result.

    A barrier guards that: the island needs no other.
    """
    new = set(map(id, written)) - set(map(id, eqns))
    return any(id(e) in new and _is_rounded(e, written) for e in written)


def _is_rounded(eqn: jc.JaxprEqn, eqns: Sequence[jc.JaxprEqn]) -> bool:
    """Whether the last equation rounds the result of one as it is."""
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
        # Behind a barrier, or XLA would keep what it was rounded from, in float32.
        x = jax.lax.optimization_barrier(kept).astype(y.dtype)
        # A row has another sum than 1: what is the same all along a row of `t` would
        # not cancel.
        return x, x.sum(axes, keepdims=True)

    def linear(y, t):
        """`y * t - y * sum(y * t)`, which is its own transpose.

        XLA's softmax fusion begins at an array less its own reduction. JAX transposes
        this to such a one, in this order: with `g = y * t` to `g + y * (less - g)` of
        `less = g - sum(g)`. That is one kernel, which reads `y` and `t` once.
        """
        product = y * t
        negative = -product
        total = -product.sum(axes, keepdims=True)
        return y * ((t + negative) + (product + total))

    return softmax
