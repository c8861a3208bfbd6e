"""Rewrites the primitives that hold jaxprs, with one rule for each.

    y:f32 = jit[jaxpr={ x:f32 w:f32. y:f32 = dot_general x w; in y }] x w
    y:f16 = jit[jaxpr={ x:f16 w:f16. y:f16 = dot_general x w; in y }] x' w'

An inner jaxpr takes and returns other dtypes only if nothing relies on the user's
dtypes. A carry keeps its dtype unless it is a half activation. A constant of a scan
keeps its dtype, because its gradient is a sum over the iterations.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jc
from jax.extend.core.primitives import stop_gradient_p

from jamp._autocast import derivatives
from jamp._autocast.closures import closed_over
from jamp._autocast.hijax import hi_primitive
from jamp._autocast.loops import half_carries
from jamp._autocast.marks import traced_for
from jamp._autocast.origins import origin_of_unknown
from jamp._autocast.primitives import Rule, primitive_name
from jamp._autocast.rewrite import Rewriter, rewritten
from jamp._autocast.scope import (
    Atom,
    dtype_of,
    is_float,
    recorded,
    region_rule,
)
from jamp._autocast.subjaxprs import (
    CHECKPOINT,
    HIGHER_ORDER,
    OBJECT,
    OPEN_CALLS,
    Subjaxpr,
    with_jaxprs,
)
from jamp._autocast.tracing import Itself
from jamp._autocast.values import Value, in_dtypes, one_of
from jamp._core.dtypes import FLOAT32


def _open(rewriter: Rewriter, eqn: jc.JaxprEqn, subs: list[Subjaxpr]) -> None:
    """Rewrites a call, or the branches of a `cond`, for operands in any dtype.

    If the results of branches differ in dtype, all return the user's dtypes.
    """
    given = _outgoing(rewriter, eqn.invars)
    operands = given[len(given) - len(subs[0].operands) :]  # without an index
    pairs = [_called(rewriter, eqn, sub, operands) for sub in subs]
    # The branches choose first: if they agree, none needs a cast at its end.
    written = [inside.returning() for inside, _ in pairs]
    outs = recorded(written[0].outvars)
    if any(recorded(w.outvars) != outs for w in written):
        outs = recorded(eqn.outvars)
        written = [inside.returning(outs) for inside, _ in pairs]
    results = map(one_of, zip(*(values for _, values in pairs), strict=True))
    if rewriter.scope.policy.fp8 and eqn.primitive.name == CHECKPOINT:
        policy = rewriter.scope.policy.fp8.checkpoint_policy(eqn.params["policy"])
        eqn = eqn.replace(params=eqn.params | {"policy": policy})
    params = with_jaxprs(eqn, written)
    ins = [value.dtype for value in given]
    rewriter.emit(eqn, ins, in_dtypes(results, outs), params)
    made = rewriter.eqns[-1].outvars
    if made and not subs[0].own_residuals:
        rewriter.calls[made[0]] = [inside for inside, _ in pairs]


def _scan(rewriter: Rewriter, eqn: jc.JaxprEqn, subs: list[Subjaxpr]) -> None:
    """Rewrites a scan. Its body takes each slice in the dtype that the slice votes for.

    A carry has the same dtype before and after an iteration. A carry that sums over the
    iterations would lose digits in half. So would the gradient of a constant, which the
    backward pass sums over the iterations.
    """
    (sub,), values = subs, rewriter.values
    fixed = sub.consts + sub.carries
    carries = range(sub.consts, fixed)
    given = values.closed(eqn.invars, carries)
    for i, v in enumerate(eqn.invars):
        value = values[v]
        given[i] = given[i]._replace(is_loop_invariant=i < sub.consts)
        if i >= fixed:
            given[i] = given[i]._replace(vote=value.vote, dtype=value.outgoing)
    in_half = _half_carries(rewriter, eqn, sub, given)
    for i in carries:
        if i - sub.consts in in_half:
            given[i] = given[i]._replace(dtype=values.half, vote=values.half)
        else:
            given[i] = given[i]._replace(carried=given[i].vote == FLOAT32)
    body = _rewritten(rewriter, eqn, sub.jaxpr, given, sub)
    outs = [given[i].dtype for i in carries]
    outs += [value.outgoing for value in body.results[sub.carries :]]
    results = []
    for i, inside in enumerate(body.results):
        value = values.unknown(eqn.outvars[i])._replace(source=inside.source)
        if i >= sub.carries or i in in_half:
            value = value._replace(vote=inside.vote)
        results.append(value)
    params = with_jaxprs(eqn, [body.returning(outs)])
    ins = [value.dtype for value in given]
    rewriter.emit(eqn, ins, in_dtypes(results, outs), params)


def _half_carries(
    rewriter: Rewriter, eqn: jc.JaxprEqn, sub: Subjaxpr, given: Sequence[Value]
) -> set[int]:
    """Returns the carries that are half before and after each iteration.

    `given` are the inputs of the body, with float32 carries.
    """
    values, end = rewriter.values, sub.consts + sub.carries
    if values.widest:
        return set()
    of_model, inputs = values.scope.policy.of_model, [values[v] for v in sub.operands]
    starts = inputs[sub.consts : end]
    are_weights = [not of_model or value.is_half_param for value in inputs]
    in_half = half_carries(sub, are_weights)
    # Half holds a start of zeros exactly.
    in_half = {i for i in in_half if not (starts[i].out_of_range or starts[i].changes)}
    if not in_half:
        return set()
    body = _rewritten(rewriter, eqn, sub.jaxpr, given, sub)
    return {i for i in in_half if body.results[i].vote == values.half}


def _while(rewriter: Rewriter, eqn: jc.JaxprEqn, subs: list[Subjaxpr]) -> None:
    """Rewrites a while loop. JAX does not sum gradients over its iterations."""
    (cond, body), values = subs, rewriter.values
    consts = cond.consts + body.consts
    carries = range(consts, len(eqn.invars))
    given = values.closed(eqn.invars, carries)
    for i, v in enumerate(eqn.invars[:consts]):
        given[i] = given[i]._replace(vote=values[v].vote, dtype=values[v].dtype)
    for i in carries:
        given[i] = given[i]._replace(carried=given[i].vote == FLOAT32)
    of_test = given[: cond.consts] + given[consts:]
    test = _rewritten(rewriter, eqn, cond.jaxpr, of_test)
    trip = _rewritten(rewriter, eqn, body.jaxpr, given[cond.consts :], body)
    written = [test.returning([jnp.dtype(bool)]), trip.returning(recorded(eqn.outvars))]
    results = values.recorded(eqn)
    ins = [value.dtype for value in given]
    rewriter.emit(eqn, ins, results, with_jaxprs(eqn, written))


def _closed(rewriter: Rewriter, eqn: jc.JaxprEqn, subs: list[Subjaxpr]) -> None:
    """Rewrites a jaxpr whose inputs and outputs keep the user's dtypes."""
    given = rewriter.values.closed(eqn.invars)
    uses = rewriter.uses_of(eqn.outvars)
    inside = _rewritten(rewriter, eqn, subs[0].jaxpr, given, uses=uses)
    written = inside.returning(recorded(eqn.outvars))
    rewriter.emit_recorded(eqn, with_jaxprs(eqn, [written]))


