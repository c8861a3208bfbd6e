"""What JAX documents nowhere about values of programs that are being traced.

    y = add x 1.0       equation_of(y) is this

As for `jax_internals`, the tests hold each fact.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jax.core import Tracer


def equation_of(x: object) -> Any:
    """The equation by which the program that is being traced makes `x`.

    Returns None for an input, and for a value of no such program.
    """
    return getattr(x, "parent", None) if isinstance(x, Tracer) else None


def depends_on(x: object, inputs: Sequence[Any]) -> bool:
    """Whether the value of a function depends on its inputs, while `jax.grad` runs it.

    Values that do belong to its trace, as the inputs do; others do not.
    """
    trace = getattr(x, "_trace", None)
    return any(getattr(y, "_trace", object) is trace for y in inputs)


def ancestors(values: Iterable[Any], follows: Callable[[Any], bool]) -> list[Any]:
    """The values, and what the program that is being traced computes them from.

    Goes on from a value if it `follows`.
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
    """Whether a function computes `x` from its inputs, and no inner `jax.grad` does.

    An inner program, of `jax.jit` for example, does not know what its arguments are
    computed from: they count as the inputs.
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
        return True  # its values depend on the inputs: others are no tracers of it
    ids = set(map(id, inputs))
    for y in ancestors([x], lambda y: id(y) not in ids):
        if id(y) in ids:
            return True
        if isinstance(y, Tracer) and equation_of(y) is None and y._trace not in traces:
            is_constant = hasattr(y._trace, "frame") and y.get_referent() is not y
            if not is_constant or depends_without_grad(y.get_referent(), inputs):
                return True
    return False


def is_checkpointed(values: Iterable[object]) -> bool:
    """Whether `jax.checkpoint` traces a program that values are of, or one around."""
    traces = (x._trace for x in values if isinstance(x, Tracer))
    trace: Any = next(traces, None)
    while trace is not None:
        info = getattr(getattr(trace, "frame", None), "debug_info", None)
        if getattr(info, "traced_for", "") in ("checkpoint / remat", "remat3"):
            return True
        trace = getattr(trace, "parent_trace", None)
    return False
