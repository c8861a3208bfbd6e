"""Writes functions with custom derivatives again, by `jax.custom_vjp` and others.

    y = custom_vjp_call[call_jaxpr=f fwd_jaxpr_thunk=fwd bwd=bwd] x
    y = jax.custom_vjp(f')(x), whose rules trace and rewrite fwd and bwd

The equation of a function with custom derivatives holds the user's rules as Python
functions. JAX traces them when it differentiates. The rules of the new function trace
the user's rules, rewrite the traced jaxprs and run them. JAX still chooses which
derivatives to take. The tests check each fact about JAX that this file needs.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero, custom_vjp_primal_tree_values
from jax.extend import core as jc, linear_util
from jax.interpreters import ad

from jamp._autocast.closures import variable_of
from jamp._autocast.hijax import hi_primitive
from jamp._autocast.jax_internals import function_of
from jamp._autocast.subjaxprs import once_per_jaxpr, subjaxprs_of, with_jaxprs
from jamp._autocast.traced import traced

type Trace = Callable[[], AbstractContextManager[None]]


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Adds advice to the error of a rule that closes over an unknown tracer."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        if _CLOSED_OVER not in getattr(error, "__notes__", ()):
            error.add_note(_CLOSED_OVER)
        raise


_CLOSED_OVER = (
    "Under autocast, as in jax.jit, a function with a custom derivative must not close "
    "over an array that is computed from arguments. Pass the array as an argument."
)


@once_per_jaxpr
def has_rules(jaxpr: jc.Jaxpr) -> bool:
    """Returns whether a jaxpr calls a function with a custom derivative."""
    subs = [sub for eqn in jaxpr.eqns for sub in subjaxprs_of(eqn)]
    return any(f.has_derivative or has_rules(f.jaxpr) for f in subs)


def custom_consts(eqn: jc.JaxprEqn) -> int:
    """Returns how many operands of a custom function come from its closure.

    They are the first operands, and the user's rules do not take them.
    """
    return eqn.params["num_consts"]


def custom_jvp(
    eqn: jc.JaxprEqn, primal: jc.Jaxpr, write: Callable[..., jc.Jaxpr], tracing: Trace
) -> Callable[..., Any]:
    """Returns a function with a rewritten jaxpr and JVP rule, to replace an object.

    The traced rule takes and returns all primals, and the tangents that are not
    symbolic zeros. `write(jaxpr, absent, zeros)` rewrites it. The two lists say which
    arguments and which results have a symbolic zero tangent. `tracing` is the context
    of the trace.
    """
    prim = hi_primitive(eqn)

    def rule(primals: Sequence[Any], dots: Sequence[Any]) -> Any:
        given = prim.in_tree.unflatten(primals), prim.in_tree.unflatten(_inner(dots))
        outs, dots = map(prim.out_tree.flatten_up_to, prim.jvp(*given))
        return outs, _outer(dots)

    def derivative(primals: Sequence[Any], dots: Sequence[Any]) -> tuple[Any, Any]:
        absent = list(map(_is_zero, dots))
        # JAX traces the rule in the dtypes of the user's program.
        avals: list[Any] = [v.aval for v in eqn.invars]
        types = [aval.to_tangent_aval() for aval in avals]
        given = [
            SymbolicZero(t) if zero else t
            for t, zero in zip(types, absent, strict=True)
        ]
        with tracing():
            jaxpr, _, rebuild = traced(rule, (avals, given), lambda x: not _is_zero(x))
        _, results = rebuild(jaxpr.outvars)
        written = write(jaxpr, absent, list(map(_is_zero, results)))
        values = [*primals, *(t for t in dots if not _is_zero(t))]
        outs, results = rebuild(jc.jaxpr_as_fun(written)(*values))
        # JAX requires that a symbolic zero has the dtype of its primal.
        return outs, [
            SymbolicZero.from_primal_value(out) if _is_zero(t) else t
            for out, t in zip(outs, results, strict=True)
        ]

    function = jax.custom_jvp(_called_as(primal, jc.jaxpr_as_fun(primal)))
    function.defjvp(derivative, symbolic_zeros=prim.params["symbolic_zeros"])
    return function


def with_custom_jvp(
    eqn: jc.JaxprEqn, primal: jc.Jaxpr, write: Callable[..., jc.Jaxpr], tracing: Trace
) -> dict[str, Any]:
    """Returns the parameters of a `custom_jvp_call`, as for `custom_jvp`.

    A function of `jax.custom_jvp` would be traced twice more, for each relu of a model.
    """
    rule = eqn.params["jvp_jaxpr_fun"]

    @functools.cache
    def written(*absent: bool):
        with tracing():
            jaxpr, consts, zeros = rule.call_wrapped(*absent)
        jaxpr = write(jaxpr.with_consts(consts) if consts else jaxpr, absent, zeros)
        return jaxpr, jaxpr.consts, zeros

    new = linear_util.wrap_init(written, debug_info=rule.debug_info)
    return {**with_jaxprs(eqn, [primal]), "jvp_jaxpr_fun": new}


class _Rules(NamedTuple):
    """The user's rules for the reverse derivative of a function, of flat lists."""

    consts: int  # how many of the first operands no rule takes
    forward: Callable[..., Any]  # perturbed, args -> results, residuals
    backward: Callable[..., Any]  # residuals, cotangents -> gradients, logs
    options: dict[str, Any]  # for `defvjp`
    remat: Sequence[Callable[..., Any]] = ()  # for `defremat`


