"""`locate` for NNX models."""

from collections.abc import Callable
from typing import Any

from jamp._scaling.value_and_grad import scaled_value_and_grad
from jamp.diagnostics._locate import locate_in
from jamp.diagnostics._location import Location
from jamp.diagnostics._step import with_aux
from jamp.nnx._optimizer import Optimizer
from jamp.nnx._pure_loss import PureLoss, check_optimizer
from jamp.nnx._variables import Models


def locate(
    loss_fn: Callable[..., Any],
    models: Models,
    optimizer: Optimizer,
    *args: Any,
    loss_id: int = 0,
    wrt: Any = None,
    **kwargs: Any,
) -> Location:
    """`jamp.diagnostics.locate` for `jamp.nnx.scaled_value_and_grad(loss_fn)`.

    Models and optimizer stay as they are.

    Args:
        loss_fn: `(model, *args, **kwargs) -> loss`, or `(loss, aux)`.
        models: the model, or the container of them, of `jamp.nnx.initialize`.
        optimizer: its optimizer.
        *args: the rest of what `loss_fn` takes.
        loss_id, wrt, **kwargs: see `jamp.diagnostics.locate`.

    Returns:
        A `jamp.diagnostics.Location`; NNX writes no modules into programs, so it names
        the param that was read last (`near`) in place of the module.

    Raises:
        TypeError: `optimizer` is not of `jamp.nnx.initialize`; arrays are traced.

    >>> import jamp.nnx, jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    >>> model, optimizer = jamp.nnx.initialize(model, optax.sgd(1.0), verbosity=0)
    >>> def loss_fn(model, x):
    ...     return jnp.log(model(x) * 0).mean()
    >>> found = jamp.nnx.locate(loss_fn, model, optimizer, jnp.ones((1, 2)))
    >>> print(found.operation, found.phase, *found.operands)
    a logarithm forward float32[1, 2] in [0, 0]
    """
    check_optimizer(optimizer, "locate", "(loss_fn, model, optimizer, ...)")
    loss = PureLoss(with_aux(loss_fn), True, models, optimizer, args, kwargs)

    def both(state, arguments):
        fn = scaled_value_and_grad(loss, has_aux=True, loss_id=loss_id, wrt=wrt)
        (value, _), grads = fn(state, arguments["variables"], arguments["args"])
        return value, grads.tree

    arguments = {"variables": loss.before, "args": loss.others}
    return locate_in(both, optimizer.amp_state(models), arguments, loss_id)
