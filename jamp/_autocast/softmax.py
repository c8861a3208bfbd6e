"""Gives a softmax in an island a derivative that reads its result in half.

An exponential over its own sum, as `jax.nn.softmax` has it inlined. Differentiated as
it stands, its scores are read again, and the exponential is computed again from them.
But its derivative needs no more than its result, whose half copy the product that
follows keeps anyway.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core as jc

from jamp._autocast.jax_internals import call

KEPT = "jamp_softmax"
_REPEATS = ("broadcast_in_dim", "reshape", "expand_dims")


def with_softmax(
    eqns: Sequence[jc.JaxprEqn], users: Mapping[jc.Var, set[int]], half: Any
) -> list[jc.JaxprEqn]:
    """The equations of an island, with one in the place of those of each softmax.

    Args:
        eqns: the island.
        users: who uses a value, in the island or outside: only how many counts.
        half: the dtype in which the result is kept.
    """
    makers = {v: eqn for eqn in eqns for v in eqn.outvars}
    written, gone = list(eqns), []
    for place, div in enumerate(eqns):
        found = _softmax_ending_in(div, makers, users)
        if found is not None:
            exp, axes, replaced = found
            function = _softmax(axes, half)
            (x,), (out,) = exp.invars, div.outvars
            written[place] = call(function, [x], out, div)
            gone += replaced
    return [eqn for eqn in written if all(eqn is not g for g in gone)]


def _softmax_ending_in(div, makers, users):
    """The exponential, the axes of its sum, and all equations before the division."""
    if div.primitive.name != "div":
        return None
    top, bottom = div.invars
    if isinstance(top, jc.Literal) or isinstance(bottom, jc.Literal):
        return None
    exp, total, chain = makers.get(top), makers.get(bottom), []
    while total is not None and total.primitive.name in _REPEATS:
        chain.append(total)
        total = makers.get(total.invars[0])
    if exp is None or total is None or total.invars[0] is not top:
        return None
    if (exp.primitive.name, total.primitive.name) != ("exp", "reduce_sum"):
        return None
    once = [total, *chain]
    if len(users[top]) != 2 or any(len(users[e.outvars[0]]) != 1 for e in once):
        return None
    if chain and chain[0].outvars[0].aval.size != total.outvars[0].aval.size:
        return None
    return exp, total.params["axes"], [exp, *once]


def _softmax(axes: tuple[int, ...], half: Any):
    @jax.custom_jvp
    def softmax(x):
        y = jnp.exp(x)
        return y / y.sum(axes, keepdims=True)

    @softmax.defjvp
    def derivative(primals, tangents):
        y, (t,) = softmax(*primals), tangents
        kept = checkpoint_name(y.astype(half), KEPT)
        kept = jax.lax.optimization_barrier(kept).astype(y.dtype)
        return y, kept * (t - (kept * t).sum(axes, keepdims=True))

    return softmax
