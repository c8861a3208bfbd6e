"""One rule for each primitive that holds programs: how to write it anew.

Programs are passed to where they came from in other dtypes only where nothing depends
on them: carries keep the user's, and so do constants of loops, whose gradients are
sums.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jc

from jamp._autocast.paint import Painter
from jamp._autocast.program import dtype_of, is_float, out_dtypes
from jamp._core.compat import scan_counts, shape_like


def _recorded(variables: Any) -> list[Any]:
    return [dtype_of(v) for v in variables]


def _call(name: str, *, keeps_inputs: bool = False):
    """A program that is called once: values pass in whatever dtype they are in.

    Where it keeps its inputs for the backward pass, no half copies of them are made.
    """

    def rule(painter: Painter, eqn: jc.JaxprEqn) -> None:
        if keeps_inputs:
            ins = [painter.handed(v) for v in eqn.invars]
        else:
            ins = painter.passed(eqn.invars)
        free = [None] * len(eqn.outvars)
        wants = painter.demand.of(eqn.outvars)
        neutral = [painter.is_neutral(v) for v in eqn.invars]
        inner = painter.paint(eqn, eqn.params[name], ins, free, wants, neutral)
        painter.emit(eqn, ins, out_dtypes(inner), {**eqn.params, name: inner})

    return rule


def _cond(painter: Painter, eqn: jc.JaxprEqn) -> None:
    """Branches agree on what goes out: the program's dtypes where theirs differ."""
    index, *ins = painter.passed(eqn.invars)
    wants = painter.demand.of(eqn.outvars)
    neutral = [painter.is_neutral(v) for v in eqn.invars[1:]]

    def branches(outs):
        painter.programs.clear()
        return [
            painter.paint(eqn, branch, ins, outs, wants, neutral)
            for branch in eqn.params["branches"]
        ]

    painted = branches([None] * len(eqn.outvars))
    outs = out_dtypes(painted[0])
    if any(out_dtypes(branch) != outs for branch in painted):
        outs = _recorded(eqn.outvars)
        painted = branches(outs)
    params = {**eqn.params, "branches": tuple(painted)}
    painter.emit(eqn, [index, *ins], outs, params)


def _scan(painter: Painter, eqn: jc.JaxprEqn) -> None:
    """Slices pass as they are; weights among them are cast slice by slice."""
    jaxpr = eqn.params["jaxpr"]
    consts, carry, _ = scan_counts(eqn.params)
    fixed = consts + carry
    ins = _recorded(eqn.invars[:fixed])
    ins += [painter.handed(v) for v in eqn.invars[fixed:]]
    outs = [*_recorded(eqn.outvars[:carry]), *[None] * (len(eqn.outvars) - carry)]
    wants = painter.demand.of(eqn.outvars)
    inner = painter.paint(eqn, jaxpr, ins, outs, wants)
    painter.emit(eqn, ins, out_dtypes(inner), {**eqn.params, "jaxpr": inner})


def _while(painter: Painter, eqn: jc.JaxprEqn) -> None:
    params = eqn.params
    ins, outs = _recorded(eqn.invars), _recorded(eqn.outvars)
    cond_consts, body_consts = params["cond_nconsts"], params["body_nconsts"]
    carry = ins[cond_consts + body_consts :]
    cond = painter.paint(
        eqn, params["cond_jaxpr"], ins[:cond_consts] + carry, [jnp.dtype(bool)]
    )
    body = painter.paint(eqn, params["body_jaxpr"], ins[cond_consts:], outs)
    painter.emit(eqn, ins, outs, {**params, "cond_jaxpr": cond, "body_jaxpr": body})


def _as_recorded_outside(name: str):
    """A program whose inputs and outputs keep the user's dtypes: half lives inside."""

    def rule(painter: Painter, eqn: jc.JaxprEqn) -> None:
        ins, outs = _recorded(eqn.invars), _recorded(eqn.outvars)
        inner = painter.paint(eqn, eqn.params[name], ins, outs)
        painter.emit(eqn, ins, outs, {**eqn.params, name: inner})

    return rule


