"""Inlines calls that contain no matmul into the jaxprs that call them.

    y = jit[name=silu jaxpr={ x. s = logistic x; y = mul x s }] x
    s = logistic x; y = mul x s

Autocast can then decide on the operations of the call and its neighbors together.
"""

import math
from typing import Any

from jax.extend import core as jc

from jamp._autocast import jax_internals
from jamp._autocast.primitives import is_matmul
from jamp._autocast.scope import Scope, is_float32, name_stack
from jamp._autocast.subjaxprs import once_per_jaxpr, subjaxprs_of, with_equations

_MOST = 1000  # calls that share jaxprs may stand for any number of equations


def inlined(jaxpr: jc.Jaxpr, scope: Scope) -> jc.Jaxpr:
    """Returns a jaxpr with the equations of these calls in place of the calls."""
    key = "inlined", jaxpr, bool(scope.library), scope.may_hold
    if key in scope.cache:
        return scope.cache[key]
    if not any([_is_inlined(eqn, scope) for eqn in jaxpr.eqns]):
        return jaxpr
    eqns: list[jc.JaxprEqn] = []
    values: dict[Any, Any] = {}  # the result of a call -> the inlined value
    consts = dict(zip(jaxpr.constvars, jaxpr.consts, strict=True))
    for eqn in jaxpr.eqns:
        eqn = _reading(eqn, values)
        if not _is_inlined(eqn, scope):
            eqns.append(eqn)
            continue
        inside = scope.scope_inside(eqn)._replace(may_hold=scope.may_hold)
        body = inlined(eqn.params["jaxpr"], inside)
        consts.update(zip(body.constvars, body.consts, strict=True))
        mark = inside.names.removeprefix(name_stack(scope, eqn)).strip("/")
        source = jax_internals.with_scope(eqn, mark) if mark else eqn
        known: dict[Any, Any] = dict(zip(body.invars, eqn.invars, strict=True))
        for inner in body.eqns:
            outvars = [jc.Var(v.aval) for v in inner.outvars]
            new = jax_internals.equation_inside(source, _reading(inner, known), outvars)
            known.update(zip(inner.outvars, outvars, strict=True))
            eqns.append(new)
        outs = (_value(v, known) for v in body.outvars)
        values.update(zip(eqn.outvars, outs, strict=True))
    scope.cache[key] = with_equations(
        jaxpr,
        eqns,
        outvars=[_value(v, values) for v in jaxpr.outvars],
        constvars=list(consts),
        consts=list(consts.values()),
    )
    return scope.cache[key]


def _is_inlined(eqn: jc.JaxprEqn, scope: Scope) -> bool:
    """Returns whether a call is inlined.

    JAX moves arrays that a checkpoint closes over out of it, but leaves those that a
    `jit` in it closes over in the `jit`. So there, such a call stays.
    """
    if eqn.primitive.name != "jit" or not jax_internals.is_bare_jit(eqn):
        return False
    if eqn.params["jaxpr"].consts and not scope.may_hold:
        return False
    has_float32 = any(map(is_float32, (*eqn.invars, *eqn.outvars)))
    return has_float32 and _equations_in(eqn.params["jaxpr"]) <= _MOST


@once_per_jaxpr
def _equations_in(jaxpr: jc.Jaxpr) -> float:
    """Returns how many equations a jaxpr and its calls have, or inf with a matmul."""
    return sum(map(_equations_of, jaxpr.eqns))


def _equations_of(eqn: jc.JaxprEqn) -> float:
    if subs := subjaxprs_of(eqn):
        return sum(_equations_in(sub.jaxpr) for sub in subs)
    return math.inf if is_matmul(eqn) else 1


def _value(atom: Any, values: dict[Any, Any]) -> Any:
    return atom if isinstance(atom, jc.Literal) else values.get(atom, atom)


def _reading(eqn: jc.JaxprEqn, values: dict[Any, Any]) -> jc.JaxprEqn:
    if not values:
        return eqn
    invars = [_value(v, values) for v in eqn.invars]
    return eqn.replace(invars=invars) if invars != eqn.invars else eqn
