"""Finds carries that a loop may keep in half, and conditions that depend on half.

    scan { w c. y = tanh (dot_general c w); d = add c y }       float32: adds to c
    scan { w c. d = logsumexp (add c w) }                       float32
    scan { c w. y = tanh (dot_general c w); d = add c y }       half: w is a layer
    scan { w c. f = logistic ...; y = ...; d = add (mul f c) y }    half: f is a gate

A loop whose iterations share their weights integrates, or adds logarithms. In half,
rounding would lose the small steps. A loop over layers has few iterations, and each has
other weights. A gate, as in an LSTM or a GRU, forgets the errors of earlier iterations.
"""

import enum
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast.primitives import MOVES, is_matmul, primitive_name, traits_of
from jamp._autocast.scope import Atom, dtype_of, is_float, shape_of
from jamp._autocast.subjaxprs import Subjaxpr, subjaxprs_of, while_jaxprs
from jamp._autocast.sums import LOOKUPS

type Tags = frozenset[Any]
type TagRule = Callable[[jc.JaxprEqn, list[Tags]], Tags]


class On(enum.Enum):
    """Tags of a value in the body of a loop: the value depends on these."""

    CARRY = "carry"  # the result of the last iteration
    UNGATED = "ungated"  # a carry that no gate multiplies
    COUNTER = "counter"  # an integer of this iteration
    WEIGHTS = "weights"  # the weights of all iterations
    WEIGHT = "weight"  # a weight of this iteration: sliced, or indexed by a counter
    LAYER = "layer"  # a matmul of a carry and a weight of this iteration
    MATMUL = "matmul"  # a matmul of a carry
    GATE = "gate"  # it is a sigmoid of such a matmul, or 1 minus this
    GATED = "gated"  # a product with a gate
    HALF = "half"  # a matmul in half


def flow(
    jaxpr: jc.Jaxpr,
    given: Sequence[Tags],
    rule: TagRule,
    done: dict[Any, list[Tags]] | None = None,
) -> list[Tags]:
    """Returns the tags of a jaxpr's results, given the tags of its inputs.

    The `rule` maps an equation and the tags of its operands to the tags of its results.
    It reads an inner loop once, as if each carry depended on all operands of the loop.
    `done` caches results, because several equations may call one jaxpr.
    """
    done = {} if done is None else done
    key = jaxpr, tuple(given)
    if key not in done:
        done[key] = _flow(jaxpr, given, rule, done)
    return list(done[key])


def _flow(
    jaxpr: jc.Jaxpr,
    given: Sequence[Tags],
    rule: TagRule,
    done: dict[Any, list[Tags]],
) -> list[Tags]:
    known: dict[Atom, Tags] = dict(zip(jaxpr.invars, given, strict=True))

    def tags_of(atom: Atom) -> Tags:
        return known.get(atom, frozenset()) if isinstance(atom, jc.Var) else frozenset()

    for eqn in jaxpr.eqns:
        subs = subjaxprs_of(eqn)
        if not subs:
            tags = rule(eqn, list(map(tags_of, eqn.invars)))
            known.update(dict.fromkeys(eqn.outvars, tags))
        for sub in subs:
            inside = list(map(tags_of, sub.operands))
            begin, end = sub.consts, sub.consts + sub.carries
            inside[begin:end] = _with_all(inside[begin:end], inside)
            outs = flow(sub.jaxpr, inside, rule, done)
            outs[: sub.carries] = _with_all(outs[: sub.carries], outs)
            for var, tags in zip(sub.results, outs, strict=False):
                known[var] = tags_of(var) | tags
    return list(map(tags_of, jaxpr.outvars))


def _with_all(carries: Sequence[Tags], values: Sequence[Tags]) -> list[Tags]:
    """Adds the tags of all values to each carry, for any number of iterations."""
    return [tags.union(*values) for tags in carries]


def half_carries(sub: Subjaxpr, are_weights: Sequence[bool]) -> set[int]:
    """Returns the carries of a loop over layers, and those that gates multiply.

    `are_weights` states whether each operand of the loop may be a weight, or the
    weights of all iterations.
    """
    given: list[Tags] = []
    for i, (v, is_weight) in enumerate(zip(sub.jaxpr.invars, are_weights, strict=True)):
        is_const, is_carry = i < sub.consts, i < sub.consts + sub.carries
        if not is_const and _is_counter(v):
            tags = (On.COUNTER,)
        elif is_carry and not is_const:
            tags = (On.CARRY, On.UNGATED)
        elif is_weight:
            tags = (On.WEIGHTS,) if is_const else (On.WEIGHT,)
        else:
            tags = ()
        given.append(frozenset(tags))
    found = enumerate(flow(sub.jaxpr, given, _by_carries)[: sub.carries])
    return {i for i, tags in found if On.LAYER in tags or _is_gated(tags)}


def _is_counter(atom: Atom) -> bool:
    return shape_of(atom) == () and jnp.issubdtype(dtype_of(atom), jnp.integer)


def _is_gated(tags: Tags) -> bool:
    return On.GATED in tags and On.UNGATED not in tags


_NOTHING: Tags = frozenset()


def _by_carries(eqn: jc.JaxprEqn, given: list[Tags]) -> Tags:
    name, union = primitive_name(eqn), _NOTHING.union(*given)
    if name in LOOKUPS and On.COUNTER in union and On.WEIGHTS in given[0]:
        union |= {On.WEIGHT}
    if is_matmul(eqn) and On.CARRY in union:
        rest = [tags for tags in given[:2] if On.CARRY not in tags]
        layer = {On.LAYER} if any(On.WEIGHT in tags for tags in rest) else _NOTHING
        union |= {On.MATMUL} | layer
    if name == "logistic" and On.MATMUL in union:
        return union | {On.GATE}
    if name == "mul" and On.GATE in union:
        return union - {On.GATE, On.UNGATED} | {On.GATED}
    is_gate = traits_of(name).shape in MOVES or name == "sub" and _NOTHING in given
    return union if is_gate else union - {On.GATE}


def waits_for_half(eqn: jc.JaxprEqn) -> bool:
    """Returns whether the condition of a while loop depends on a half matmul in it."""
    test, body, first, second = while_jaxprs(eqn)
    carries: list[Tags] = [frozenset()] * (len(eqn.invars) - first - second)
    while True:
        found = flow(body, [frozenset()] * second + carries, _in_half)
        if found == carries:
            (result,) = flow(test, [frozenset()] * first + carries, _in_half)
            return On.HALF in result
        carries = [a | b for a, b in zip(carries, found, strict=True)]


def _in_half(eqn: jc.JaxprEqn, given: list[Tags]) -> Tags:
    bits = [dtype_of(v).itemsize * 8 for v in eqn.invars if is_float(v)]
    is_half = is_matmul(eqn) and any(n <= 16 for n in bits)
    return frozenset((On.HALF,)) if is_half else frozenset().union(*given)
