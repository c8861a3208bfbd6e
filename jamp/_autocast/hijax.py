"""Rewrites JAX's hijax primitives: objects that hold their own programs and rules.

    y = call_hi_primitive[_prim=CustomVJPTraced(traced=f fwd=... bwd=...)] x
    y = call_hi_primitive[_prim=(a copy with rewritten f, fwd and bwd)] x

JAX 0.12 uses them for `custom_vjp(generic_batching=True)`, and under the flags
`jax_custom_vjp3`, `jax_custom_jvp3`, `jax_remat3` and `jax_scan3`, which will become
the default. Autocast traces with the user's flags, because `custom_vjp.defremat` and
others need them. The equations that autocast adds are correct with and without them.

JAX does not document these objects. The tests check each fact, as for `derivatives`.
"""

import copy
import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core as jc
from jaxtyping import PyTree

from jamp._autocast.traced import traced
from jamp._autocast.tracing import Itself
from jamp._core.warnings import AutocastWarning, warn

type Write = Callable[..., jc.Jaxpr]
type Trace = Callable[[], AbstractContextManager[None]]


def hi_primitive(eqn: jc.JaxprEqn) -> Any:
    """Returns the object that an equation applies, or None if it applies none."""
    is_hi = eqn.primitive.name == "call_hi_primitive"
    return eqn.params["_prim"] if is_hi else None


# The parameter with the program. In other objects, the name may mean something else.
_PLACES = {
    "RematTraced": "jaxpr",
    "Scan3": "jaxpr",
    "CustomJVPTraced": "traced",  # the type of `jax.jit(f).trace(...)`
    "CustomVJPTraced": "traced",
}


def program_of_hi(prim: Any) -> jc.Jaxpr | None:
    """Returns the program of an object, or None if autocast cannot read one."""
    place = _PLACES.get(type(prim).__name__)
    if place is None:
        return _expanded(Itself(prim))
    return getattr(prim.params[place], "jaxpr", prim.params[place])


@functools.lru_cache(maxsize=256)
def _expanded(same: Itself) -> jc.Jaxpr | None:
    """Traces the `expand` of an object. Returns None if the trace fails.

    An `expand` may need the context in which the object is bound, such as a named axis.
    So an error in it becomes a warning, and the object runs in the user's dtypes.
    """
    prim = same.it

    def expand(*leaves):
        return jax.tree.leaves(prim.expand(*prim.in_tree.unflatten(leaves)))

    try:
        program = jax.make_jaxpr(expand)(*prim.in_avals_flat)
    except NotImplementedError:  # it has no `expand`
        return None
    except Exception as error:  # noqa: BLE001
        name, kind = type(prim).__name__, type(error).__name__
        warn(
            f"autocast cannot read {name!r}, because its `expand` raised {kind}: "
            f"{error}",
            AutocastWarning,
        )
        return None
    same_types = [v.aval for v in program.outvars] == list(prim.out_avals_flat)
    return program if same_types and not program.effects else None


def fwd_consts(prim: Any) -> tuple[int, int]:
    """Returns the slice of a custom_vjp's operands that its program does not take."""
    begin = len(jax.tree.leaves(prim.in_avals[0]))
    return begin, begin + len(jax.tree.leaves(prim.in_avals[1]))


def with_program(prim: Any, program: jc.Jaxpr, **params: Any) -> Any:
    """Returns a copy of an object with another program, which may change dtypes."""
    taken = _dtypes_of(program.in_avals)
    if type(prim).__name__ == "CustomVJPTraced":
        begin, end = fwd_consts(prim)
        taken[begin:begin] = _dtypes_of(prim.in_avals_flat[begin:end])
    new = with_dtypes(prim, taken, _dtypes_of(program.out_avals))
    place = _PLACES.get(type(prim).__name__)
    if place == "jaxpr":
        params["jaxpr"] = program
    elif place == "traced":
        params["traced"] = _with_jaxpr(prim.traced, program)
    else:

        def expand(*args):
            outs = jc.jaxpr_as_fun(program)(*jax.tree.leaves(args))
            return prim.out_tree.unflatten(outs)

        new.expand = expand
    new.params = {**prim.params, **params}
    new.__dict__.update(params)
    return new


def with_dtypes(prim: Any, ins: Sequence[Any], outs: Sequence[Any]) -> Any:
    """Returns a copy of an object for operands and results in other dtypes."""
    new = copy.copy(prim)
    new.in_avals_flat = list(map(_in_dtype, prim.in_avals_flat, ins))
    new.out_avals_flat = list(map(_in_dtype, prim.out_avals_flat, outs))
    new.in_avals = prim.in_tree.unflatten(new.in_avals_flat)
    new.out_aval = prim.out_tree.unflatten(new.out_avals_flat)
    return new


def _in_dtype(aval: Any, dtype: Any) -> Any:
    same = getattr(aval, "dtype", None) == dtype
    return aval if same else aval.update(dtype=dtype, weak_type=False)


