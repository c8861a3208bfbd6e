"""Gradients of a scaled loss of NNX models."""

import functools
from collections.abc import Callable
from typing import Any, Literal, Unpack, overload

from jaxtyping import Array

from jamp._scaling.value_and_grad import GradOptions, ScaledGrad, check_call
from jamp.nnx._optimizer import Optimizer
from jamp.nnx._pure import check_optimizer, loss_call
from jamp.nnx._variables import Models

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

    The loss may write to Variables, such as running statistics, of the model and of NNX
    objects among its other arguments. They keep the new values if the gradients are
    finite, and their old values otherwise. Writes to trained Variables are dropped.

    Args:
        loss_fn: `(model, *args, **kwargs) -> loss`, or `(loss, aux)` with `has_aux`.
        has_aux: whether `loss_fn` returns `(loss, aux)`.
        **options: see `jamp.scaled_value_and_grad`; `wrt` names models, not Variables.

    Returns:
        `f(model, optimizer, *args, **kwargs) -> (loss, grads)`, or `((loss, aux),
        grads)`. Pass `grads` to `optimizer.update(model, grads)`.

    Raises (when called):
        TypeError: `optimizer` is not a `jamp.nnx.Optimizer`.
        ValueError: the model does not match the optimizer; an argument shares Variables
            with the model; the loss adds or removes Variables.
    """

    @functools.wraps(loss_fn)
    def value_and_grad(models: Models, optimizer: Optimizer, /, *args, **kwargs):
        check_optimizer(optimizer, "scaled_value_and_grad(loss_fn)")
        call = loss_call(loss_fn, models, optimizer, args, kwargs)

        def loss(params, *others, variables):
            out, written = call(params, others, variables)
            value, aux = out if has_aux else (out, None)
            return value, (aux, written)

        compute = ScaledGrad(loss, has_aux=True, **options).checked
        state = optimizer.amp_state(models)
        (value, (aux, written)), grads, finite = compute(
            state, *call.others, variables=call.values
        )
        call.write_back(written, finite)
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
    """Like `scaled_value_and_grad`, but returns `grads`, or `(grads, aux)`."""
    both = scaled_value_and_grad(loss_fn, has_aux=has_aux, **options)

    @functools.wraps(loss_fn)
    def grad(models, optimizer, /, *args, **kwargs):
        check_optimizer(optimizer, "scaled_grad(loss_fn)")
        value, grads = both(models, optimizer, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return grad
