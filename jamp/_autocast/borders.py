"""Rounds the float32 results of calls inside the calls, if only a cast reads them.

    y:f32 = jit[jaxpr={ x. ...; y = tanh x; in y }] x; z:f16 = convert y
    z:f16 = jit[jaxpr={ x. ...; y = tanh x; z = convert y; in z }] x

Otherwise the float32 values before the cast would be in no island: an island ends with
a cast in the same jaxpr. The numbers are the same.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jax.extend import core as jc

from jamp._autocast import jax_internals
from jamp._autocast.graph import Graph, rounds
from jamp._autocast.primitives import Shape, primitive_name, traits_of
from jamp._autocast.scope import dtype_of, recorded
from jamp._autocast.subjaxprs import with_equations, with_jaxprs


class Written(Protocol):
    """A jaxpr that can be written with results in any dtypes."""

    def returning(self, out_dtypes: Sequence[Any]) -> jc.Jaxpr: ...


def with_rounded_results(
    jaxpr: jc.Jaxpr, calls: Mapping[jc.Var, Sequence[Written]]
) -> jc.Jaxpr:
    """Returns a rewritten jaxpr whose calls return what their only reader casts.

    `calls` maps the first result of each call to its jaxprs.
    """
    called = [
        i for i, e in enumerate(jaxpr.eqns) if e.outvars and e.outvars[0] in calls
    ]
    if not called:
        return jaxpr
    graph, eqns = Graph(jaxpr), list[jc.JaxprEqn | None](jaxpr.eqns)
    for i in called:
        call = jaxpr.eqns[i]
        outvars = [_rounded(v, graph, eqns) for v in call.outvars]
        if outvars != call.outvars:
            dtypes = recorded(outvars)
            written = [inside.returning(dtypes) for inside in calls[call.outvars[0]]]
            params = with_jaxprs(call, written)
            eqns[i] = call.replace(outvars=outvars, params=params)
    return with_equations(jaxpr, [eqn for eqn in eqns if eqn is not None])


def _rounded(result: jc.Var, graph: Graph, eqns: list[jc.JaxprEqn | None]) -> jc.Var:
    """Returns the half version of a result, and removes its only cast from `eqns`.

    Reshapes before the cast become half too. Without such a cast, returns the result.
    """
    value, indices = result, list[int]()
    while True:
        readers = graph.readers_of([value])
        if len(readers) != 1 or len(eqns) in readers:
            return result
        (i,) = readers
        indices.append(i)
        eqn = graph.eqns[i]
        if rounds(eqn):
            break
        if traits_of(primitive_name(eqn)).shape is not Shape.RESHAPE:
            return result
        (value,) = eqn.outvars
    *reshapes, cast = indices
    (half,) = graph.eqns[cast].outvars
    eqns[cast] = None
    for i in reversed(reshapes):
        eqn = graph.eqns[i]
        (operand,) = eqn.invars
        before = jc.Var(jax_internals.in_dtype(operand.aval, dtype_of(half)))
        eqns[i] = eqn.replace(invars=[before], outvars=[half])
        half = before
    return half