def _dtypes_of(avals: Sequence[Any]) -> list[Any]:
    return [getattr(aval, "dtype", None) for aval in avals]


def _with_jaxpr(traced: Any, program: jc.Jaxpr) -> Any:
    """Returns a copy of `jax.jit(f).trace(...)` with another program."""
    return type(traced)(
        list(program.in_avals),
        {**traced._params, "jaxpr": program},
        traced._in_tree,
        traced.out_tree,
        traced._consts,
        traced._fun_sourceinfo,
    )


# ---- the user's derivatives


def with_jvp_rule(prim: Any, program: jc.Jaxpr, write: Write, tracing: Trace) -> Any:
    """Returns a `CustomJVPTraced` with rewritten programs, see `with_custom_jvp`."""

    def rule(primals: PyTree, tangents: PyTree) -> PyTree:
        dots, tree = jax.tree.flatten(tangents, is_leaf=is_zero)
        # JAX traces the rule in the dtypes of the user's program.
        types = [
            t if is_zero(t) else aval.to_tangent_aval()
            for t, aval in zip(dots, prim.in_avals_flat, strict=True)
        ]
        given = tree.unflatten(prim.in_avals_flat), tree.unflatten(types)
        with tracing():
            jaxpr, _, rebuild = traced(prim.jvp_rule, given, lambda x: not is_zero(x))
        _, results = rebuild(jaxpr.outvars)
        absent, zeros = (
            list(map(is_zero, jax.tree.leaves(dots, is_leaf=is_zero)))
            for dots in (tangents, results)
        )
        values = [*jax.tree.leaves(primals), *(t for t in dots if not is_zero(t))]
        outs, dots = rebuild(jc.jaxpr_as_fun(write(jaxpr, absent, zeros))(*values))

        # JAX requires that a symbolic zero has the dtype of its primal.
        def typed(t, out):
            return type(t)(jax.typeof(out).to_tangent_aval()) if is_zero(t) else t

        return outs, jax.tree.map(typed, dots, outs, is_leaf=is_zero)

    return with_program(prim, program, jvp_rule=_named_as(rule, prim.jvp_rule))


def with_vjp_rules(
    prim: Any, program: jc.Jaxpr, run: Callable[..., Any], free: Sequence[jc.Var]
) -> Any:
    """Returns a `CustomVJPTraced` with rewritten programs, see `with_custom_vjp`.

    The rules may close over the variables in `free`. These become residuals, and
    operands after those that the program does not take. `run` calls a rule with their
    values.
    """

    def forward(rule: Callable[..., Any], consts: Any, more: Any, *args: Any) -> Any:
        out, residuals = run(rule, more[1], consts, more[0], *args)
        return out, (residuals, more[1])

    def fwd(present: PyTree, *args: Any) -> Any:
        present = (present[0], present[1][0], *present[2:])
        # A literal of the program arrives as a Python number, which has no shape.
        args = jax.tree.map(lambda x: jnp.asarray(x) if _is_number(x) else x, args)
        return forward(functools.partial(prim.fwd, present), *args)

    def again(residuals: Any, *args: Any) -> Any:
        rule = functools.partial(prim.remat_rules[1], residuals[0])
        return forward(rule, *args)

    def backward(rule: Callable[..., Any], residuals: Any, cotangents: Any) -> Any:
        return run(rule, residuals[1], residuals[0], cotangents)

    def bound(new: Callable[..., Any], rule: Callable[..., Any]) -> Callable[..., Any]:
        return _named_as(functools.partial(new, rule), rule)

    rules: dict[str, Any] = {"fwd": _named_as(fwd, prim.fwd)}
    rules["bwd"] = bound(backward, prim.bwd)
    if prim.params.get("bwd_accums") is not None:
        rules["bwd_accums"] = None  # `bwd` returns the same gradients
    if prim.params.get("remat_rules"):
        first, _, last = prim.remat_rules
        rules["remat_rules"] = bound(forward, first), again, bound(backward, last)
    consts, theirs, *args = prim.in_avals
    new = copy.copy(prim)
    new.in_avals = (consts, (theirs, [v.aval for v in free]), *args)
    new.in_avals_flat, new.in_tree = jax.tree.flatten(new.in_avals)
    return with_program(new, program, **rules)


def is_zero(x: object) -> bool:
    """Returns whether `x` is a symbolic zero, of JAX's public or private type."""
    return isinstance(x, SymbolicZero) or type(x).__name__ == "Zero"


def _is_number(x: object) -> bool:
    return isinstance(x, bool | int | float | complex)


def _named_as(new: Any, old: Any) -> Callable[..., Any]:
    """Renames a function after another one, because JAX prints the name."""

    @functools.wraps(old)
    def named(*args: Any) -> Any:
        return new(*args)

    return named
