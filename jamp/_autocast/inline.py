"""Inlines calls that contain no matmul into the programs that call them.

    y = jit[name=silu jaxpr={ x. s = logistic x; y = mul x s }] x
    s = logistic x; y = mul x s

Autocast can then decide on the operations of the call and its neighbors together.
"""

from typing import Any

from jax.extend import core as jc

from jamp._autocast import jax_internals
from jamp._autocast.frames import frames_of, with_equations
from jamp._autocast.primitives import is_matmul
from jamp._autocast.program import Scope, is_float32, name_stack


def inlined(jaxpr: jc.Jaxpr, scope: Scope) -> jc.Jaxpr:
    """Returns a program with the equations of these calls in place of the calls."""
    key = "inlined", jaxpr, bool(scope.library)
    if key not in scope.written:
        scope.written[key] = _inlined(jaxpr, scope)
    return scope.written[key]


def _inlined(jaxpr: jc.Jaxpr, scope: Scope) -> jc.Jaxpr:
    if not any(_is_inlined(eqn, scope.written) for eqn in jaxpr.eqns):
        return jaxpr
    eqns: list[jc.JaxprEqn] = []
    values: dict[Any, Any] = {}  # the result of a call -> the inlined value
    consts = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    for eqn in jaxpr.eqns:
        eqn = _reading(eqn, values)
        if not _is_inlined(eqn, scope.written):
            eqns.append(eqn)
            continue
        inside = scope.scope_of_programs(eqn)
        program = inlined(eqn.params["jaxpr"], inside)
        consts.update(zip(program.constvars, program.consts, strict=True))
        mark = inside.names.removeprefix(name_stack(scope, eqn)).strip("/")
        place = jax_internals.with_scope(eqn, mark) if mark else eqn
        known: dict[Any, Any] = dict(zip(program.invars, eqn.invars, strict=True))
        for inner in program.eqns:
            outvars = [jc.Var(v.aval) for v in inner.outvars]
            new = jax_internals.equation_inside(place, _reading(inner, known), outvars)
            known.update(zip(inner.outvars, outvars, strict=True))
            eqns.append(new)
        outs = (_value(v, known) for v in program.outvars)
        values.update(zip(eqn.outvars, outs, strict=True))
    return with_equations(
        jaxpr,
        eqns,
        outvars=[_value(v, values) for v in jaxpr.outvars],
        constvars=list(consts),
        consts=list(consts.values()),
    )


def _is_inlined(eqn: jc.JaxprEqn, known: dict[Any, Any]) -> bool:
    if eqn.primitive.name != "jit" or not jax_internals.is_bare_jit(eqn):
        return False
    has_float32 = any(map(is_float32, (*eqn.invars, *eqn.outvars)))
    return has_float32 and not _multiplies(eqn.params["jaxpr"], known)


def _multiplies(program: jc.Jaxpr, known: dict[Any, Any]) -> bool:
    key = "multiplies", program
    if key not in known:
        known[key] = any(_has_matmul(eqn, known) for eqn in program.eqns)
    return known[key]


def _has_matmul(eqn: jc.JaxprEqn, known: dict[Any, Any]) -> bool:
    frames = frames_of(eqn)
    inside = any(_multiplies(frame.program, known) for frame in frames)
    return inside or not frames and is_matmul(eqn)


def _value(atom: Any, values: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, jc.Literal) else values.get(atom, atom)


def _reading(eqn: jc.JaxprEqn, values: dict[Any, Any]) -> jc.JaxprEqn:
    if not values:
        return eqn
    invars = [_value(v, values) for v in eqn.invars]
    return eqn.replace(invars=invars) if invars != eqn.invars else eqn
