"""A loss of NNX models as a pure function of params and arrays."""

from collections.abc import Callable
from typing import Any

from flax import nnx
from jaxtyping import PyTree

from jamp._policy.forward import scope_by
from jamp._state.amp_state import AmpState
from jamp.nnx._optimizer import Optimizer
from jamp.nnx._variables import (
    Models,
    by_keystr,
    by_path,
    check_arguments_apart,
    check_same_variables,
    from_pure,
    shown,
    take_out,
    written_back,
)


def pure(
    loss_fn: Callable[..., Any], models: Models, optimizer: Optimizer
) -> tuple[Callable[..., Any], AmpState]:
    """Converts a loss of NNX models for `jamp.explain` and `jamp.diagnostics`.

    Args:
        loss_fn: `(model, *args, **kwargs) -> loss`, or `(loss, aux)`.
        models: the model, or the container of them, of `jamp.nnx.initialize`.
        optimizer: its optimizer.

    Returns:
        `(loss_fn, state)`: a function of params and the same arguments, which keeps the
        models as they are, and the AmpState to pass to it.

    Raises:
        TypeError: `optimizer` is not of `jamp.nnx.initialize`.

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
    check_optimizer(optimizer, "pure", "(loss_fn, model, optimizer)")

    def pure_loss(params, *args, **kwargs):
        loss = PureLoss(loss_fn, False, models, optimizer, args, kwargs)
        out, _ = loss(params, *loss.others, variables=loss.before)
        return out

    return pure_loss, optimizer.amp_state(models)


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
    """One call of a loss: `(params, *others, variables) -> (loss, (aux, after))`.

    `before` and `after` hold the Variables that are not trained, of the models and of
    NNX objects among the arguments; `others` the arguments that are no NNX objects.
    """

    def __init__(
        self,
        loss_fn: Callable[..., Any],
        has_aux: bool,
        models: Models,
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ):
        self.loss_fn, self.has_aux = loss_fn, has_aux
        self.models, self.wrt = models, optimizer.wrt
        self.scope = scope_by(optimizer.properties)
        self.graphdef, _, self.rest = nnx.split(models, self.wrt, ...)
        self.nodes, self.others, self.put_back = take_out((args, kwargs))
        check_arguments_apart(models, self.nodes)
        self.nodes_def, self.nodes_state = nnx.split(self.nodes)
        self.before = nnx.as_pure(self.rest), nnx.as_pure(self.nodes_state)

    def __call__(self, params: PyTree, *others: Any, variables: PyTree) -> Any:
        """The loss, its aux, and what it left in what is not trained."""
        # Params that are not trained; `params` are shown so already.
        frozen = from_pure(self.rest, shown(self.rest, variables[0], self.scope))
        there = nnx.merge(self.graphdef, by_path(params), frozen)
        nodes = nnx.merge(self.nodes_def, from_pure(self.nodes_state, variables[1]))
        args, kwargs = self.put_back(nodes, others)
        out = self.loss_fn(there, *args, **kwargs)
        loss, aux = out if self.has_aux else (out, None)
        left = nnx.state(there, nnx.Not(self.wrt)), nnx.state(nodes)
        after = nnx.as_pure(left)
        check_same_variables(*map(by_keystr, (variables, after)))
        return loss, (aux, (written_back(self.rest, after[0]), after[1]))

    def write_back(self, after: PyTree) -> None:
        """Puts what a loss left into the objects that were given."""
        nnx.update(self.models, from_pure(self.rest, after[0]))
        nnx.update(self.nodes, from_pure(self.nodes_state, after[1]))
