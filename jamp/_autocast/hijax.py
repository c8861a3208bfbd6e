"""Primitives of JAX's newer kind: objects, which hold programs and rules themselves.

    y = call_hi_primitive[_prim=CustomVJPTraced(traced=f fwd=... bwd=...)] x
    y = call_hi_primitive[_prim=(the same, with what is written for f, fwd and bwd)] x

JAX 0.12 has them for `custom_vjp(generic_batching=True)`, and behind the flags
`jax_custom_vjp3`, `jax_custom_jvp3`, `jax_remat3` and `jax_scan3`, which are to become
the default. The flags stay as the user has them while autocast traces: what needs them,
such as `custom_vjp.defremat`, would not be traced without. What autocast writes of its
own is right with or without.

As of `derivatives`, JAX documents none of it, and the tests hold each fact.
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

type Write = Callable[..., jc.Jaxpr]
type Trace = Callable[[], AbstractContextManager[None]]


def hi_primitive(eqn: jc.JaxprEqn) -> Any:
    """The object that an equation of the newer kind applies; None for any other."""
    is_hi = eqn.primitive.name == "call_hi_primitive"
    return eqn.params["_prim"] if is_hi else None


def program_of_hi(prim: Any) -> jc.Jaxpr | None:
    """The program that an object stands for; None if it has none to look into."""
    if "jaxpr" in prim.params:
        return prim.params["jaxpr"]
    traced = _traced_of(prim)
    return _expanded(_Same(prim)) if traced is None else prim.params[traced].jaxpr


def _traced_of(prim: Any) -> str | None:
    """The parameter that holds a program as `jax.jit(f).trace(...)` gives it."""
    return next((n for n in ("traced", "traced_fwd") if n in prim.params), None)


class _Same:
    """An object, equal to itself alone: its parameters may have no hash."""

    def __init__(self, it: Any):
        self.it = it

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.it is self.it

    def __hash__(self) -> int:
        return id(self.it)


@functools.lru_cache(maxsize=256)
def _expanded(same: _Same) -> jc.Jaxpr | None:
    """What an object says that it does; None if JAX cannot trace that by itself."""
    prim = same.it

    def expand(*leaves):
        return jax.tree.leaves(prim.expand(*prim.in_tree.unflatten(leaves)))

    try:
        program = jax.make_jaxpr(expand)(*prim.in_avals_flat)
    except Exception:  # it may need a type or a place of its own, or have no `expand`
        return None
    same_types = [v.aval for v in program.outvars] == list(prim.out_avals_flat)
    return program if same_types and not program.effects else None


def fwd_consts(prim: Any) -> tuple[int, int]:
    """Where the operands of a custom_vjp stand that its program does not take."""
    begin = len(jax.tree.leaves(prim.in_avals[0]))
    return begin, begin + len(jax.tree.leaves(prim.in_avals[1]))


def with_program(prim: Any, program: jc.Jaxpr, **params: Any) -> Any:
    """The same object with another program, which may have other dtypes."""
    taken = _dtypes_of(program.in_avals)
    if type(prim).__name__ == "CustomVJPTraced":
        begin, end = fwd_consts(prim)
        taken[begin:begin] = _dtypes_of(prim.in_avals_flat[begin:end])
    new = with_dtypes(prim, taken, _dtypes_of(program.out_avals))
    traced = _traced_of(prim)
    if "jaxpr" in prim.params:
        params["jaxpr"] = program
    elif traced is not None:
        params[traced] = _with_jaxpr(prim.params[traced], program)
    else:

        def expand(*args):
            outs = jc.jaxpr_as_fun(program)(*jax.tree.leaves(args))
            return prim.out_tree.unflatten(outs)

        new.expand = expand
    new.params = {**prim.params, **params}
    new.__dict__.update(params)
    return new


def with_dtypes(prim: Any, ins: Sequence[Any], outs: Sequence[Any]) -> Any:
    """The same object for operands and results in other dtypes."""
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
    """As JAX replaces the program of what `jax.jit(f).trace(...)` gives."""
    return type(traced)(
        list(program.in_avals),
        {**traced._params, "jaxpr": program},
        traced._in_tree,
        traced.out_tree,
        traced._consts,
        traced._fun_sourceinfo,
    )


# ---- derivatives of the user's


def with_jvp_rule(prim: Any, program: jc.Jaxpr, write: Write, tracing: Trace) -> Any:
    """A `CustomJVPTraced` with its programs rewritten; as `with_custom_jvp`."""
    old = prim.jvp_rule

    def rule(primals: PyTree, tangents: PyTree) -> PyTree:
        leaves, tree = jax.tree.flatten(tangents, is_leaf=is_zero)
        absent = tuple(map(is_zero, leaves))
        there = [t for t in leaves if not is_zero(t)]
        # In the user's dtypes: in those of the operands the rule is only evaluated.
        types = list(prim.in_avals_flat)
        pairs = zip(types, absent, strict=True)
        types += [aval.to_tangent_aval() for aval, zero in pairs if not zero]
        result: dict[str, Any] = {}

        def flat(*values):
            given = iter(values[len(absent) :])
            filled = [t if is_zero(t) else next(given) for t in leaves]
            firsts = jax.tree.unflatten(tree, values[: len(absent)])
            out, dots = old(firsts, jax.tree.unflatten(tree, filled))
            out, result["tree"] = jax.tree.flatten(out)
            result["dots"] = jax.tree.leaves(dots, is_leaf=is_zero)
            return [*out, *(t for t in result["dots"] if not is_zero(t))]

        with tracing():
            jaxpr = jax.make_jaxpr(flat)(*types)
        zeros = tuple(map(is_zero, result["dots"]))
        outs = jc.jaxpr_as_fun(write(jaxpr, absent, zeros))(
            *jax.tree.leaves(primals), *there
        )
        out, given = outs[: len(zeros)], iter(outs[len(zeros) :])
        dots = [
            type(t)(jax.typeof(y).to_tangent_aval()) if is_zero(t) else next(given)
            for y, t in zip(out, result["dots"], strict=True)
        ]
        unflatten = result["tree"].unflatten
        return unflatten(out), unflatten(dots)

    return with_program(prim, program, jvp_rule=_named_as(rule, old))


def with_vjp_rules(
    prim: Any, program: jc.Jaxpr, run: Callable[..., Any], free: Sequence[jc.Var]
) -> Any:
    """A `CustomVJPTraced` with its programs rewritten; as `with_custom_vjp`.

    What its rules may close over is `free`. It becomes operands, after those that the
    program does not take, and residuals. `run` calls a rule, given the values of those.
    """

    def forward(rule: Callable[..., Any], consts: Any, more: Any, *args: Any) -> Any:
        out, residuals = run(rule, more[1], consts, more[0], *args)
        return out, (residuals, more[1])

    def fwd(present: PyTree, *args: Any) -> Any:
        present = (present[0], present[1][0], *present[2:])
        # A literal of the program comes as a number, without a shape.
        args = jax.tree.map(lambda x: jnp.asarray(x) if _is_number(x) else x, args)
        return forward(functools.partial(prim.fwd, present), *args)

    def backward(rule: Callable[..., Any]) -> Callable[..., Any]:
        new = lambda residuals, cts: run(rule, residuals[1], residuals[0], cts)  # noqa: E731
        return _named_as(new, rule)

    rules: dict[str, Any] = {"fwd": _named_as(fwd, prim.fwd)}
    rules["bwd"] = backward(prim.bwd)
    if prim.params.get("bwd_accums") is not None:
        rules["bwd_accums"] = None  # `bwd` gives what it adds up
    if prim.params.get("remat_rules"):
        first, again, last = prim.remat_rules
        rem = lambda residuals, *args: forward(  # noqa: E731
            functools.partial(again, residuals[0]), *args
        )
        new = functools.partial(forward, first)
        rules["remat_rules"] = _named_as(new, first), rem, backward(last)
    consts, theirs, *args = prim.in_avals
    new = copy.copy(prim)
    new.in_avals = (consts, (theirs, [v.aval for v in free]), *args)
    new.in_avals_flat, new.in_tree = jax.tree.flatten(new.in_avals)
    return with_program(new, program, **rules)


def is_zero(x: object) -> bool:
    """Whether it is a symbolic zero, of JAX's public type or of its private one."""
    return isinstance(x, SymbolicZero) or type(x).__name__ == "Zero"


def _is_number(x: object) -> bool:
    return isinstance(x, bool | int | float | complex)


def _named_as(new: Any, old: Any) -> Callable[..., Any]:
    """A function with the name of another one, as JAX prints it."""

    @functools.wraps(old)
    def named(*args: Any) -> Any:
        return new(*args)

    return named
