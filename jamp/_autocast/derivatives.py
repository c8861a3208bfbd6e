"""What JAX documents nowhere about functions with a derivative of their own.

    y = custom_jvp_call[call_jaxpr=f jvp_jaxpr_fun=rule] x
    y = custom_jvp_call[call_jaxpr=f' jvp_jaxpr_fun=(what traces and rewrites rule)] x

The equations of such functions hold the user's rules as Python functions, which JAX
traces when somebody differentiates. Here these are wrapped, so that what is traced is
rewritten; which derivatives are asked for stays between JAX and the user's rules.
As for `jax_internals`, whose second half this is, the tests hold each fact.
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

from jamp._autocast.frames import frames_of, with_programs
from jamp._autocast.hijax import Trace, hi_primitive, is_zero


@contextlib.contextmanager
def advising() -> Iterator[None]:
    """Says what to do if a rule closes over a value that is not found."""
    try:
        yield
    except jax.errors.UnexpectedTracerError as error:
        if _CLOSED_OVER not in getattr(error, "__notes__", ()):
            error.add_note(_CLOSED_OVER)
        raise


_CLOSED_OVER = (
    "Under autocast, as in jax.jit, a function with its own derivative must not close "
    "over an array that is computed from arguments: pass it as one more argument."
)


def has_rules(program: jc.Jaxpr) -> bool:
    """Whether a program calls a function with a derivative of its own."""
    frames = [frame for eqn in program.eqns for frame in frames_of(eqn)]
    return any(f.has_derivative or has_rules(f.program) for f in frames)


def custom_consts(eqn: jc.JaxprEqn) -> int:
    """How many operands of a custom function come from its closure.

    They come first, and the user's derivative does not take them.
    """
    return eqn.params["num_consts"]


def with_custom_jvp(
    eqn: jc.JaxprEqn,
    program: jc.Jaxpr,
    write: Callable[..., jc.Jaxpr],
    tracing: Trace,
) -> dict[str, Any]:
    """The parameters of a `custom_jvp_call`, with its programs rewritten.

    JAX traces the user's rule when a derivative is taken, for the tangents that are
    there then: it is a program from all primals and these tangents to all primals and
    the tangents that are not symbolic zeros.

    `write` rewrites the rule, from the program, and for each argument and for each
    result whether its tangent is a symbolic zero; it is traced in `tracing`.
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
    """The parameters of a `custom_vjp_call`, with its programs rewritten.

    JAX traces the user's `fwd` when a derivative is taken, for the arguments that it
    is taken of. It gives the residuals first, but for those that are operands as they
    came, and the outputs after them; `out_trees` knows which.

    `write` rewrites `fwd` and `bwd`, with the same inputs and outputs. They may close
    over the variables in `free`. These become operands, after the operands of the
    closure of the function, and residuals, after the residuals of the user.
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

    @advising()
    def written_backward(*args: Any):
        # Residuals, what is closed over, and cotangents, which may be symbolic zeros.
        end = eqn.params["out_trees"]()[1].num_leaves
        closed_over, args = args[end : end + count], args[:end] + args[end + count :]
        # Known values stay known: Equinox keeps in residuals which are perturbed.
        values = [x for x in args if isinstance(x, Tracer)]
        returned: list[Any] = []

        def flat(*values):
            left = iter(values)
            filled = [next(left) if isinstance(x, Tracer) else x for x in args]
            # JAX has wrapped the user's `bwd`: it returns leaves, with a `Zero` of a
            # private type where there is no gradient, and values to log.
            returned[:], logs = backward.call_wrapped(*filled)
            return [g for g in returned if not is_zero(g)], logs

        with tracing():
            jaxpr, shapes = jax.make_jaxpr(flat, return_shape=True)(*values)
        jaxpr = write(_with_inputs(jaxpr, free))
        outs = jc.jaxpr_as_fun(jaxpr)(*closed_over, *values)
        grads, logs = jax.tree.unflatten(jax.tree.structure(shapes), outs)
        left = iter(grads)
        grads = [g if is_zero(g) else next(left) for g in returned]
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
    """The parameters of a `linear_call`, with its function and transpose rewritten."""
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
    """Traces, rewrites and runs a rule of the user, and returns its results.

    The rule may close over the variables in `free`, with the values `closed_over`. Only
    tracers become arguments of the program: known values stay known.
    """
    leaves, tree = jax.tree.flatten(args)
    values = [x for x in leaves if isinstance(x, Tracer)]
    result: dict[str, Any] = {}

    def flat(*values):
        left = iter(values)
        filled = [next(left) if isinstance(x, Tracer) else x for x in leaves]
        outs, result["tree"] = jax.tree.flatten(rule(*tree.unflatten(filled)))
        result["known"] = [None if isinstance(x, jax.Array) else x for x in outs]
        return [x for x in outs if isinstance(x, jax.Array)]

    with tracing():
        jaxpr = jax.make_jaxpr(flat)(*values)
    jaxpr = write(_with_inputs(jaxpr, free))
    left = iter(jc.jaxpr_as_fun(jaxpr)(*closed_over, *values))
    outs = [next(left) if x is None else x for x in result["known"]]
    return result["tree"].unflatten(outs)


def closed_over(eqn: jc.JaxprEqn) -> list[jc.Var]:
    """The variables whose tracers the rules of a `custom_vjp_call` may close over.

    Where JAX differentiates a function without tracing it first, they close over
    values; here over tracers of a trace that has ended. These keep their variables.
    """
    prim, names = hi_primitive(eqn), ("fwd_jaxpr_thunk", "fwd", "bwd", "remat_rules")
    params = eqn.params if prim is None else prim.params
    rules = [params.get(name) for name in names]
    return list(dict.fromkeys(filter(None, map(_variable_of, _tracers_in(rules)))))


def _variable_of(tracer: Any) -> jc.Var | None:
    """The variable of a tracer in the program that is or was traced."""
    while isinstance(tracer, Tracer):
        tracer = getattr(tracer, "val", None)  # one of `vmap` holds another one
    return tracer if isinstance(tracer, jc.Var) else None


def _with_inputs(
    jaxpr: jc.Jaxpr, variables: Sequence[jc.Var], place: int = 0
) -> jc.Jaxpr:
    """A program with variables of another one as inputs more.

    Where their tracers are among its constants, they are constants no more.
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
    """A function as JAX keeps them in parameters, in the place of another one."""
    return linear_util.wrap_init(fn, debug_info=old.debug_info)


def _closed(jaxpr: jc.Jaxpr, consts: Sequence[Any]) -> jc.Jaxpr:
    """A program with its constants, which JAX has as its first inputs otherwise."""
    return jaxpr.with_consts(consts) if consts else jaxpr


# ---- what functions close over


def _tracers_in(x: PyTree) -> list[Tracer]:
    """The tracers in closures, in arguments of partials and methods, and in defaults.

    A pytree is searched. Any other object is not, for it may hold the user's data set.
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
    """The values that a function closes over, or the leaves of a pytree."""
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
        # A jitted function, or a wrapper of a static argument.
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
