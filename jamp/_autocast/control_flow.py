"""One rule for each primitive that holds programs: how to rewrite it.

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
from jamp._autocast.consumers import wants_of_carries
from jamp._autocast.kernels import traced_for
from jamp._autocast.lists import Rule
from jamp._autocast.origins import itself
from jamp._autocast.program import (
    Atom,
    dtype_of,
    is_float,
    recorded,
    region_rule,
)
from jamp._autocast.rewrite import Boundary, Rewriter, unchanged
from jamp._core.dtypes import FLOAT32


def _call(rewriter: Rewriter, eqn: jc.JaxprEqn) -> None:
    """A program that is called once: values pass in whatever dtype they are in."""
    boundary, values = _free(rewriter, eqn, eqn.invars), rewriter.values
    if values.facts.only_moves(eqn):
        ins = [
            FLOAT32 if values.meets_float32(v) else dtype
            for v, dtype in zip(eqn.invars, boundary.in_dtypes, strict=True)
        ]
        boundary = boundary._replace(in_dtypes=ins)
    _write(rewriter, eqn, boundary)


def _cond(rewriter: Rewriter, eqn: jc.JaxprEqn) -> None:
    """Branches agree on what goes out: the program's dtypes where theirs differ."""
    index, *operands = eqn.invars
    boundary = _free(rewriter, eqn, operands)

    def branches():
        return [rewriter.program(eqn, b, boundary) for b in eqn.params["branches"]]

    # Each as it likes, first: if they agree, nothing is cast at the end of any.
    written = branches()
    outs = recorded(written[0].outvars)
    if any(recorded(branch.outvars) != outs for branch in written):
        outs = recorded(eqn.outvars)
        boundary = boundary._replace(out_dtypes=outs)
        written = branches()
    params = {**eqn.params, "branches": tuple(written)}
    rewriter.emit(eqn, [dtype_of(index), *boundary.in_dtypes], outs, params)


def _scan(rewriter: Rewriter, eqn: jc.JaxprEqn) -> None:
    """Slices pass as they are; weights among them are cast slice by slice."""
    consts, carry = jax_internals.scan_counts(eqn)
    fixed, values = consts + carry, rewriter.values
    # A carry must come out as it went in, and one that sums over the trips would lose
    # digits in half; the backward pass sums the gradients of constants in the same way.
    carries = [values.facts.of(v).vote or dtype_of(v) for v in eqn.outvars[:carry]]
    slices = [values.outgoing_dtype(v) for v in eqn.invars[fixed:]]
    ins = [*recorded(eqn.invars[:consts]), *carries, *slices]
    outs = [*carries, *[None] * (len(eqn.outvars) - carry)]
    given = values.facts.of_slices(eqn)
    for i, v in enumerate(eqn.outvars[:carry], consts):
        given[i] = given[i]._replace(vote=values.facts.of(v).vote)
    carried = wants_of_carries(eqn.outvars[:carry], values.facts)
    wants = [*carried, *rewriter.consumers.wants_of(eqn.outvars[carry:])]
    _write(rewriter, eqn, Boundary(ins, outs, wants, given))


def _while(rewriter: Rewriter, eqn: jc.JaxprEqn) -> None:
    """Constants pass as they are: no gradient of theirs is summed over the trips."""
    cond, body, cond_consts, body_consts = jax_internals.while_programs(eqn)
    outs, consts = recorded(eqn.outvars), cond_consts + body_consts
    fixed = map(rewriter.values.computed_dtype, eqn.invars[:consts])
    ins = [*fixed, *recorded(eqn.invars[consts:])]
    facts = rewriter.values.facts.of_operands(eqn, range(consts, len(ins)))
    for i, v in enumerate(eqn.invars[:consts]):
        facts[i] = facts[i]._replace(vote=rewriter.values.facts.of(v).vote)
    test = [*range(cond_consts), *range(consts, len(ins))]
    going = Boundary(
        [ins[i] for i in test], [jnp.dtype(bool)], facts=[facts[i] for i in test]
    )
    cond = rewriter.program(eqn, cond, going)
    wants = wants_of_carries(eqn.outvars, rewriter.values.facts)
    trip = Boundary(ins[cond_consts:], outs, wants, facts[cond_consts:])
    body = rewriter.program(eqn, body, trip)
    params = jax_internals.with_while_programs(eqn, cond, body)
    rewriter.emit(eqn, ins, outs, params)