def custom_vjp(
    eqn: jc.JaxprEqn, jaxpr: jc.Jaxpr, run: Callable[..., Any], free: int
) -> Callable[..., Any]:
    """Returns a function with rewritten jaxprs, to replace `eqn`.

    Its last `free` operands are values of variables that the user's rules close over.
    They become residuals. `run(rule, values, *args)` rewrites a rule, and calls it.
    """
    rules = _vjp_rules(eqn)
    wants_zeros, end = rules.options["symbolic_zeros"], len(eqn.invars) - rules.consts
    # Only with symbolic zeros does JAX say which operands are perturbed. `vmap` makes a
    # constant an operand, and no rule takes a perturbed constant.
    symbolic = not rules.options.get("optimize_remat")  # JAX takes only one of the two
    options = rules.options | {"symbolic_zeros": symbolic}

    def forward(*args: Any) -> Any:
        values = custom_vjp_primal_tree_values(args) if symbolic else args
        perturbed = [x.perturbed if symbolic else True for x in args[:end]]
        return saving(values, rules.forward, perturbed, values[:end])

    def saving(values: Sequence[Any], rule: Callable[..., Any], *args: Any) -> Any:
        results, residuals = run(rule, values[end:], *args)
        return results, (residuals, values[end:])

    def backward(rule: Callable[..., Any], residuals: Any, cotangents: Any) -> Any:
        if not wants_zeros:
            cotangents = list(map(ad.instantiate_zeros, _inner(cotangents)))
        grads, logs = run(rule, residuals[1], residuals[0], cotangents)
        none = [None] * free
        return (*(None if _is_zero(g) else g for g in grads), *none), logs

    def function(*operands: Any) -> Any:
        consts, args = operands[: rules.consts], operands[rules.consts :]
        # JAX refuses to differentiate a closed-over value.
        call = lambda *args: jc.jaxpr_as_fun(jaxpr)(*consts, *args[:end])  # noqa: E731
        own = jax.custom_vjp(_called_as(jaxpr, call))
        own.defvjp_with_logs(
            forward, functools.partial(backward, rules.backward), **options
        )
        if rules.remat:
            first, again, last = rules.remat
            own.defremat_with_logs(
                lambda *args: saving(args, first, args[:end]),
                lambda saved, *args: saving(args, again, saved[0], args[:end]),
                functools.partial(backward, last),
            )
        return own(*args)

    return function


def _vjp_rules(eqn: jc.JaxprEqn) -> _Rules:
    prim = hi_primitive(eqn)
    return _rules_of_equation(eqn) if prim is None else _rules_of_object(prim)


def _rules_of_equation(eqn: jc.JaxprEqn) -> _Rules:
    _, fwd, bwd = eqn.primitive.get_bind_params(eqn.params)["subfuns"]
    consts, out_trees = custom_consts(eqn), eqn.params["out_trees"]

    def forward(perturbed: Sequence[bool], args: Sequence[Any]) -> Any:
        args, perturbed = [*[None] * consts, *args], [*[False] * consts, *perturbed]
        pairs = zip(args, perturbed, strict=True)
        made = iter(fwd.call_wrapped(*itertools.chain.from_iterable(pairs)))
        # `fwd` omits a residual that is an unchanged operand.
        residuals = [next(made) if i is None else args[i] for i in out_trees()[2]]
        return list(made), residuals

    def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> Any:
        grads, logs = bwd.call_wrapped(*residuals, *cotangents)
        return grads[consts:], logs

    options = {"symbolic_zeros": eqn.params["symbolic_zeros"]}
    return _Rules(consts, forward, backward, options)


