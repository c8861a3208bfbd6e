"""Converts calls of functions of NNX models to functions of arrays."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from flax.nnx import filterlib
from jaxtyping import PyTree

from jamp._autocast.marks import shown_params
from jamp._autocast.scope import Scope
from jamp._core.dtypes import is_half
from jamp._core.tree import path_string, select
from jamp._policy.forward import scope_by
from jamp._state.amp_state import AmpState
from jamp.nnx._optimizer import Optimizer
from jamp.nnx._variables import (
    Models,
    check_same_variables,
    is_node,
    shared_variable,
    values_by_path,
)


def pure(
    loss_fn: Callable[..., Any], models: Models, optimizer: Optimizer
) -> tuple[Callable[..., Any], AmpState]:
    """Converts a loss of NNX models for `jamp.explain` and `jamp.diagnostics`.

    Args:
        loss_fn: `(model, *args, **kwargs) -> loss`, or `(loss, aux)`.
        models: the model, or the container of models, from `jamp.nnx.initialize`.
        optimizer: the optimizer from the same call.

    Returns:
        `(loss_fn, state)`: a function of the params and the same arguments, and the
        AmpState to pass to it. The function does not change the models.

    Raises:
        TypeError: `optimizer` is not a `jamp.nnx.Optimizer`.

    >>> import jamp.nnx, jax.numpy as jnp, optax
    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> model, optimizer = jamp.nnx.initialize(model, optax.sgd(1.0), verbosity=0)
    >>> def loss_fn(model, x):
    ...     return jnp.log(model(x) * 0).mean()
    >>> pure_loss, state = pure(loss_fn, model, optimizer)
    >>> found = jamp.diagnostics.locate(pure_loss)(state, jnp.ones((1, 2)))
    >>> print(found.operation, found.phase, *found.operands)
    a logarithm forward float32[1, 2] in [0, 0]
    """
    check_optimizer(optimizer, "pure", "loss_fn, model, optimizer")

    def pure_loss(params, *args, **kwargs):
        call = loss_call(loss_fn, models, optimizer, args, kwargs)
        return call(params, call.others, call.values)[0]

    return pure_loss, optimizer.amp_state(models)


def check_optimizer(
    optimizer: object, call: str, takes: str = "model, optimizer, ..."
) -> None:
    """Raises unless `optimizer` is a `jamp.nnx.Optimizer`."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"jamp.nnx.{call} takes `({takes})` from jamp.nnx.initialize, got "
            f"{type(optimizer).__name__} for the optimizer."
        )


def loss_call(
    loss_fn: Callable[..., Any],
    models: Models,
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> "PureCall":
    """Converts the call of a loss to a function of the trained params."""
    scope = scope_by(optimizer.properties)
    call = PureCall(loss_fn, (models, *args), kwargs, scope, optimizer.wrt)
    arguments = list(call.nodes.values())[call.first.num_leaves :]
    if shared := shared_variable(models, arguments):
        raise ValueError(
            f"An argument of the loss shares the Variable {shared} with the model. The "
            "Variable would have no gradient. Read it from the model inside the loss, "
            "or pass an `nnx.clone(...)` of the argument."
        )
    return call


class PureCall:
    """A call of `fn` as a function `(params, others, values) -> (out, written)`.

    Attributes:
        others: the arguments, with None in place of NNX objects.
        values: the values of the Variables that are not in `params`.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        scope: Scope | None,
        wrt: filterlib.Filter = None,
    ):
        self.fn, self.scope = fn, scope
        leaves, self.structure = jax.tree_util.tree_flatten_with_path(
            (args, kwargs), is_leaf=is_node
        )
        self.others = [None if is_node(x) else x for _, x in leaves]
        self.nodes = {i: x for i, (_, x) in enumerate(leaves) if is_node(x)}
        # The first argument holds the params. Rules name them by the path inside it.
        self.first = jax.tree.structure(args[:1], is_leaf=is_node)
        self.names = [path_string(path[2:]) for path, _ in leaves]
        picks, count = filterlib.to_predicate(wrt), self.first.num_leaves
        trained = lambda path, x: path[0] < count and picks(path[1:], x)  # noqa: E731
        self.graphdef, _, rest = nnx.split(self.nodes, trained, ...)
        self.rest = nnx.to_flat_state(rest)
        self.values = [variable.get_value() for _, variable in self.rest]

    def __call__(self, params: PyTree, others: Any, values: Any) -> tuple[Any, Any]:
        """Calls `fn`. `written` has None for each Variable that `fn` did not write."""
        trained = {} if params is None else self.first.flatten_up_to((params,))
        pairs = zip(self.rest, values, strict=True)
        rest = [(path, v.replace(self._show(path, v, x))) for (path, v), x in pairs]
        nodes = nnx.merge(
            self.graphdef, dict(enumerate(trained)), nnx.from_flat_state(rest)
        )
        before = values_by_path(nodes)
        leaves = [nodes.get(i, x) for i, x in enumerate(others)]
        args, kwargs = jax.tree.unflatten(self.structure, leaves)
        out = self.fn(*args, **kwargs)
        after = values_by_path(nodes)
        check_same_variables(before, after)
        pairs = ((before[path], after[path]) for path, _ in self.rest)
        return out, [None if new is old else new for old, new in pairs]

    def _show(self, path: tuple[Any, ...], variable: nnx.Variable, value: Any) -> Any:
        """Returns a half param in float32, as `fn` sees it at a level that casts."""
        if self.scope is None or not isinstance(variable, nnx.Param):
            return value
        name = "/".join(filter(None, (self.names[path[0]], *map(str, path[1:]))))
        return shown_params({name: value}, self.scope.policy)[name]

    def write_back(self, written: list[Any], finite: Any = None) -> None:
        """Updates the objects of the caller, if the gradients are finite."""
        changes = []
        for (path, variable), new in zip(self.rest, written, strict=True):
            if new is not None:  # a Variable of an outer trace can only be read
                old = variable.get_value()
                new = new.astype(old.dtype) if is_half(old) else new
                new = new if finite is None else select(finite, new, old)
                changes.append((path, variable.replace(new)))
        nnx.update(self.nodes, nnx.from_flat_state(changes))
