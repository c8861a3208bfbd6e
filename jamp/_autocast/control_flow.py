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
from jax.extend.core.primitives import stop_gradient_p

from jamp._autocast import derivatives
from jamp._autocast.facts import Facts
from jamp._autocast.frames import (
    CHECKPOINT,
    HOLDERS,
    OBJECT,
    OPEN_CALLS,
    Frame,
    with_programs,
)
from jamp._autocast.hijax import (
    fwd_consts,
    hi_primitive,
    with_jvp_rule,
    with_vjp_rules,
)
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
from jamp._autocast.rewrite import Rewriter, rewrite
from jamp._core.dtypes import FLOAT32


def _open(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """A call, or branches: values pass in whatever dtype they are in.

    Branches agree on what goes out: the program's dtypes where theirs differ.
    """
    ins = list(map(rewriter.outgoing_dtype, eqn.invars))
    pairs = list(zip(frames, rewriter.facts.programs(eqn), strict=True))
    given = ins[len(eqn.invars) - len(frames[0].operands) :]  # without an index
    # Each as it likes, first: if they agree, nothing is cast at the end of any.
    written = [_program(rewriter, f, given, None, frame) for frame, f in pairs]
    if any(recorded(w.outvars) != recorded(written[0].outvars) for w in written):
        outs = recorded(eqn.outvars)
        written = [_program(rewriter, f, given, outs, frame) for frame, f in pairs]
    if rewriter.scope.policy.fp8 and eqn.primitive.name == CHECKPOINT:
        policy = rewriter.scope.policy.fp8.checkpoint_policy(eqn.params["policy"])
        eqn = eqn.replace(params=eqn.params | {"policy": policy})
    _emit(rewriter, eqn, ins, written)


def _scan(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """Slices pass as they are; weights among them are cast slice by slice."""
    (frame,), facts = frames, rewriter.facts
    consts, carry = frame.consts, frame.carries
    # A carry must come out as it went in, and one that sums over the trips would lose
    # digits in half; the backward pass sums the gradients of constants in the same way.
    votes = [facts[v].vote for v in eqn.outvars[:carry]]
    carries = [vote or dtype_of(v) for vote, v in zip(votes, eqn.outvars, strict=False)]
    slices = map(rewriter.outgoing_dtype, eqn.invars[consts + carry :])
    ins = [*recorded(eqn.invars[:consts]), *carries, *slices]
    outs = [*carries, *[None] * (len(eqn.outvars) - carry)]
    given = facts.trip_facts(frame)
    for i, vote in enumerate(votes, consts):
        given[i] = given[i]._replace(vote=vote, carried=vote == FLOAT32)
    body = facts.program(eqn, frame.program, given)
    _emit(rewriter, eqn, ins, [_program(rewriter, body, ins, outs, frame)])


def _while(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """Constants pass as they are: no gradient of theirs is summed over the trips."""
    (cond, body), facts = frames, rewriter.facts
    consts, outs = cond.consts + body.consts, recorded(eqn.outvars)
    ins = [*map(rewriter.computed_dtype, eqn.invars[:consts]), *outs]
    known = facts.operand_facts(eqn.invars, range(consts, len(ins)))
    for i, v in enumerate(eqn.invars[:consts]):
        known[i] = known[i]._replace(vote=facts[v].vote)
    for i in range(consts, len(ins)):
        known[i] = known[i]._replace(carried=known[i].vote == FLOAT32)
    places = [*range(cond.consts), *range(consts, len(ins))]
    test = facts.program(eqn, cond.program, [known[i] for i in places])
    trip = facts.program(eqn, body.program, known[cond.consts :])
    written = [
        _program(rewriter, test, [ins[i] for i in places], [jnp.dtype(bool)]),
        _program(rewriter, trip, ins[cond.consts :], outs, body),
    ]
    _emit(rewriter, eqn, ins, written)


def _closed(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """A program whose inputs and outputs keep the user's dtypes: half lives inside."""
    given = rewriter.facts.operand_facts(eqn.invars)
    facts = rewriter.facts.program(eqn, frames[0].program, given)
    ins, outs = recorded(eqn.invars), recorded(eqn.outvars)
    uses = rewriter.uses_of(eqn.outvars)
    _emit(rewriter, eqn, ins, [_program(rewriter, facts, ins, outs, uses=uses)])


def _program(
    rewriter: Rewriter,
    facts: Facts,
    ins: Sequence[Any],
    outs: Sequence[Any] | None = None,
    frame: Frame | None = None,
    uses: Sequence[Any] = (),
) -> jc.Jaxpr:
    """A program, rewritten. In a frame, fp8 asks for the `uses` of its results."""
    outs = [None] * len(facts.jaxpr.outvars) if outs is None else outs
    if frame and rewriter.fp8:
        uses = rewriter.fp8.uses_of_results(frame)
    return rewrite(facts, ins, outs, rewriter.rules, uses)


def _emit(
    rewriter: Rewriter, eqn: jc.JaxprEqn, ins: Sequence[Any], written: list[jc.Jaxpr]
) -> None:
    """Writes an equation with rewritten programs; the last gives its results."""
    outs = recorded(written[-1].outvars)
    rewriter.emit(eqn, ins, outs, with_programs(eqn, written))


def _custom_jvp(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """The function and the user's derivative of it, each rewritten."""
    ins = list(map(rewriter.outgoing_dtype, eqn.invars))
    (facts,) = rewriter.facts.programs(eqn)
    inner = _program(rewriter, facts, ins, None, frames[0])
    outs = recorded(inner.outvars)
    prim = hi_primitive(eqn)
    consts = 0 if prim is not None else derivatives.custom_consts(eqn)
    args, known = ins[consts:], facts.given[consts:]

    # JAX calls this when somebody differentiates: only then is the user's rule known.
    def write(jaxpr: jc.Jaxpr, absent: Sequence[bool], zeros: Sequence[bool]):
        # JAX wants tangents in the dtypes of their primals, so those of `inner`; but an
        # integer's tangent is a float0, and stays one.
        # Half operands ask for half, as in the function: relu's derivative then reads
        # what relu reads, and nothing else is kept.
        pairs = zip(_with_tangents(known, absent), jaxpr.invars, strict=True)
        given = [fact._replace(origin=origin_of_unknown(v)) for fact, v in pairs]
        return _program(
            rewriter,
            rewriter.facts.program(eqn, jaxpr, given),
            _float_dtypes(_with_tangents(args, absent), jaxpr.invars),
            _float_dtypes(_with_tangents(outs, zeros), jaxpr.outvars),
        )

    tracing = _tracing(rewriter, eqn)
    if prim is not None:
        params = {"_prim": with_jvp_rule(prim, inner, write, tracing)}
    else:
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

    def write(jaxpr: jc.Jaxpr) -> jc.Jaxpr:
        facts = rewriter.facts.program(eqn, jaxpr, ())
        ins, outs = recorded(jaxpr.invars), recorded(jaxpr.outvars)
        return _program(rewriter, facts, ins, outs)

    inner = write(frames[0].program)
    # Values of an outer program come in as those that the function closes over do; and
    # as there, they have no derivative.
    free = [v for v in derivatives.closed_over(eqn) if v in rewriter.versions]
    free = free if not eqn.effects else []  # which name operands by their places
    tracing, prim = _tracing(rewriter, eqn), hi_primitive(eqn)
    if prim is not None:
        run = functools.partial(derivatives.run_rule, write, tracing, free)
        params = {"_prim": with_vjp_rules(prim, inner, run, free)}
        _, place = fwd_consts(prim)
    else:
        params = derivatives.with_custom_vjp(eqn, inner, write, tracing, free)
        place = derivatives.custom_consts(eqn)
    passed = [_stopped(rewriter, v) for v in free]
    invars = [*eqn.invars[:place], *passed, *eqn.invars[place:]]
    eqn = eqn.replace(invars=invars)
    rewriter.emit(eqn, recorded(invars), recorded(eqn.outvars), params)


def _stopped(rewriter: Rewriter, var: jc.Var) -> jc.Var:
    """A variable without its derivative."""
    if not is_float(var):
        return var
    eqn = jc.new_jaxpr_eqn([var], [jc.Var(var.aval)], stop_gradient_p, {}, set())
    rewriter.emit(eqn, recorded(eqn.invars), recorded(eqn.outvars))
    return eqn.outvars[0]


def _tracing(rewriter: Rewriter, eqn: jc.JaxprEqn) -> Any:
    """In what to trace a user's rule, which JAX does long after the function."""
    region = region_rule(rewriter.scope, eqn)
    casts = region is None or region[0] not in (Rule.FLOAT32, Rule.RECORDED)
    policy = rewriter.scope.policy
    return functools.partial(traced_for, policy.dtype, policy.lists, casts)


def _linear_call(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """A linear function and its transpose, which JAX traces when it is asked for."""

    def write(jaxpr: jc.Jaxpr) -> jc.Jaxpr:
        facts = rewriter.facts.program(eqn, jaxpr, ())
        return _program(
            rewriter, facts, recorded(jaxpr.invars), recorded(jaxpr.outvars)
        )

    tracing = _tracing(rewriter, eqn)
    params = derivatives.with_linear_call(eqn, write(frames[0].program), write, tracing)
    rewriter.emit(eqn, recorded(eqn.invars), recorded(eqn.outvars), params)


def _object(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """An object of which nothing is known but what it does, unless the user says."""
    rule, _ = rewriter.facts.ruling(eqn)
    if rule is not None:
        rewriter.emit(eqn, recorded(eqn.invars), recorded(eqn.outvars))
    else:
        _closed(rewriter, eqn, frames)


# Of those with one program that values pass through; or that they do not.
RULES = dict.fromkeys(HOLDERS, _closed) | {
    **dict.fromkeys((*OPEN_CALLS, "cond"), _open),
    "scan": _scan,
    "while": _while,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
    "linear_call": _linear_call,
    "Scan3": _scan,
    "CustomJVPTraced": _custom_jvp,
    "CustomVJPTraced": _custom_vjp,
    OBJECT: _object,
}
