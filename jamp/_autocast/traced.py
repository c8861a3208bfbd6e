"""Traces a function for some leaves of its arguments. All other leaves stay known.

jaxpr, values, rebuild = traced(fn, (x, 2), is_array)
rebuild(jaxpr_as_fun(jaxpr)(*values)) == fn(x, 2)
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core as jc


class Traced(NamedTuple):
    """A traced call of a function."""

    jaxpr: jc.Jaxpr
    values: list[Any]  # the leaves that the jaxpr takes
    # Builds the result from the jaxpr's outputs. Known results stay as they are.
    rebuild: Callable[[Sequence[Any]], Any]


def traced(
    fn: Callable[..., Any],
    args: Sequence[Any],
    is_input: Callable[[Any], bool],
    kwargs: dict[str, Any] | None = None,
) -> Traced:
    """Traces a call of a function. The jaxpr takes the leaves that are inputs."""
    leaves, tree = jax.tree.flatten((args, kwargs or {}))
    known = [None if is_input(x) else x for x in leaves]
    result: dict[str, Any] = {}

    def flat(*values):
        given, named = tree.unflatten(_filled(known, values))
        outs, result["tree"] = jax.tree.flatten(fn(*given, **named))
        result["known"] = [None if isinstance(x, jax.Array) else x for x in outs]
        return [x for x in outs if isinstance(x, jax.Array)]

    def rebuild(outs):
        return result["tree"].unflatten(_filled(result["known"], outs))

    values = [x for x in leaves if is_input(x)]
    return Traced(jax.make_jaxpr(flat)(*values), values, rebuild)


def _filled(known: list[Any], values: Sequence[Any]) -> list[Any]:
    """Replaces each None with the next value. No leaf of a tree is None."""
    left = iter(values)
    return [next(left) if x is None else x for x in known]
