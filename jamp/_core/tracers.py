"""Wraps the undocumented parts of JAX's tracers that jamp uses.

    y = add x 1.0       equation_of(y) returns this equation

The tests check each fact.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.core import Tracer


def equation_of(x: object) -> Any:
    """Returns the equation that computes `x` in the program that JAX is tracing.

    Returns None for an input, and for a value that is not part of such a program.
    """
    return getattr(x, "parent", None) if isinstance(x, Tracer) else None


def depends_on(x: object, inputs: Sequence[Any]) -> bool:
    """Returns whether a value depends on a function's inputs, inside `jax.grad`.

    Such values belong to the same trace as the inputs.
    """
    trace = getattr(x, "_trace", None)
    return any(getattr(y, "_trace", object) is trace for y in inputs)


def ancestors(values: Iterable[Any], follows: Callable[[Any], bool]) -> list[Any]:
    """Returns the values and their ancestors in the program that JAX is tracing.

    It visits the operands of a value only if `follows(value)` is true.
    """
    seen: dict[int, Any] = {}
    waiting = list(values)
    while waiting:
        x = waiting.pop()
        if id(x) in seen:
            continue
        seen[id(x)] = x
        eqn = equation_of(x)
        if eqn is not None and follows(x):
            waiting += eqn.invars
    return list(seen.values())


_OF_GRAD = ("JVPTrace", "LinearizeTrace")


def depends_without_grad(x: object, inputs: Sequence[Any]) -> bool:
    """Returns whether a function computes `x` from its inputs without `jax.grad`.

    JAX does not know the ancestors of the arguments of an inner program, such as one of
    `jax.jit`. These arguments count as inputs.
    """
    if not isinstance(x, Tracer):
        return False
    traces = [y._trace for y in inputs if isinstance(y, Tracer)]
    trace: Any = x._trace
    while trace not in traces:
        if trace is None or type(trace).__name__ in _OF_GRAD:
            return False
        trace = getattr(trace, "parent_trace", None)
    if type(x._trace).__name__ in _OF_GRAD:
        return True  # all tracers of `jax.grad` depend on its inputs
    ids = set(map(id, inputs))
    for y in ancestors([x], lambda y: id(y) not in ids):
        if id(y) in ids:
            return True
        if isinstance(y, Tracer) and equation_of(y) is None and y._trace not in traces:
            is_constant = hasattr(y._trace, "frame") and y.get_referent() is not y
            if not is_constant or depends_without_grad(y.get_referent(), inputs):
                return True
    return False
