"""`jamp.diagnostics` for NNX models."""

from collections.abc import Callable
from typing import Any

from jamp._core.groups import Wrt
from jamp.diagnostics._explain import explain_step
from jamp.diagnostics._explanation import Explanation
from jamp.diagnostics._locate import locate_step
from jamp.diagnostics._location import Location
from jamp.diagnostics._numerics import Numerics, numerics_of_step, scale_of_step
from jamp.diagnostics._step import Call, step_of, with_aux
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
    given = models, optimizer, args, kwargs
    return locate_step(_call_of("locate", loss_fn, *given, loss_id, wrt))


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
        return explain_step(
            _call_of("explain", loss_fn, models, optimizer, args, kwargs)
        )

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
    call = _call_of("numerics", loss_fn, models, optimizer, args, kwargs)
    return numerics_of_step(call, scale)


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
    call = _call_of("recommend_scale", loss_fn, models, optimizer, args, kwargs)
    return scale_of_step(call)


def _call_of(
    name: str,
    loss_fn: Callable[..., Any],
    models: Models,
    optimizer: Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    loss_id: int = 0,
    wrt: Wrt = None,
) -> Call:
    """A step as a function of a state and of arguments, and these."""
    check_optimizer(optimizer, name, "(loss_fn, model, optimizer, ...)")
    loss = PureLoss(with_aux(loss_fn), True, models, optimizer, args, kwargs)
    step, state = step_of(loss, loss_id, wrt), optimizer.amp_state(models)
    arguments = {"variables": loss.before, "args": loss.others}
    call = lambda s, x: step(s, x["variables"], x["args"])  # noqa: E731
    return Call(call, state, arguments, loss_id)
