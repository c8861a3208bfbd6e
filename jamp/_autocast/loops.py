"""Takes out of a scan what only rearranges its constants.

    y = scan[jaxpr={ a b c. w = concatenate a b; ... }] a b c

    w = concatenate a b
    y = scan[jaxpr={ w c. ... }] w c

Flax joins the weights of an LSTM's gates in each step. XLA does so once, before the
loop. But JAX sums a gradient for each constant that a loop is given: on each trip that
of the joined weight would be cut into parts, and each part be added by a kernel.
"""

import collections
import operator

from jax.extend import core as jc

from jamp._autocast import jax_internals
from jamp._autocast.frames import (
    frames_of,
    scan_counts,
    with_fewer_consts,
    with_programs,
)
from jamp._autocast.primitives import Shape, traits_of

# Each number of theirs is one of an operand's, and each of those is there once.
_REARRANGE = (Shape.RESHAPE, Shape.REARRANGE)


def moves_taken_out(jaxpr: jc.Jaxpr, done: dict[int, jc.Jaxpr]) -> jc.Jaxpr:
    """The same program, and itself where there is nothing to take out.

    Args:
        jaxpr: the program.
        done: what became of programs by their `id`, for one may be called twice.
    """
    if id(jaxpr) not in done:
        eqns: list[jc.JaxprEqn] = []
        for eqn in jaxpr.eqns:
            eqns += _taken_out_of(eqn, done)
        same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
        done[id(jaxpr)] = jaxpr if same else jaxpr.replace(eqns=eqns)
    return done[id(jaxpr)]


def _taken_out_of(eqn: jc.JaxprEqn, done: dict[int, jc.Jaxpr]) -> list[jc.JaxprEqn]:
    frames = frames_of(eqn)
    new = [moves_taken_out(frame.program, done) for frame in frames]
    if any(a is not frame.program for a, frame in zip(new, frames, strict=True)):
        eqn = eqn.replace(params=with_programs(eqn, new))
    # An effect names operands by their places.
    split = eqn.primitive.name == "scan" and not new[0].effects
    return _split(eqn, new[0]) if split else [eqn]


def _split(scan: jc.JaxprEqn, body: jc.Jaxpr) -> list[jc.JaxprEqn]:
    """A scan, and before it what only rearranges its constants.

    What is read elsewhere in the body as well stays: it would be two constants.
    """
    consts, _ = scan_counts(scan)
    reads = [v for eqn in body.eqns for v in eqn.invars] + list(body.outvars)
    times = collections.Counter(v for v in reads if isinstance(v, jc.Var))
    outside = dict(zip(body.invars[:consts], scan.invars[:consts], strict=True))
    taken, left = [], []
    for eqn in body.eqns:
        operands = [v for v in eqn.invars if isinstance(v, jc.Var)]
        alone = all(v in outside and times[v] == 1 for v in operands)
        all_vars = len(operands) == len(eqn.invars)
        moves = traits_of(eqn.primitive.name).shape in _REARRANGE
        if moves and alone and all_vars:
            (inside,) = eqn.outvars
            invars = [outside.pop(v) for v in operands]
            outside[inside] = new = jc.Var(inside.aval)
            taken.append(jax_internals.equation_before(scan, eqn, invars, new))
        else:
            left.append(eqn)
    if not taken:
        return [scan]
    return [*taken, with_fewer_consts(scan, body, left, outside)]
