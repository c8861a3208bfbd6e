"""Rewrites the rules of custom derivatives, using undocumented parts of JAX.

    y = custom_jvp_call[call_jaxpr=f jvp_jaxpr_fun=rule] x
    y = custom_jvp_call[call_jaxpr=f' jvp_jaxpr_fun=(traces and rewrites rule)] x

The equation of a function with custom derivatives holds the user's rules as Python
functions. JAX traces them when it differentiates. This file wraps the rules, and the
wrapper rewrites the traced program. JAX still chooses which derivatives to take. This
file extends `jax_internals`, and the tests check each fact about JAX here too.
"""

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax.core import Tracer
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jc, linear_util
from jaxtyping import PyTree

from jamp._autocast.frames import frames_of, once_per_program, with_programs
from jamp._autocast.hijax import Trace, hi_primitive
from jamp._autocast.traced import traced


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


@once_per_program
def has_rules(program: jc.Jaxpr) -> bool:
    """Returns whether a program calls a function with a custom derivative."""
    frames = [frame for eqn in program.eqns for frame in frames_of(eqn)]
    return any(f.has_derivative or has_rules(f.program) for f in frames)


def custom_consts(eqn: jc.JaxprEqn) -> int:
    """Returns how many operands of a custom function come from its closure.

    They are the first operands, and the user's rule does not take them.
    """
    return eqn.params["num_consts"]


def with_custom_jvp(
    eqn: jc.JaxprEqn,
    program: jc.Jaxpr,
    write: Callable[..., jc.Jaxpr],
    tracing: Trace,
) -> dict[str, Any]:
    """Returns the parameters of a `custom_jvp_call` with rewritten programs.

    JAX traces the user's rule when it differentiates. The traced program takes and
    returns all primals, and the tangents that are not symbolic zeros.

    `write(program, absent, zeros)` rewrites the traced rule. The two lists say which
    arguments and which results have a symbolic zero tangent. `tracing` is the context
    of the trace.
    """
    rule = eqn.params["jvp_jaxpr_fun"]

    @functools.cache
    def written(*absent: bool):
        with tracing():
            jaxpr, consts, zeros = rule.call_wrapped(*absent)
        jaxpr = write(_closed(jaxpr, consts), absent, zeros)
        return jaxpr, jaxpr.consts, zeros

    return {**with_programs(eqn, [program]), "jvp_jaxpr_fun": _wrapped(written, rule)}


def with_custom_vjp(
    eqn: jc.JaxprEqn,
    program: jc.Jaxpr,
    write: Callable[[jc.Jaxpr], jc.Jaxpr],
    tracing: Trace,
    free: Sequence[jc.Var],
) -> dict[str, Any]:
    """Returns the parameters of a `custom_vjp_call` with rewritten programs.

    JAX traces the user's `fwd` when it differentiates, for the perturbed arguments.
    `fwd` returns the residuals and then the outputs. It omits a residual that is an
    unchanged operand; `out_trees` says which those are.

    `write` rewrites `fwd` and `bwd`, and keeps their inputs and outputs. Both may close
    over the variables in `free`. These become operands after the operands from the
    function's closure, and residuals after the user's residuals.
    """
    forward, backward = eqn.params["fwd_jaxpr_thunk"], eqn.params["bwd"]
    consts, count = custom_consts(eqn), len(free)

    @functools.cache
    @advising()
    def written_forward(*perturbed: bool):
        with tracing():
            traced = forward.call_wrapped(*perturbed[count:])
        jaxpr = write(_with_inputs(_closed(*traced), free))
        return jaxpr, jaxpr.consts

    def out_trees():
        out_tree, residuals, places = eqn.params["out_trees"]()
        more = jax.tree.structure([0] * count)
        residuals = jax.tree_util.treedef_tuple((residuals, more))
        moved = [p if p is None or p < consts else p + count for p in places]
        return out_tree, residuals, [*moved, *range(consts, consts + count)]

    def written_backward(*args: Any):
        # `args` are residuals, closed-over values, and cotangents or symbolic zeros.
        # Known ones stay known: Equinox's residuals say which inputs are perturbed.
        end = eqn.params["out_trees"]()[1].num_leaves
        closed_over, args = args[end : end + count], args[:end] + args[end + count :]
        # JAX wraps the user's `bwd`. The wrapper also returns values to log.
        grads, logs = run_rule(
            write, tracing, free, backward.call_wrapped, closed_over, *args
        )
        none = [SymbolicZero(v.aval.to_tangent_aval()) for v in free]
        return [*none, *grads], logs

    return {
        **with_programs(eqn, [_with_inputs(program, free, consts)]),
        "fwd_jaxpr_thunk": _wrapped(written_forward, forward),
        "bwd": _wrapped(written_backward, backward),
        "out_trees": out_trees,
    }