def _outgoing(rewriter: Rewriter, atoms: Sequence[Atom]) -> list[Value]:
    """Returns values in the dtypes in which they enter another jaxpr."""
    values = [rewriter.values[v] for v in atoms]
    return in_dtypes(values, [value.outgoing for value in values])


def _rewritten(
    rewriter: Rewriter,
    eqn: jc.JaxprEqn,
    jaxpr: jc.Jaxpr,
    given: Sequence[Value],
    sub: Subjaxpr | None = None,
    uses: Sequence[Any] = (),
    numbers: dict[Any, int] | None = None,
) -> Rewriter:
    """Reads and rewrites a jaxpr that an equation holds.

    With a `sub`, fp8 finds the `uses` itself. Roots outside of the jaxpr get
    `numbers`, so that two calls can share it.
    """
    numbers = {} if numbers is None else numbers
    given = [x._replace(origin=x.origin.numbered(numbers)) for x in given]
    if sub and rewriter.fp8:
        uses = rewriter.fp8.uses_of_results(sub)
    scope = rewriter.values.scope_inside(eqn)
    return rewritten(jaxpr, given, scope, rewriter.rules, uses)


def _called(
    rewriter: Rewriter, eqn: jc.JaxprEqn, sub: Subjaxpr, given: Sequence[Value]
) -> tuple[Rewriter, list[Value]]:
    """Rewrites an open jaxpr. Returns it, and its results as values of the caller."""
    numbers: dict[Any, int] = {}
    found = _rewritten(rewriter, eqn, sub.jaxpr, given, sub, numbers=numbers)
    known = {i: root for root, i in numbers.items()}
    pairs = zip(found.results, sub.results, strict=True)
    return found, [
        value._replace(origin=value.origin.returned(known, v)) for value, v in pairs
    ]


