"""Rewrites the primitives that hold programs, with one rule for each.

    y:f32 = jit[jaxpr={ x:f32 w:f32. y:f32 = dot_general x w; in y }] x w
    y:f16 = jit[jaxpr={ x:f16 w:f16. y:f16 = dot_general x w; in y }] x' w'

An inner program takes and returns other dtypes only if nothing relies on the user's
dtypes. A carry keeps its dtype unless it is a half activation. A constant of a scan
keeps its dtype, because its gradient is a sum over the trips.
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
    """Rewrites a call, or the branches of a `cond`, for operands in any dtype.

    If the results of the branches differ in dtype, all return the user's dtypes.
    """
    ins = list(map(rewriter.outgoing_dtype, eqn.invars))
    pairs = list(zip(frames, rewriter.facts.programs(eqn), strict=True))
    given = ins[len(eqn.invars) - len(frames[0].operands) :]  # without an index
    # The branches choose first: if they agree, none needs a cast at its end.
    written = [_program(rewriter, f, given, None, frame) for frame, f in pairs]
    if any(recorded(w.outvars) != recorded(written[0].outvars) for w in written):
        outs = recorded(eqn.outvars)
        written = [_program(rewriter, f, given, outs, frame) for frame, f in pairs]
    if rewriter.scope.policy.fp8 and eqn.primitive.name == CHECKPOINT:
        policy = rewriter.scope.policy.fp8.checkpoint_policy(eqn.params["policy"])
        eqn = eqn.replace(params=eqn.params | {"policy": policy})
    _emit(rewriter, eqn, ins, written)


def _scan(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """Rewrites a scan, whose body takes each slice in the dtype that it votes for."""
    (frame,), facts = frames, rewriter.facts
    consts, carry = frame.consts, frame.carries
    # A carry has the same dtype before and after a trip. A carry that sums over the
    # trips would lose digits in half. So would the gradient of a constant, which the
    # backward pass sums over the trips.
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
    """Rewrites a while loop. JAX sums no gradient of its constants over the trips."""
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
    """Rewrites a program whose inputs and outputs keep the user's dtypes."""
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
    """Returns a rewritten program. With a `frame`, fp8 finds the `uses` itself."""
    outs = [None] * len(facts.jaxpr.outvars) if outs is None else outs
    if frame and rewriter.fp8:
        uses = rewriter.fp8.uses_of_results(frame)
    return rewrite(facts, ins, outs, rewriter.rules, uses)


def _emit(
    rewriter: Rewriter, eqn: jc.JaxprEqn, ins: Sequence[Any], written: list[jc.Jaxpr]
) -> None:
    """Writes an equation with rewritten programs. The last one returns its results."""
    outs = recorded(written[-1].outvars)
    rewriter.emit(eqn, ins, outs, with_programs(eqn, written))


def _custom_jvp(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """Rewrites a function and its custom JVP rule."""
    ins = list(map(rewriter.outgoing_dtype, eqn.invars))
    (facts,) = rewriter.facts.programs(eqn)
    inner = _program(rewriter, facts, ins, None, frames[0])
    outs = recorded(inner.outvars)
    prim = hi_primitive(eqn)
    consts = 0 if prim is not None else derivatives.custom_consts(eqn)
    args, known = ins[consts:], facts.given[consts:]

    # JAX traces the user's rule only when it differentiates, and calls this then.
    def write(jaxpr: jc.Jaxpr, absent: Sequence[bool], zeros: Sequence[bool]):
        # JAX requires that a tangent has the dtype of its primal in `inner`. Only an
        # integer's tangent is a float0.
        # Half operands vote for half, as in the function. Then relu's derivative reads
        # relu's own half operand, and JAX saves no other residual.
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
    """Appends to the values of all primals the values of those with a tangent."""
    there = (x for x, zero in zip(of_primals, zeros, strict=True) if not zero)
    return [*of_primals, *there]


def _float_dtypes(dtypes: Sequence[Any], variables: Sequence[Atom]) -> list[Any]:
    """Returns the given dtype for each float variable, and its own for any other."""
    pairs = zip(dtypes, variables, strict=True)
    return [d if is_float(v) else dtype_of(v) for d, v in pairs]


def _custom_vjp(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """Rewrites a function and its custom VJP rules, which keep the user's dtypes.

    The user's `bwd` takes the residuals of the user's `fwd` and returns gradients in
    the dtypes of the operands. So both rules keep the dtypes at their borders.
    """

    def write(jaxpr: jc.Jaxpr) -> jc.Jaxpr:
        facts = rewriter.facts.program(eqn, jaxpr, ())
        ins, outs = recorded(jaxpr.invars), recorded(jaxpr.outvars)
        return _program(rewriter, facts, ins, outs)

    inner = write(frames[0].program)
    # The rules may close over values of an outer program. These become operands without
    # a derivative, like the values that the function itself closes over.
    free = [v for v in derivatives.closed_over(eqn) if v in rewriter.versions]
    free = free if not eqn.effects else []  # effects refer to operands by position
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
    """Writes a `stop_gradient` of a variable, and returns its result."""
    if not is_float(var):
        return var
    eqn = jc.new_jaxpr_eqn([var], [jc.Var(var.aval)], stop_gradient_p, {}, set())
    rewriter.emit(eqn, recorded(eqn.invars), recorded(eqn.outvars))
    return eqn.outvars[0]


def _tracing(rewriter: Rewriter, eqn: jc.JaxprEqn) -> Any:
    """Returns the context in which JAX later traces a user's rule."""
    region = region_rule(rewriter.scope, eqn)
    casts = region is None or region[0] not in (Rule.FLOAT32, Rule.RECORDED)
    policy = rewriter.scope.policy
    return functools.partial(traced_for, policy.dtype, policy.lists, casts)


def _linear_call(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """Rewrites a linear function, and its transpose when JAX traces that."""

    def write(jaxpr: jc.Jaxpr) -> jc.Jaxpr:
        facts = rewriter.facts.program(eqn, jaxpr, ())
        return _program(
            rewriter, facts, recorded(jaxpr.invars), recorded(jaxpr.outvars)
        )

    tracing = _tracing(rewriter, eqn)
    params = derivatives.with_linear_call(eqn, write(frames[0].program), write, tracing)
    rewriter.emit(eqn, recorded(eqn.invars), recorded(eqn.outvars), params)


def _object(rewriter: Rewriter, eqn: jc.JaxprEqn, frames: list[Frame]) -> None:
    """Rewrites the program of an unknown object, unless the user's lists decide."""
    rule, _ = rewriter.facts.ruling(eqn)
    if rule is not None:
        rewriter.emit(eqn, recorded(eqn.invars), recorded(eqn.outvars))
    else:
        _closed(rewriter, eqn, frames)


# `_open` lets values pass in any dtype. `_closed`, the default, keeps the user's.
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
