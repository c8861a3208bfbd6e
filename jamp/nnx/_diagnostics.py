"""`jamp.diagnostics` for NNX models."""

from collections.abc import Callable
from typing import Any

from jamp import diagnostics
from jamp._core.groups import Wrt
from jamp._state.amp_state import AmpState
from jamp.diagnostics import Explanation, Location, Numerics
from jamp.diagnostics._step import with_aux
from jamp.nnx._optimizer import Optimizer
from jamp.nnx._scaled_grad import PureLoss, check_optimizer
from jamp.nnx._variables import Models


def locate(
    loss_fn: Callable[..., Any],
    models: Models,
    optimizer: Optimizer,
    *args: Any,
    loss_id: int = 0,
    wrt: Wrt = None,
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
    loss, state = _pure("locate", loss_fn, models, optimizer, args, kwargs)
    options: Any = {"loss_id": loss_id, "wrt": wrt, "variables": loss.before}
    return diagnostics.locate(loss, state, *loss.others, **options)


def explain(loss_fn: Callable[..., Any]) -> Callable[..., Explanation]:
    """`jamp.explain(loss_fn)` of a step of `jamp.nnx`, forward and backward.

    Nothing is compiled and nothing runs; models and optimizer stay as they are.

    Args:
        loss_fn: `(model, *args, **kwargs) -> loss`, or `(loss, aux)`.

    Returns:
        `f(model, optimizer, *args, **kwargs)`, which returns an `Explanation`.

    Raises (when called):
        TypeError: `optimizer` is not of `jamp.nnx.initialize`.

    >>> import jamp.nnx, jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> model = nnx.Linear(8, 8, rngs=nnx.Rngs(0))
    >>> both = jamp.nnx.initialize(model, optax.sgd(1.0), "O5", verbosity=0)
    >>> explanation = jamp.nnx.explain(lambda model, x: model(x).mean())
    >>> explanation(*both, jnp.ones((8, 8))).half_share
    1.0
    """

    def explained(models: Models, optimizer: Optimizer, *args: Any, **kwargs: Any):
        check_optimizer(optimizer, "explain(loss_fn)")
        loss, state = _pure("explain", loss_fn, models, optimizer, args, kwargs)
        return diagnostics.explain(loss)(state, *loss.others, variables=loss.before)

    return explained


def numerics(
    loss_fn: Callable[..., Any],
    models: Models,
    optimizer: Optimizer,
    *args: Any,
    scale: float | None = None,
    **kwargs: Any,
) -> Numerics:
    """`jamp.diagnostics.numerics` for `jamp.nnx.scaled_value_and_grad(loss_fn)`.

    Models and optimizer stay as they are.

    Args:
        loss_fn, models, optimizer, *args, **kwargs: see `locate`.
        scale: see `jamp.diagnostics.numerics`.

    Returns:
        A `jamp.diagnostics.Numerics`: print it.

    Raises:
        TypeError: `optimizer` is not of `jamp.nnx.initialize`; arrays are traced.

    >>> import jamp.nnx, jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> model = nnx.Linear(1, 4, rngs=nnx.Rngs(0))
    >>> both = jamp.nnx.initialize(model, optax.sgd(1.0), "O0", verbosity=0)
    >>> x = jnp.array([1e-9, 1e-6, 1.0, 1e6])
    >>> report = numerics(lambda model, x: (model.bias * x).sum(), *both, x, scale=1.0)
    >>> report.gradients["bias"].losses["float16"]
    Loss(zero=1, subnormal=1, over=1)
    """
    loss, state = _pure("numerics", loss_fn, models, optimizer, args, kwargs)
    options: Any = {"scale": scale, "variables": loss.before}
    return diagnostics.numerics(loss, state, *loss.others, **options)


def recommend_scale(
    loss_fn: Callable[..., Any],
    models: Models,
    optimizer: Optimizer,
    *args: Any,
    **kwargs: Any,
) -> float:
    """`jamp.diagnostics.recommend_scale` for a loss of `jamp.nnx`.

    Args, errors: see `numerics`; FloatingPointError if no scale is safe.

    >>> import jamp.nnx, jax.numpy as jnp, optax
    >>> from flax import nnx
    >>> model = nnx.Linear(1, 4, rngs=nnx.Rngs(0))
    >>> both = jamp.nnx.initialize(model, optax.sgd(1.0), "O2", verbosity=0)
    >>> recommend_scale(lambda model: 100 * model.bias.sum(), *both)
    64.0
    """
    loss, state = _pure("recommend_scale", loss_fn, models, optimizer, args, kwargs)
    return diagnostics.recommend_scale(loss, state, *loss.others, variables=loss.before)


def _pure(
    name: str,
    loss_fn: Callable[..., Any],
    models: Models,
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[PureLoss, AmpState]:
    """A loss as a function of params and arrays, and the state of these params."""
    check_optimizer(optimizer, name, "(loss_fn, model, optimizer, ...)")
    loss = PureLoss(with_aux(loss_fn), True, models, optimizer, args, kwargs)
    return loss, optimizer.amp_state(models)