def _as_recorded_outside(rewriter: Rewriter, eqn: jc.JaxprEqn) -> None:
    """A program whose inputs and outputs keep the user's dtypes: half lives inside."""
    facts = rewriter.values.facts.of_operands(eqn)
    boundary = Boundary(recorded(eqn.invars), recorded(eqn.outvars), facts=facts)
    _write(rewriter, eqn, boundary)


def _free(rewriter: Rewriter, eqn: jc.JaxprEqn, operands: Sequence[Atom]) -> Boundary:
    """Of a program whose values may be in any dtype: known is who reads them."""
    values = rewriter.values
    return Boundary(
        list(map(values.outgoing_dtype, operands)),
        [None] * len(eqn.outvars),
        rewriter.consumers.wants_of(eqn.outvars),
        [values.facts.of(v) for v in operands],
    )


def _write(rewriter: Rewriter, eqn: jc.JaxprEqn, boundary: Boundary) -> None:
    """Writes an equation that holds one program, and that program."""
    inner = rewriter.program(eqn, jax_internals.program_of(eqn), boundary)
    params = jax_internals.with_program(eqn, inner)
    rewriter.emit(eqn, boundary.in_dtypes, recorded(inner.outvars), params)


def _custom_jvp(rewriter: Rewriter, eqn: jc.JaxprEqn) -> None:
    """The function and the user's derivative of it, each rewritten."""
    boundary = _free(rewriter, eqn, eqn.invars)
    ins = boundary.in_dtypes
    inner = rewriter.program(eqn, jax_internals.program_of(eqn), boundary)
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
            _of_floats(_with_tangents(args, absent), jaxpr.invars),
            _of_floats(_with_tangents(outs, zeros), jaxpr.outvars),
            facts=[fact._replace(origin=itself(v)) for fact, v in given],
        )
        return rewriter.program(eqn, jaxpr, boundary)

    tracing = _tracing(rewriter, eqn)
    params = derivatives.with_custom_jvp(eqn, inner, write, tracing)
    rewriter.emit(eqn, ins, outs, params)


def _with_tangents[T](of_primals: Sequence[T], zeros: Sequence[bool]) -> list[T]:
    """What primals have, and after it what those have whose tangents are there."""
    there = (x for x, zero in zip(of_primals, zeros, strict=True) if not zero)
    return [*of_primals, *there]


def _of_floats(dtypes: Sequence[Any], variables: Sequence[Atom]) -> list[Any]:
    """The dtypes of floats; what is none keeps its own."""
    pairs = zip(dtypes, variables, strict=True)
    return [d if is_float(v) else dtype_of(v) for d, v in pairs]


def _custom_vjp(rewriter: Rewriter, eqn: jc.JaxprEqn) -> None:
    """As `_custom_jvp`; in and out as the program says, for `bwd` is made for that.

    The user's `bwd` takes what the user's `fwd` gives, and returns gradients of
    operands in the program's dtypes: both keep what goes in and out of them.
    """
    ins, outs = recorded(eqn.invars), recorded(eqn.outvars)
    program = jax_internals.program_of(eqn)
    inner = rewriter.program(eqn, program, Boundary(ins, outs))

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
    region, _ = region_rule(rewriter.scope, eqn)
    casts = region not in (Rule.FLOAT32, Rule.RECORDED)
    return functools.partial(traced_for, rewriter.scope.policy, casts)


RULES = {
    "jit": _call,
    "closed_call": _call,
    jax_internals.CHECKPOINT: _call,
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "shard_map": _as_recorded_outside,
    jax_internals.OPTIMIZED_VJP: _as_recorded_outside,
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
