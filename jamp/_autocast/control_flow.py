"""One rule for each primitive that holds programs: how to rewrite it.

    y:f32 = jit[jaxpr={ x:f32 w:f32. y:f32 = dot_general x w; in y }] x w
    y:f16 = jit[jaxpr={ x:f16 w:f16. y:f16 = dot_general x w; in y }] x' w'

Programs are passed to where they came from in other dtypes only where nothing depends
on them: carries keep the user's, and so do constants of loops, whose gradients are
sums.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast import derivatives, jax_internals
from jamp._autocast.frames import HOLDERS, OPEN_CALLS, Frame, with_programs
from jamp._autocast.marks import traced_for
from jamp._autocast.origins import origin_of_unknown
from jamp._autocast.primitives import Rule
from jamp._autocast.program import (
    Atom,
    dtype_of,
    is_float,
    recorded,
    region_rule,
)
from jamp._autocast.rewrite import Boundary, Rewriter, unchanged
from jamp._autocast.values import wants_of_operands, wants_of_results
from jamp._core.dtypes import FLOAT32


def _call(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """A program that is called once: values pass in whatever dtype they are in."""
    boundary, values = _open_boundary(rewriter, eqn, frames[0]), rewriter.values
    if rewriter.facts.only_moves(eqn):
        ins = [
            FLOAT32 if values.meets_float32(v) else dtype
            for v, dtype in zip(eqn.invars, boundary.in_dtypes, strict=True)
        ]
        boundary = boundary._replace(in_dtypes=ins)
    _write(rewriter, eqn, frames[0], boundary)


def _branches(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """Branches agree on what goes out: the program's dtypes where theirs differ."""
    boundary = _open_boundary(rewriter, eqn, frames[0])

    def branches():
        return [rewriter.program(eqn, f.program, boundary) for f in frames]

    # Each as it likes, first: if they agree, nothing is cast at the end of any.
    written = branches()
    outs = recorded(written[0].outvars)
    if any(recorded(branch.outvars) != outs for branch in written):
        outs = recorded(eqn.outvars)
        boundary = boundary._replace(out_dtypes=outs)
        written = branches()
    ins = [dtype_of(eqn.invars[0]), *boundary.in_dtypes]
    rewriter.emit(eqn, ins, outs, with_programs(eqn, written))