def _custom_jvp(rewriter: Rewriter, eqn: jc.JaxprEqn, subs: list[Subjaxpr]) -> None:
    """Rewrites a function and its custom JVP rule."""
    operands = _outgoing(rewriter, eqn.invars)
    found, values = _called(rewriter, eqn, subs[0], operands)
    inner = found.returning()
    results = in_dtypes(values, recorded(inner.outvars))
    is_object = hi_primitive(eqn) is not None
    consts = 0 if is_object else derivatives.custom_consts(eqn)

    # JAX calls this when it differentiates, and only then traces the user's rule.
    def write(jaxpr: jc.Jaxpr, absent: Sequence[bool], zeros: Sequence[bool]):
        # JAX requires that a tangent has the dtype of its primal in `inner`. Only an
        # integer's tangent is a float0.
        # Half operands vote for half, as in the function. Then relu's derivative reads
        # relu's own half operand, and JAX saves no other residual.
        incoming = _with_tangents(operands[consts:], absent)
        given = [
            x._replace(
                dtype=x.dtype if is_float(v) else dtype_of(v),
                origin=origin_of_unknown(v),
            )
            for x, v in zip(incoming, jaxpr.invars, strict=True)
        ]
        pairs = zip(_with_tangents(results, zeros), jaxpr.outvars, strict=True)
        outs = [x.dtype if is_float(v) else dtype_of(v) for x, v in pairs]
        return _rewritten(rewriter, eqn, jaxpr, given).returning(outs)

    make = derivatives.custom_jvp if is_object else derivatives.with_custom_jvp
    make = functools.partial(make, eqn, inner, write, _tracing(rewriter, eqn))
    made: Any = _shared(rewriter, eqn, found, make)
    ins = [value.dtype for value in operands]
    if is_object:
        rewriter.emit_function(eqn, made, ins, results)
    else:
        rewriter.emit(eqn, ins, results, made)


def _shared(
    rewriter: Rewriter,
    eqn: jc.JaxprEqn,
    found: Rewriter,
    make: Callable[[], Any],
) -> Any:
    """Makes a function or parameters for an equation, as for an equal equation before.

    JAX then differentiates both once. They have the same jaxpr and rules, as calls of
    one jitted function do, and autocast knows the same of their operands.
    """
    key = "function", found, *map(Itself, eqn.params.values())
    if key not in rewriter.scope.cache:
        rewriter.scope.cache[key] = make()
    return rewriter.scope.cache[key]


