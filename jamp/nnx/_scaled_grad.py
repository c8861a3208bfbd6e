"""Gradients of a scaled loss of NNX models: what runs in them stays in them."""

import functools
from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import jax
from flax import nnx
from jaxtyping import Array, PyTree

from jamp._core.devices import moves_constants
from jamp._core.tree import select
from jamp._policy.forward import scope_by
from jamp._scaling.value_and_grad import GradOptions, ScaledGrad, check_call
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

type Fn[T] = Callable[..., T]


@overload
def scaled_value_and_grad(
    loss_fn: Fn[Any], *, has_aux: Literal[False] = False, **options: Unpack[GradOptions]
) -> Fn[tuple[Array, Any]]: ...
@overload
def scaled_value_and_grad(
    loss_fn: Fn[Any], *, has_aux: Literal[True], **options: Unpack[GradOptions]
) -> Fn[tuple[tuple[Array, Any], Any]]: ...
@check_call
def scaled_value_and_grad(
    loss_fn: Fn[Any], *, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Fn[tuple[Any, Any]]:
    """`nnx.value_and_grad` for a `jamp.nnx.Optimizer`: scales the loss, runs in half.

    What the loss writes into the model (BatchNorm's statistics, counters of keys), or
    into NNX objects among the other arguments, is kept if its gradients are finite, and
    else is as before. What it writes into trained Variables is dropped: the optimizer
    steps its masters of what they were.

    Args:
        loss_fn: `(model, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`.
        has_aux: whether `loss_fn` returns `(loss, aux)`.
        **options: of `jamp.scaled_value_and_grad`; `wrt` names models, not Variables.

    Returns:
        `f(model, optimizer, *args, **kwargs) -> (loss, grads)`, or `((loss, aux),
        grads)`; `grads` for `optimizer.update(model, grads)`.

    Raises (when called):
        TypeError: `optimizer` is not of `jamp.nnx.initialize`; the loss is not a float
            scalar.
        ValueError: the model is not of the optimizer's shapes; an argument shares
            Variables with it; the loss makes Variables.
    """

    @functools.wraps(loss_fn)
    @moves_constants
    def value_and_grad(models: Models, optimizer: Optimizer, /, *args, **kwargs):
        check_optimizer(optimizer, "scaled_value_and_grad(loss_fn)")
        loss = PureLoss(loss_fn, has_aux, models, optimizer, args, kwargs)
        compute = ScaledGrad(loss, has_aux=True, **options).checked
        state = optimizer.amp_state(models)
        (value, (aux, after)), grads, finite = compute(
            state, *loss.others, variables=loss.before
        )
        if finite is not None:
            after = select(finite, after, loss.before)
        loss.write_back(after)
        return ((value, aux) if has_aux else value), grads

    return value_and_grad


@overload
def scaled_grad(
    loss_fn: Fn[Any], *, has_aux: Literal[False] = False, **options: Unpack[GradOptions]
) -> Fn[Any]: ...
@overload
def scaled_grad(
    loss_fn: Fn[Any], *, has_aux: Literal[True], **options: Unpack[GradOptions]
) -> Fn[tuple[Any, Any]]: ...


def scaled_grad(
    loss_fn: Fn[Any], *, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Fn[Any]:
    """`scaled_value_and_grad` without the value: gives `grads`, or `(grads, aux)`."""
    both = scaled_value_and_grad(loss_fn, has_aux=has_aux, **options)

    @functools.wraps(loss_fn)
    def grad(models, optimizer, /, *args, **kwargs):
        check_optimizer(optimizer, "scaled_grad(loss_fn)")
        value, grads = both(models, optimizer, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad


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
    """`(params, *others, variables) -> (loss, (aux, after))`, of one call of a loss.

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
        _check_structure(variables, after)
        return loss, (aux, (written_back(self.rest, after[0]), after[1]))

    def write_back(self, after: PyTree) -> None:
        """Puts what a loss left into the objects that were given."""
        nnx.update(self.models, from_pure(self.rest, after[0]))
        nnx.update(self.nodes, from_pure(self.nodes_state, after[1]))


def _check_structure(before: PyTree, after: PyTree) -> None:
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