def _scan(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """Slices pass as they are; weights among them are cast slice by slice."""
    (frame,), values = frames, rewriter.values
    consts, carry, facts = frame.consts, frame.carries, rewriter.facts
    # A carry must come out as it went in, and one that sums over the trips would lose
    # digits in half; the backward pass sums the gradients of constants in the same way.
    votes = [facts[v].vote for v in eqn.outvars[:carry]]
    carries = [vote or dtype_of(v) for vote, v in zip(votes, eqn.outvars, strict=False)]
    slices = [values.outgoing_dtype(v) for v in eqn.invars[consts + carry :]]
    ins = [*recorded(eqn.invars[:consts]), *carries, *slices]
    outs = [*carries, *[None] * (len(eqn.outvars) - carry)]
    given = facts.trip_facts(frame)
    for i, vote in enumerate(votes, consts):
        given[i] = given[i]._replace(vote=vote)
    wants = wants_of_results(frame, values)
    _write(rewriter, eqn, frame, Boundary(ins, outs, wants, given))


def _while(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """Constants pass as they are: no gradient of theirs is summed over the trips."""
    cond, body = frames
    outs, consts, facts = (
        recorded(eqn.outvars),
        cond.consts + body.consts,
        rewriter.facts,
    )
    fixed = map(rewriter.values.computed_dtype, eqn.invars[:consts])
    ins = [*fixed, *recorded(eqn.invars[consts:])]
    known = facts.operand_facts(eqn.invars, range(consts, len(ins)))
    for i, v in enumerate(eqn.invars[:consts]):
        known[i] = known[i]._replace(vote=facts[v].vote)
    test = [*range(cond.consts), *range(consts, len(ins))]
    going = Boundary(
        [ins[i] for i in test], [jnp.dtype(bool)], facts=[known[i] for i in test]
    )
    trip = Boundary(
        ins[cond.consts :],
        outs,
        wants_of_results(body, rewriter.values),
        known[cond.consts :],
    )
    pairs = zip(frames, (going, trip), strict=True)
    written = [rewriter.program(eqn, f.program, boundary) for f, boundary in pairs]
    rewriter.emit(eqn, ins, outs, with_programs(eqn, written))


def _closed(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """A program whose inputs and outputs keep the user's dtypes: half lives inside."""
    facts = rewriter.facts.operand_facts(eqn.invars)
    boundary = Boundary(recorded(eqn.invars), recorded(eqn.outvars), facts=facts)
    _write(rewriter, eqn, frames[0], boundary)


def _open_boundary(rewriter: Rewriter, eqn: jc.JaxprEqn, frame: Frame) -> Boundary:
    """Of a program whose values may be in any dtype: known is who reads them."""
    values = rewriter.values
    wants = wants_of_operands(eqn, values)[-len(frame.operands) :]
    return Boundary(
        list(map(values.outgoing_dtype, frame.operands, wants)),
        [None] * len(frame.results),
        wants_of_results(frame, values),
        [rewriter.facts[v] for v in frame.operands],
    )


def _write(
    rewriter: Rewriter, eqn: jc.JaxprEqn, frame: Frame, boundary: Boundary
) -> None:
    """Writes an equation that holds one program, and that program."""
    inner = rewriter.program(eqn, frame.program, boundary)
    params = with_programs(eqn, [inner])
    rewriter.emit(eqn, boundary.in_dtypes, recorded(inner.outvars), params)


def _custom_jvp(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """The function and the user's derivative of it, each rewritten."""
    boundary = _open_boundary(rewriter, eqn, frames[0])
    ins = boundary.in_dtypes
    inner = rewriter.program(eqn, frames[0].program, boundary)
    outs = recorded(inner.outvars)
    consts = derivatives.custom_consts(eqn)
    args, known = ins[consts:], boundary.facts[consts:]

    # JAX calls this when somebody differentiates: only then is the user's rule known.
    def write(jaxpr: jc.Jaxpr, absent: Sequence[bool], zeros: Sequence[bool]):
        # JAX wants tangents in the dtypes of their primals, so those of `inner`; but an
        # integer's tangent is a float0, and stays one.
        # Half operands ask for half, as in the function: relu's derivative then reads
        # what relu reads, and nothing else is kept.
        given = zip(_with_tangents(known, absent), jaxpr.invars, strict=True)
        boundary = Boundary(
            _float_dtypes(_with_tangents(args, absent), jaxpr.invars),
            _float_dtypes(_with_tangents(outs, zeros), jaxpr.outvars),
            facts=[fact._replace(origin=origin_of_unknown(v)) for fact, v in given],
        )
        return rewriter.program(eqn, jaxpr, boundary)

    tracing = _tracing(rewriter, eqn)
    params = derivatives.with_custom_jvp(eqn, inner, write, tracing)
    rewriter.emit(eqn, ins, outs, params)


def _with_tangents[T](of_primals: Sequence[T], zeros: Sequence[bool]) -> list[T]:
    """What primals have, and after it what those have whose tangents are there."""
    there = (x for x, zero in zip(of_primals, zeros, strict=True) if not zero)
    return [*of_primals, *there]


def _float_dtypes(dtypes: Sequence[Any], variables: Sequence[Atom]) -> list[Any]:
    """The dtypes of floats; what is none keeps its own."""
    pairs = zip(dtypes, variables, strict=True)
    return [d if is_float(v) else dtype_of(v) for d, v in pairs]


def _custom_vjp(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """As `_custom_jvp`; in and out as the program says, for `bwd` is made for that.

    The user's `bwd` takes what the user's `fwd` gives, and returns gradients of
    operands in the program's dtypes: both keep what goes in and out of them.
    """
    ins, outs = recorded(eqn.invars), recorded(eqn.outvars)
    inner = rewriter.program(eqn, frames[0].program, Boundary(ins, outs))

    def write(jaxpr: jc.Jaxpr) -> jc.Jaxpr:
        return rewriter.program(eqn, jaxpr, unchanged(jaxpr))

    # Values of an outer program come in as those that the function closes over do; and
    # as there, they have no derivative.
    free = [v for v in derivatives.closed_over(eqn) if v in rewriter.versions]
    free = free if not eqn.effects else []  # which name operands by their places
    tracing = _tracing(rewriter, eqn)
    params = derivatives.with_custom_vjp(eqn, inner, write, tracing, free)
    place = derivatives.custom_consts(eqn)
    passed = [_stopped(rewriter, v) for v in free]
    invars = [*eqn.invars[:place], *passed, *eqn.invars[place:]]
    rewriter.emit(eqn.replace(invars=invars), recorded(invars), outs, params)


def _stopped(rewriter: Rewriter, var: jc.Var) -> jc.Var:
    """A variable without its derivative."""
    if not is_float(var):
        return var
    eqn = jax_internals.stopped(var)
    rewriter.emit(eqn, recorded(eqn.invars), recorded(eqn.outvars))
    return eqn.outvars[0]


def _tracing(rewriter: Rewriter, eqn: jc.JaxprEqn) -> Any:
    """In what to trace a user's rule, which JAX does long after the function."""
    region = region_rule(rewriter.scope, eqn)
    casts = region is None or region[0] not in (Rule.FLOAT32, Rule.RECORDED)
    policy = rewriter.scope.policy
    return functools.partial(traced_for, policy.dtype, policy.lists, casts)


# Of those with one program that values pass through; or that they do not.
RULES = dict.fromkeys(HOLDERS, _closed) | {
    **dict.fromkeys(OPEN_CALLS, _call),
    "cond": _branches,
    "scan": _scan,
    "while": _while,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