def _rules_of_object(prim: Any) -> _Rules:
    params, avals = prim.params, jax.tree.leaves(prim.in_avals[0])
    consts = len(avals)

    def operands(leaves: Sequence[Any]) -> Any:
        # The rules ignore values from closures, but `vmap` reads their shapes.
        ignored = [ad.instantiate_zeros(ad.Zero(aval)) for aval in avals]
        return prim.in_tree.unflatten([*ignored, *leaves])

    def flags(perturbed: Sequence[bool]) -> Any:
        return prim.in_tree.unflatten([*[False] * consts, *perturbed])

    def flat(results: Any, residuals: Any, *_: Any) -> Any:
        return prim.out_tree.flatten_up_to(results), residuals

    def forward(perturbed: Sequence[bool], args: Sequence[Any]) -> Any:
        # A literal of the jaxpr arrives as a Python number.
        args = [x if hasattr(x, "shape") else jnp.asarray(x) for x in args]
        return flat(*prim.vjp_fwd(flags(perturbed), *operands(args)))

    def gradients(rule: Callable[..., Any], residuals: Any, dots: Any) -> Any:
        grads, logs = rule(residuals, prim.out_tree.unflatten(_inner(dots)))
        # It returns none for the first two arguments: values from closures.
        known = jax.tree.map(lambda _: None, prim.in_avals[:2])
        return prim.in_tree.flatten_up_to((*known, *grads))[consts:], logs

    remat: Any = params["remat_rules"] or ()
    if remat:
        first, again, last = remat
        remat = (
            lambda args: flat(*first(*operands(args))),
            lambda saved, args: flat(*again(saved, *operands(args))),
            functools.partial(gradients, last),
        )
    options = {
        "symbolic_zeros": params["symbolic_zeros"],
        "optimize_remat": params["opt_remat"],
        "generic_batching": params["generic_batching"],
    }
    backward = functools.partial(gradients, params["bwd"])
    return _Rules(consts, forward, backward, options, remat)


def _called_as(jaxpr: jc.Jaxpr, fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function with the name of the user's, which JAX prints."""
    named = lambda *args: fn(*args)  # noqa: E731
    named.__name__ = function_of(jaxpr)[0]
    return named


def _is_zero(x: object) -> bool:
    return isinstance(x, SymbolicZero | ad.Zero)


def _inner(dots: Sequence[Any]) -> list[Any]:
    """Replaces JAX's public symbolic zeros by those that objects take."""
    return [ad.Zero(t.aval) if isinstance(t, SymbolicZero) else t for t in dots]


def _outer(dots: Sequence[Any]) -> list[Any]:
    return [SymbolicZero(t.aval) if isinstance(t, ad.Zero) else t for t in dots]


def with_linear_call(
    eqn: jc.JaxprEqn,
    callee: jc.Jaxpr,
    write: Callable[[jc.Jaxpr], jc.Jaxpr],
    tracing: Trace,
) -> dict[str, Any]:
    """Returns the parameters of a `linear_call`, with both functions rewritten."""
    thunk = eqn.params["transpose_thunk"]

    def transpose():
        with tracing():
            jaxpr, consts = thunk()
        return write(jaxpr), consts

    return {**with_jaxprs(eqn, [callee]), "transpose_thunk": transpose}


@advising()
def run_rule(
    write: Callable[[jc.Jaxpr], jc.Jaxpr],
    tracing: Trace,
    free: Sequence[jc.Var],
    rule: Callable[..., Any],
    closed_over: Sequence[Any],
    *args: Any,
) -> Any:
    """Traces, rewrites and runs a user's rule, and returns its results.

    The rule may close over the variables in `free`, which have the values
    `closed_over`. Only tracers become arguments: known values stay known.
    """
    with tracing():
        jaxpr, values, rebuild = traced(rule, args, lambda x: isinstance(x, Tracer))
    jaxpr = write(_with_inputs(jaxpr, free))
    return rebuild(jc.jaxpr_as_fun(jaxpr)(*closed_over, *values))


def _with_inputs(jaxpr: jc.Jaxpr, variables: Sequence[jc.Var]) -> jc.Jaxpr:
    """Returns a jaxpr with variables of another jaxpr as its first inputs.

    A constant of the jaxpr that is the tracer of such a variable becomes that input.
    """
    new = {v: jc.Var(v.aval) for v in variables}
    kept: dict[jc.Var, Any] = {}
    for var, const in zip(jaxpr.constvars, jaxpr.consts, strict=True):
        known = variable_of(const)
        if known in new:
            new[known] = var
        else:
            kept[var] = const
    return jaxpr.replace(
        invars=[*new.values(), *jaxpr.invars],
        constvars=list(kept),
        consts=list(kept.values()),
    )