def _with_tangents[T](of_primals: Sequence[T], zeros: Sequence[bool]) -> list[T]:
    """Appends the values of primals with a tangent to the values of all primals."""
    there = (x for x, zero in zip(of_primals, zeros, strict=True) if not zero)
    return [*of_primals, *there]


def _custom_vjp(rewriter: Rewriter, eqn: jc.JaxprEqn, subs: list[Subjaxpr]) -> None:
    """Rewrites a function and its custom VJP rules, which keep the user's dtypes.

    The user's `bwd` takes the residuals of the user's `fwd` and returns gradients in
    the dtypes of the operands. So both rules keep the dtypes at their borders.
    """
    (sub,), write = subs, functools.partial(_kept, rewriter, eqn)
    given = rewriter.values.closed(sub.operands)
    found = _rewritten(rewriter, eqn, sub.jaxpr, given)
    inner = found.returning(recorded(sub.jaxpr.outvars))
    # The rules may close over values of an outer jaxpr. These become operands without
    # a derivative, like the values that the function itself closes over.
    free = [v for v in closed_over(eqn) if v in rewriter.versions]
    tracing = _tracing(rewriter, eqn)
    run = functools.partial(derivatives.run_rule, write, tracing, free)
    make = functools.partial(derivatives.custom_vjp, eqn, inner, run, len(free))
    function = _shared(rewriter, eqn, found, make)
    eqn = eqn.replace(invars=[*eqn.invars, *(_stopped(rewriter, v) for v in free)])
    results = rewriter.values.recorded(eqn)
    rewriter.emit_function(eqn, function, recorded(eqn.invars), results)


def _kept(
    rewriter: Rewriter,
    eqn: jc.JaxprEqn,
    jaxpr: jc.Jaxpr,
    given: Sequence[Value] = (),
) -> jc.Jaxpr:
    """Rewrites a jaxpr of an equation that keeps the user's dtypes at its borders."""
    return _rewritten(rewriter, eqn, jaxpr, given).returning(recorded(jaxpr.outvars))


def _stopped(rewriter: Rewriter, var: jc.Var) -> jc.Var:
    """Writes a `stop_gradient` of a variable, and returns its result."""
    if not is_float(var):
        return var
    eqn = jc.new_jaxpr_eqn([var], [jc.Var(var.aval)], stop_gradient_p, {}, set())
    rewriter.emit_recorded(eqn)
    return eqn.outvars[0]


def _tracing(rewriter: Rewriter, eqn: jc.JaxprEqn) -> Any:
    """Returns the context in which JAX later traces a user's rule."""
    region = region_rule(rewriter.scope, eqn, primitive_name(eqn))
    casts = region is None or region[0] not in (Rule.FLOAT32, Rule.RECORDED)
    policy = rewriter.scope.policy
    return functools.partial(traced_for, policy.dtype, policy.lists, casts)


def _linear_call(rewriter: Rewriter, eqn: jc.JaxprEqn, subs: list[Subjaxpr]) -> None:
    """Rewrites a linear function, and its transpose when JAX traces the transpose."""
    write = functools.partial(_kept, rewriter, eqn)
    tracing = _tracing(rewriter, eqn)
    params = derivatives.with_linear_call(eqn, write(subs[0].jaxpr), write, tracing)
    rewriter.emit_recorded(eqn, params)


def _object(rewriter: Rewriter, eqn: jc.JaxprEqn, subs: list[Subjaxpr]) -> None:
    """Rewrites the jaxpr of an unknown object, unless the user's lists decide."""
    given = [rewriter.values[v] for v in eqn.invars]
    rule, _ = rewriter.values.ruling(eqn, primitive_name(eqn), given)
    if rule is not None:
        rewriter.emit_recorded(eqn)
    else:
        _closed(rewriter, eqn, subs)


# `_open` lets values pass in any dtype. `_closed`, the default, keeps the user's.
RULES = dict.fromkeys(HIGHER_ORDER, _closed) | {
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
