"""A loss of NNX models as a pure function of arrays."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jaxtyping import PyTree

from jamp.nnx._optimizer import Optimizer
from jamp.nnx._variables import (
    Models,
    by_path,
    check_arguments_apart,
    from_pure,
    shown,
    take_out,
    written_back,
)


def check_optimizer(
    optimizer: object, call: str, takes: str = "(model, optimizer, ...)"
) -> None:
    """Raises a TypeError unless it is one of jamp."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"jamp.nnx.{call} takes `{takes}` of jamp.nnx.initialize, got "
            f"{type(optimizer).__name__} for the optimizer."
        )


class PureLoss:
    """`(params, before, others) -> (loss, (aux, after))`, of one call of a loss.

    Attributes:
        before: the arrays of what is not trained: in the models, and in NNX objects
            among the other arguments.
        others: the other arguments that are none.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        has_aux: bool,
        models: Models,
        optimizer: Optimizer,
        args: Any,
        kwargs: Any,
    ):
        self.loss_fn, self.has_aux = loss_fn, has_aux
        self.models, self.wrt = models, optimizer.wrt
        self.half = optimizer.properties.half_dtype
        self.graphdef, _, self.rest = nnx.split(models, self.wrt, ...)
        self.nodes, self.others, self.put_back = take_out((args, kwargs))
        check_arguments_apart(models, self.nodes)
        self.nodes_def, self.nodes_state = nnx.split(self.nodes)
        self.before = nnx.as_pure(self.rest), nnx.as_pure(self.nodes_state)

    def __call__(self, params: PyTree, before: Any, others: Any) -> Any:
        """The loss, its aux, and what it left in what is not trained."""
        # Params that are not trained; `params` are shown so already.
        frozen = from_pure(self.rest, shown(self.rest, before[0], self.half))
        there = nnx.merge(self.graphdef, by_path(params), frozen)
        nodes = nnx.merge(self.nodes_def, from_pure(self.nodes_state, before[1]))
        args, kwargs = self.put_back(nodes, others)
        out = self.loss_fn(there, *args, **kwargs)
        loss, aux = out if self.has_aux else (out, None)
        left = nnx.state(there, nnx.Not(self.wrt)), nnx.state(nodes)
        after = nnx.as_pure(left)
        _check_structure(before, after)
        return loss, (aux, (written_back(self.rest, after[0]), after[1]))

    def write_back(self, after: Any) -> None:
        """Puts what a loss left into the objects that were given."""
        nnx.update(self.models, from_pure(self.rest, after[0]))
        nnx.update(self.nodes, from_pure(self.nodes_state, after[1]))


def _check_structure(before: Any, after: Any) -> None:
    """Raises if the loss made Variables, which a step that is skipped cannot have."""
    if jax.tree.structure(before) == jax.tree.structure(after):
        return
    names = [
        {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(tree)}
        for tree in (before, after)
    ]
    raise ValueError(
        "The loss function added Variables to the model or removed some: "
        f"{sorted(names[0] ^ names[1])}. What `sow` leaves, take out in the loss with "
        "`nnx.pop(model, nnx.Intermediate)`, and return it as aux."
    )
