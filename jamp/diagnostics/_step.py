"""A step as a program: the loss and the gradients of a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend import core as jc

from jamp._core.tree import path_string


class Step(NamedTuple):
    """A program that gives the loss and the gradients.

    Attributes:
        program: what it is.
        values: what it takes, and the paths of that.
        paths: of the gradients.
    """

    program: jc.Jaxpr
    values: list[tuple[Any, str]]
    paths: list[str]


def with_aux(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A loss function that gives `(loss, None)`, whether it has an aux or not."""

    def both(*args, **kwargs):
        out = loss_fn(*args, **kwargs)
        return (out[0] if isinstance(out, tuple) else out), None

    return both


def traced(fn: Callable[..., tuple[Any, Any]], arguments: tuple[Any, ...]) -> Step:
    """The program of `fn(*arguments) -> (loss, gradients)`; shapes do for arrays.

    Paths of arguments are those inside of each.
    """
    named = jax.tree_util.tree_leaves_with_path(arguments)
    structure = jax.tree.structure(arguments)
    leaves = [x for _, x in named]
    places = [i for i, x in enumerate(leaves) if _is_array(x)]
    paths: list[str] = []

    def flat(*arrays):
        found = dict(zip(places, arrays, strict=True))
        filled = [found.get(i, x) for i, x in enumerate(leaves)]
        loss, grads = fn(*jax.tree.unflatten(structure, filled))
        named = jax.tree_util.tree_leaves_with_path(grads)
        paths[:] = [path_string(path) for path, _ in named]
        return [loss, *(x for _, x in named)]

    program = jax.make_jaxpr(flat)(*(leaves[i] for i in places))
    values = [(leaves[i], path_string(named[i][0][1:])) for i in places]
    return Step(program, values, paths)


def _is_array(x: Any) -> bool:
    """Whether to trace an argument; Python's numbers are as in a step's code."""
    kinds = jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct
    return isinstance(x, kinds)