def _custom_jvp(painter: Painter, eqn: jc.JaxprEqn) -> None:
    """The function and the user's derivative of it, each written anew."""
    call, count = eqn.params["call_jaxpr"], eqn.params["num_consts"]
    jvp_thunk = eqn.params["jvp_jaxpr_fun"]
    ins = painter.passed(eqn.invars)
    wants = painter.demand.of(eqn.outvars)
    neutral = [painter.is_neutral(v) for v in eqn.invars]
    inner = painter.paint(eqn, call, ins, [None] * len(eqn.outvars), wants, neutral)
    outs = out_dtypes(inner)

    @jax.custom_jvp
    def function(*args):
        return jc.jaxpr_as_fun(inner)(*args)

    def derivative(primals, tangents):
        absent = [isinstance(t, SymbolicZero) for t in tangents[count:]]
        jaxpr, consts, zeros = jvp_thunk.call_wrapped(*absent)
        primals_in = primals[count:]
        tangents_in = [t for t in tangents[count:] if not isinstance(t, SymbolicZero)]
        dtypes = [*ins[count:], *(t.dtype for t in tangents_in)]
        wanted = [*outs, *(d for d, zero in zip(outs, zeros, strict=True) if not zero)]
        wanted = [_as_output(d, v) for d, v in zip(wanted, jaxpr.outvars, strict=True)]
        jaxpr = painter.paint(eqn, _closed(jaxpr, consts), dtypes, wanted)
        results = jc.jaxpr_as_fun(jaxpr)(*primals_in, *tangents_in)
        primals_out, rest = results[: len(outs)], iter(results[len(outs) :])
        tangents_out = [
            jnp.zeros_like(p) if zero else next(rest)
            for p, zero in zip(primals_out, zeros, strict=True)
        ]
        return primals_out, tangents_out

    function.defjvp(derivative, symbolic_zeros=eqn.params["symbolic_zeros"])
    painter.emit(eqn, ins, outs, _params_of(function, eqn, ins))


def _custom_vjp(painter: Painter, eqn: jc.JaxprEqn) -> None:
    """As `_custom_jvp`; in and out as the program says, for `bwd` is made for that."""
    params, count = eqn.params, eqn.params["num_consts"]
    ins, outs = _recorded(eqn.invars), _recorded(eqn.outvars)
    inner = painter.paint(eqn, params["call_jaxpr"], ins, outs)

    @jax.custom_vjp
    def function(*args):
        return jc.jaxpr_as_fun(inner)(*args)

    def forward(*args):
        args = args[count:]
        jaxpr, consts = params["fwd_jaxpr_thunk"].call_wrapped(*[True] * len(args))
        jaxpr = _closed(jaxpr, consts)
        jaxpr = painter.paint(eqn, jaxpr, _recorded(jaxpr.invars), out_dtypes(jaxpr))
        results = jc.jaxpr_as_fun(jaxpr)(*args)
        _, residuals, forwarded = params["out_trees"]()
        split = residuals.num_leaves - sum(f is not None for f in forwarded)
        kept = iter(results[:split])
        saved = [next(kept) if f is None else args[f] for f in forwarded]
        return list(results[split:]), saved

    def backward(saved, cotangents):
        zero: list[bool] = []

        def user_backward(*args):
            grads, _ = params["bwd"].call_wrapped(*args)
            zero[:] = [type(g).__name__ == "Zero" for g in grads]
            return [g for g, z in zip(grads, zero, strict=True) if not z]

        jaxpr = jax.make_jaxpr(user_backward)(*saved, *cotangents)
        jaxpr = painter.paint(eqn, jaxpr, _recorded(jaxpr.invars), out_dtypes(jaxpr))
        grads = iter(jc.jaxpr_as_fun(jaxpr)(*saved, *cotangents))
        return (*[None] * count, *(None if z else next(grads) for z in zero))

    function.defvjp(forward, backward)
    painter.emit(eqn, ins, outs, _params_of(function, eqn, ins))


def _params_of(function: Any, eqn: jc.JaxprEqn, in_dtypes: list[Any]) -> dict[str, Any]:
    """The parameters of the equation that a custom function traces to."""
    avals = [
        shape_like(v.aval, dtype)
        for v, dtype in zip(eqn.invars, in_dtypes, strict=True)
    ]
    (traced,) = jax.make_jaxpr(function)(*avals).eqns
    return traced.params


def _closed(jaxpr: jc.Jaxpr, consts: Any) -> jc.Jaxpr:
    return jaxpr.with_consts(consts) if consts else jaxpr


def _as_output(dtype: Any, atom: Any) -> Any:
    return dtype if is_float(atom) else None


RULES = {
    "jit": _call("jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "remat2": _call("jaxpr", keeps_inputs=True),
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "shard_map": _as_recorded_outside("jaxpr"),
    "remat_opt": _as_recorded_outside("fwd_jaxpr"),  # of a custom_vjp
    "custom_jvp_call": _custom_jvp,
    "custom_vjp_call": _custom_vjp,
}
