"""Finds the tracers that the rules of a custom derivative close over.

w = x * 2; f = custom_vjp(lambda y: y * w)      the rules of f close over w
"""

import functools
import itertools
import types
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import core as jc, linear_util
from jaxtyping import PyTree

from jamp._autocast.hijax import hi_primitive


def closed_over(eqn: jc.JaxprEqn) -> list[jc.Var]:
    """Returns the variables whose tracers a `custom_vjp_call`'s rules close over.

    Without autocast, JAX may differentiate without a trace, and a rule closes over
    values. Here it closes over tracers of a finished trace, which keep their variables.
    """
    params = (hi_primitive(eqn) or eqn).params
    tracers = _tracers_in(list(params.values()))
    return list(dict.fromkeys(filter(None, map(variable_of, tracers))))


def variable_of(tracer: Any) -> jc.Var | None:
    """Returns the variable of a tracer in its jaxpr, or None."""
    while isinstance(tracer, Tracer):
        tracer = getattr(tracer, "val", None)  # a tracer of `vmap` wraps another one
    return tracer if isinstance(tracer, jc.Var) else None


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
