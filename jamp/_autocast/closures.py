"""What functions close over: a look into the places where Python keeps it."""

import functools
import types
from collections.abc import Mapping
from typing import Any

import jax
from jax.core import Tracer
from jax.extend import linear_util


def tracers_in(x: Any) -> list[Tracer]:
    """The tracers that are reached from functions, containers and objects.

    They are in cells, arguments, defaults, items and attributes, at any depth; some of
    them may never be read.
    """
    found: list[Tracer] = []
    seen: dict[int, Any] = {}
    waiting = [x]
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x  # and kept: what comes after must not have the same `id`
        if isinstance(x, Tracer):
            found.append(x)
        else:
            waiting += _held(x)
    return found


def _held(x: Any) -> list[Any]:
    """What a function, a container or an object holds."""
    if isinstance(x, type | types.ModuleType | jax.Array):
        return []
    if isinstance(x, Mapping):
        return list(x.values())
    if isinstance(x, list | tuple | set | frozenset):
        return list(x)
    if isinstance(x, types.CellType):
        try:
            return [x.cell_contents]
        except ValueError:  # not assigned yet
            return []
    if isinstance(x, types.FunctionType):
        return [x.__closure__, x.__defaults__, x.__kwdefaults__, x.__dict__]
    if isinstance(x, types.MethodType):
        return [x.__func__, x.__self__]
    if isinstance(x, functools.partial):
        return [x.func, x.args, x.keywords]
    if isinstance(x, linear_util.WrappedFun):
        return [x.f, x.f_transformed, x.transforms, x.params]
    if isinstance(x, jax.custom_vjp | jax.custom_jvp):
        return list(vars(x).values())
    if type(x).__module__.partition(".")[0] in ("jax", "jaxlib"):
        # Not its traces, which hold all; but what it keeps of static arguments.
        is_field = not isinstance(getattr(type(x), "val", None), property)
        held = getattr(x, "val", None) if is_field else None
        return [getattr(x, "__wrapped__", None), held]
    return list(getattr(x, "__dict__", {}).values())
