"""NNX models as trees of arrays by path, and checks of the arguments."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import filterlib
from jaxtyping import PyTree

from jamp._core.show import short_repr

type Models = nnx.Module | Sequence[nnx.Module] | Mapping[Any, nnx.Module]


def entries(models: Models) -> dict[Any, nnx.Module]:
    """Returns the modules by key; the key of a single model is None."""
    modules: dict[Any, Any] = {None: models}
    if isinstance(models, list | tuple):
        modules = dict(enumerate(models))
    elif isinstance(models, Mapping) and not isinstance(models, nnx.State):
        modules = dict(models)
    for key, module in modules.items():
        if not isinstance(module, nnx.Module):
            where = "" if key is None else f" at {key!r}"
            raise TypeError(
                "Expected an nnx.Module, or a list, tuple or dict of them, got "
                f"{short_repr(module)}{where}. After nnx.split, pass the module or "
                "`nnx.merge(graphdef, state)`, because jamp.nnx splits it itself."
            )
    return modules


def check_apart(models: Models) -> None:
    """Raises if two models share a Variable, because both optimizers would step it."""
    for (a, one), (b, other) in itertools.combinations(entries(models).items(), 2):
        if shared := shared_variable(one, other):
            raise ValueError(
                f"The models {a!r} and {b!r} share the Variable {shared}. Put both "
                "into one nnx.Module, so that one optimizer steps it."
            )


def shared_variable(one: PyTree, other: PyTree) -> str | None:
    """Returns the path in `one` of a Variable that is also in `other`, or None."""
    theirs = {id(x) for _, x in nnx.iter_graph(other) if isinstance(x, nnx.Variable)}
    paths = (path for path, x in nnx.iter_graph(one) if id(x) in theirs)
    return next(("/".join(map(str, path)) for path in paths), None)


def check_same_variables(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
    """Raises if a function added or removed Variables, given both sets by path."""
    if before.keys() != after.keys():
        names = sorted(map(str, before.keys() ^ after.keys()))
        raise ValueError(
            f"The function added or removed Variables: {', '.join(names)}. It can only "
            "write to existing ones. Inside the function, take out the results of "
            "`sow` with `nnx.pop(model, nnx.Intermediate)`, and return them."
        )


def arrays_of(models: Models, wrt: filterlib.Filter) -> PyTree:
    """Returns the values of the Variables that a filter picks, in dicts by path."""
    entries(models)  # raises for anything else
    return jax.tree.map(
        lambda model: nnx.to_pure_dict(nnx.state(model, wrt)), models, is_leaf=is_node
    )


def values_by_path(nodes: PyTree) -> dict[tuple[Any, ...], Any]:
    """Returns the values of all Variables by path."""
    return {path: x.get_value() for path, x in nnx.to_flat_state(nnx.state(nodes))}


def by_path(arrays: PyTree) -> Mapping[Any, Any]:
    """Converts a tree of `arrays_of` to a mapping for `nnx.update`."""
    return dict(enumerate(arrays)) if isinstance(arrays, list | tuple) else arrays


def is_node(x: object) -> bool:
    """Returns whether `x` is a Variable or holds Variables."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def map_arrays[T](fn: Callable[[Any], Any], tree: T) -> T:
    """Maps the leaves of a tree, except NNX objects."""
    return jax.tree.map(lambda x: x if is_node(x) else fn(x), tree, is_leaf=is_node)
