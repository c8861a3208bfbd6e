"""NNX objects among a function's arguments: models, Rngs, metrics."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

from jamp.nnx._variables import variables_of


def is_node(x: object) -> bool:
    """Whether `x` holds Variables, or is one."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def map_arrays[T](fn: Callable[[Any], Any], tree: T) -> T:
    """`fn` on a tree's leaves, but for what is inside of NNX objects."""
    return jax.tree.map(lambda x: x if is_node(x) else fn(x), tree, is_leaf=is_node)


def take_out(
    arguments: Any,
) -> tuple[tuple[Any, ...], list[Any], Callable[[Any, Any], Any]]:
    """Takes the NNX objects out of a tree of arguments.

    Returns:
        The objects, the other leaves, and a function that puts such two together again.
    """
    leaves, structure = jax.tree.flatten(arguments, is_leaf=is_node)

    def put_back(nodes, others):
        nodes, others = iter(nodes), iter(others)
        full = [next(nodes) if is_node(x) else next(others) for x in leaves]
        return jax.tree.unflatten(structure, full)

    nodes = tuple(x for x in leaves if is_node(x))
    return nodes, [x for x in leaves if not is_node(x)], put_back


def values_by_path(nodes: Any, which: Any = ...) -> dict[tuple[Any, ...], Any]:
    """The values of the Variables that a filter picks, by path."""
    flat = nnx.to_flat_state(nnx.state(nodes, which))
    return {path: variable.get_value() for path, variable in flat}


def check_arguments_apart(models: Any, nodes: tuple[Any, ...]) -> None:
    """Raises if an argument shares a Variable with the models that are trained."""
    owned = {id(x): path for path, x in variables_of(models)}
    for node in nodes:
        for _, x in variables_of(node):
            if id(x) in owned:
                name = "/".join(map(str, owned[id(x)]))
                raise ValueError(
                    f"An argument of the loss shares the Variable {name} with the "
                    "model, and would have no gradient of its own. Take it from the "
                    "model inside of the loss, or pass `nnx.clone(...)` of it."
                )