def with_linear_call(
    eqn: jc.JaxprEqn,
    program: jc.Jaxpr,
    write: Callable[[jc.Jaxpr], jc.Jaxpr],
    tracing: Trace,
) -> dict[str, Any]:
    """Returns the parameters of a `linear_call`, with both functions rewritten."""
    thunk = eqn.params["transpose_thunk"]

    def transpose():
        with tracing():
            jaxpr, consts = thunk()
        return write(jaxpr), consts

    return {**with_programs(eqn, [program]), "transpose_thunk": transpose}


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


def closed_over(eqn: jc.JaxprEqn) -> list[jc.Var]:
    """Returns the variables whose tracers a `custom_vjp_call`'s rules close over.

    Without autocast, JAX may differentiate without a trace, and a rule closes over
    values. Here it closes over tracers of a finished trace, which keep their variables.
    """
    prim, names = hi_primitive(eqn), ("fwd_jaxpr_thunk", "fwd", "bwd", "remat_rules")
    params = eqn.params if prim is None else prim.params
    rules = [params.get(name) for name in names]
    return list(dict.fromkeys(filter(None, map(_variable_of, _tracers_in(rules)))))


def _variable_of(tracer: Any) -> jc.Var | None:
    """Returns the variable of a tracer in its program, or None."""
    while isinstance(tracer, Tracer):
        tracer = getattr(tracer, "val", None)  # a tracer of `vmap` wraps another one
    return tracer if isinstance(tracer, jc.Var) else None


def _with_inputs(
    jaxpr: jc.Jaxpr, variables: Sequence[jc.Var], place: int = 0
) -> jc.Jaxpr:
    """Returns a program with variables of another program as additional inputs.

    A constant of the program that is the tracer of such a variable becomes that input.
    """
    if not variables:
        return jaxpr
    new = {v: jc.Var(v.aval) for v in variables}
    kept = []
    for var, const in zip(jaxpr.constvars, jaxpr.consts, strict=True):
        known = _variable_of(const)
        if known in new:
            new[known] = var
        else:
            kept.append((var, const))
    invars = [*jaxpr.invars[:place], *new.values(), *jaxpr.invars[place:]]
    jaxpr = jaxpr.replace(constvars=[var for var, _ in kept], invars=invars)
    return _closed(jaxpr, [const for _, const in kept])


def _wrapped(fn: Callable[..., Any], old: Any) -> Any:
    """Wraps a function for the parameters of an equation, in place of another one."""
    return linear_util.wrap_init(fn, debug_info=old.debug_info)


def _closed(jaxpr: jc.Jaxpr, consts: Sequence[Any]) -> jc.Jaxpr:
    """Binds constants to a program that would otherwise take them as first inputs."""
    return jaxpr.with_consts(consts) if consts else jaxpr


# ---- tracers in closures


def _tracers_in(x: PyTree) -> list[Tracer]:
    """Returns the tracers in closures, defaults, and arguments of partials and methods.

    It searches only pytrees, because other objects may contain the user's data set.
    """
    found: list[Tracer] = []
    seen: dict[int, Any] = {}
    waiting = [x]
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x  # kept alive, so that no later object has the same `id`
        if isinstance(x, Tracer):
            found.append(x)
        else:
            waiting += _held(x)
    return found


def _held(x: Any) -> list[Any]:
    """Returns the values that a function closes over, or the leaves of a pytree."""
    if isinstance(x, types.FunctionType):
        defaults = [*(x.__defaults__ or ()), *(x.__kwdefaults__ or {}).values()]
        cells = [c for c in x.__closure__ or () if c != types.CellType()]
        return [*defaults, *(cell.cell_contents for cell in cells)]
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, functools.partial):
        return [x.func, *x.args, *x.keywords.values()]
    if isinstance(x, linear_util.WrappedFun):
        return [x.f_transformed]
    if isinstance(x, jax.custom_vjp | jax.custom_jvp):
        return list(vars(x).values())
    if _is_of_jax(x):
        # `x` may be a jitted function, or JAX's wrapper of a static argument.
        is_field = not isinstance(getattr(type(x), "val", None), property)
        return [getattr(x, "__wrapped__", None), is_field and getattr(x, "val", None)]
    try:
        leaves = jax.tree.leaves(x)
    except ValueError:  # a dict whose keys cannot be sorted is not a pytree
        return []
    is_new = (y is not x and (callable(y) or _is_of_jax(y)) for y in leaves)
    return list(itertools.compress(leaves, is_new))


def _is_of_jax(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] in ("jax", "jaxlib")
