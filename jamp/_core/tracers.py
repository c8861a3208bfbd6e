"""Wraps the undocumented parts of JAX's tracers that jamp uses.

    y = add x 1.0       equation_of(y) returns this equation

The tests check each fact.
"""

from collections.abc import Sequence
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
    return any([getattr(y, "_trace", object) is trace for y in inputs])
