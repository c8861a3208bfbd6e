"""NNX models, and other objects with Variables, as trees of arrays, and back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx import filterlib
from jaxtyping import PyTree

from jamp._autocast.marks import shown_params
from jamp._autocast.program import Scope
from jamp._core.dtypes import HALF_DTYPES

type Models = nnx.Module | Sequence[nnx.Module] | Mapping[Any, nnx.Module]


def entries(models: Models) -> dict[Any, nnx.Module]:
    """The modules of one model (under the key None) or of a container, by key."""
    if isinstance(models, nnx.Module):
        return {None: models}
    is_container = isinstance(models, list | tuple)
    for part in models if is_container else (models,):  # pyright: ignore[reportGeneralTypeIssues]
        if isinstance(part, nnx.State | nnx.GraphDef):
            raise TypeError(
                f"Expected an nnx.Module, got a {type(part).__name__}, as of nnx.split."
                " Pass the module, or `nnx.merge(graphdef, state)`: jamp.nnx splits it "
                "itself."
            )
    if isinstance(models, Mapping):
        return dict(models)
    if is_container:
        return dict(enumerate(models))
    raise TypeError(
        "Expected an nnx.Module, or a list, tuple or dict of them, got "
        f"{type(models).__name__}."
    )


def check_models_apart(models: Models) -> None:
    """Raises if two models hold one Variable: each optimizer would step it."""
    owners: dict[int, str] = {}
    for key, model in entries(models).items():
        for path, variable in variables_of(model):
            name = "/".join(map(str, (key, *path)))
            before = owners.setdefault(id(variable), name)
            if before != name:
                raise ValueError(
                    f"The models share a Variable, {before} and {name}. Hold both in "
                    "one nnx.Module, which knows that they are one."
                )


def check_arguments_apart(models: Models, nodes: tuple[Any, ...]) -> None:
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


def check_same_variables(before: Mapping[Any, Any], after: Mapping[Any, Any]) -> None:
    """Raises if a function added Variables or removed some, given theirs by path."""
    if before.keys() != after.keys():
        names = sorted(map(str, before.keys() ^ after.keys()))
        raise ValueError(
            f"The function added or removed Variables: {', '.join(names)}. It can only "
            "write to existing ones. Inside of the function, take out the results of "
            "`sow` with `nnx.pop(model, nnx.Intermediate)`, and return them."
        )


def variables_of(node: PyTree) -> list[tuple[Any, nnx.Variable]]:
    """The Variables in a tree of NNX objects, with their paths."""
    return [(path, x) for path, x in nnx.iter_graph(node) if _is_variable(x)]


def arrays_of(models: Models, wrt: filterlib.Filter) -> PyTree:
    """The values of the Variables that a filter picks: nested dicts by path."""
    entries(models)  # or an error
    return jax.tree.map(
        lambda model: nnx.to_pure_dict(nnx.state(model, wrt)),
        models,
        is_leaf=lambda x: isinstance(x, nnx.Module),
    )


def by_keystr(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths."""
    leaves = jax.tree.leaves_with_path(tree)
    return {jax.tree_util.keystr(path): x for path, x in leaves}


def values_by_path(nodes: PyTree) -> dict[tuple[Any, ...], Any]:
    """The values of all Variables, by path."""
    flat = nnx.to_flat_state(nnx.state(nodes))
    return {path: variable.get_value() for path, variable in flat}


def by_path(arrays: PyTree) -> Mapping[Any, Any]:
    """Trees of `arrays_of`, for `nnx.update` and `nnx.merge`: a list becomes a dict."""
    return dict(enumerate(arrays)) if isinstance(arrays, list | tuple) else arrays


def map_variables(fn: Callable[..., Any], variables: PyTree, values: PyTree) -> Any:
    """`fn(variable, value)` of a tree of Variables, and one as of `nnx.as_pure`."""
    return jax.tree.map(fn, variables, values, is_leaf=_is_variable)


def from_pure[T](variables: T, values: PyTree) -> T:
    """A tree of Variables with other values: the inverse of `nnx.as_pure`."""
    return map_variables(lambda v, x: v.replace(x), variables, values)


def shown(variables: PyTree, values: PyTree, scope: Scope | None) -> PyTree:
    """Variables' values as a user's program sees them in a scope: as params are."""
    if scope is None:
        return values
    pick = lambda v, x, y: x if isinstance(v, nnx.Param) else y  # noqa: E731
    params = shown_params(values, scope.policy)
    return jax.tree.map(pick, variables, params, values, is_leaf=_is_variable)


def written_back(variables: PyTree, values: PyTree) -> PyTree:
    """What a program has left in Variables of which it was shown some in float32."""

    def leaf(v, x):
        dtype = getattr(v.get_value(), "dtype", None)
        return x.astype(dtype) if dtype in HALF_DTYPES else x

    return map_variables(leaf, variables, values)


def is_node(x: object) -> bool:
    """Whether `x` holds Variables, or is one."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def map_arrays[T](fn: Callable[[Any], Any], tree: T) -> T:
    """`fn` on a tree's leaves, but for what is inside of NNX objects."""
    return jax.tree.map(lambda x: x if is_node(x) else fn(x), tree, is_leaf=is_node)


def take_out(
    arguments: PyTree,
) -> tuple[tuple[Any, ...], list[Any], Callable[[Any, Any], Any]]:
    """The NNX objects of a tree, its other leaves, and a function that joins both."""
    leaves, structure = jax.tree.flatten(arguments, is_leaf=is_node)

    def put_back(nodes, others):
        nodes, others = iter(nodes), iter(others)
        full = [next(nodes) if is_node(x) else next(others) for x in leaves]
        return jax.tree.unflatten(structure, full)

    nodes = tuple(x for x in leaves if is_node(x))
    return nodes, [x for x in leaves if not is_node(x)], put_back


def _is_variable(x: object) -> bool:
    return isinstance(x, nnx.Variable)
