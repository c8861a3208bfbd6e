"""Gradients of a scaled loss of NNX models: what runs in them stays in them."""

import functools
from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

import jax
from flax import nnx
from jaxtyping import Array

from jamp._core.tree import select
from jamp._scaling import value_and_grad as pure
from jamp._scaling.scaled_grads import ScaledGrads
from jamp._scaling.value_and_grad import GradOptions
from jamp.nnx._arguments import check_arguments_apart, take_out
from jamp.nnx._optimizer import Optimizer
from jamp.nnx._variables import Models, from_pure, shown, with_arrays, written_back

type Fn[T] = Callable[..., T]


@overload
def scaled_value_and_grad(
    loss_fn: Fn[Any], *, has_aux: Literal[False] = False, **options: Unpack[GradOptions]
) -> Fn[tuple[Array, ScaledGrads]]: ...


@overload
def scaled_value_and_grad(
    loss_fn: Fn[Any], *, has_aux: Literal[True], **options: Unpack[GradOptions]
) -> Fn[tuple[tuple[Array, Any], ScaledGrads]]: ...


def scaled_value_and_grad(
    loss_fn: Fn[Any], *, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Fn[tuple[Any, ScaledGrads]]:
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
        TypeError: `optimizer` is not of `jamp.nnx.initialize`; the loss is no float
            scalar.
        ValueError: the model is not of the optimizer's shapes; an argument shares
            Variables with it; the loss makes Variables.
    """

    @functools.wraps(loss_fn)
    def value_and_grad(models: Models, optimizer: Optimizer, *args, **kwargs):
        if not isinstance(optimizer, Optimizer):
            raise TypeError(
                "jamp.nnx.scaled_value_and_grad takes `(model, optimizer, ...)` of "
                f"jamp.nnx.initialize, got {type(optimizer).__name__} for the "
                "optimizer."
            )
        state = optimizer.amp_state(models)
        graphdef, trained, rest = nnx.split(models, optimizer.wrt, ...)
        nodes, others, put_back = take_out((args, kwargs))
        check_arguments_apart(models, nodes)
        nodes_def, nodes_state = nnx.split(nodes)
        before = nnx.as_pure(rest), nnx.as_pure(nodes_state)

        def pure_loss(params, before, others):
            # The params that are not trained; `params` are shown so already.
            frozen = shown(rest, before[0], optimizer.properties.half_dtype)
            there = nnx.merge(
                graphdef, with_arrays(trained, params), from_pure(rest, frozen)
            )
            nodes = nnx.merge(nodes_def, from_pure(nodes_state, before[1]))
            args, kwargs = put_back(nodes, others)
            out = loss_fn(there, *args, **kwargs)
            loss, aux = out if has_aux else (out, None)
            left = nnx.state(there, nnx.Not(optimizer.wrt)), nnx.state(nodes)
            after = nnx.as_pure(left)
            _check_structure(before, after)
            after = written_back(rest, after[0]), after[1]
            return loss, (aux, after)

        both = pure.scaled_value_and_grad(pure_loss, has_aux=True, **options)
        (loss, (aux, after)), grads = both(state, before, others)
        after = select(grads.finite, after, before)
        nnx.update(models, from_pure(rest, after[0]))
        nnx.update(nodes, from_pure(nodes_state, after[1]))
        return ((loss, aux) if has_aux else loss), grads

    return value_and_grad


@overload
def scaled_grad(
    loss_fn: Fn[Any], *, has_aux: Literal[False] = False, **options: Unpack[GradOptions]
) -> Fn[ScaledGrads]: ...


@overload
def scaled_grad(
    loss_fn: Fn[Any], *, has_aux: Literal[True], **options: Unpack[GradOptions]
) -> Fn[tuple[ScaledGrads, Any]]: ...


def scaled_grad(
    loss_fn: Fn[Any], *, has_aux: bool = False, **options: Unpack[GradOptions]
) -> Fn[Any]:
    """`scaled_value_and_grad` without the value: gives `grads`, or `(grads, aux)`."""
    both = scaled_value_and_grad(loss_fn, has_aux=has_aux, **options)

    @functools.wraps(loss_fn)
    def grad(models, optimizer, *args, **kwargs):
        value, grads = both(models, optimizer, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad


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
