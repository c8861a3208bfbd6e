"""What a loss function may return; gradients of it times a scale."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Float, PyTree

from jamp._core.dtypes import HALF_DTYPES, is_differentiable
from jamp._core.tree import differentiable, merge
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling.layout import row_major_on_cuda


def split_aux(out: Any, has_aux: bool) -> tuple[Array, Any]:
    """The loss, checked, and aux."""
    if not has_aux:
        return checked_loss(out), None
    if not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"With has_aux=True the loss function must return (loss, aux), got {out!r}."
        )
    return checked_loss(out[0]), out[1]


def checked_loss(loss: ArrayLike) -> Array:
    """The loss in float32, if it is a float scalar."""
    if isinstance(loss, tuple):
        raise TypeError(
            "The loss function returned a tuple: pass has_aux=True for (loss, aux)."
        )
    if not is_differentiable(loss) or jnp.iscomplexobj(loss) or jnp.shape(loss) != ():
        given = (
            f"{jnp.result_type(loss)}{list(jnp.shape(loss))}"
            if hasattr(loss, "dtype")
            else type(loss).__name__
        )
        raise TypeError(
            f"The loss must be a float scalar, got {given}. Reduce it, with `.mean()` "
            "for example."
        )
    loss = jnp.asarray(loss)
    if loss.dtype in HALF_DTYPES:
        warn(
            f"The loss is {loss.dtype}: its gradient, the loss scale, overflows "
            "float16 above 65504, and the value is rounded. Compute the loss in "
            "float32: `logits.astype(jnp.float32)` before it.",
            PrecisionWarning,
        )
    return loss.astype(jnp.float32)


def grad_of_scaled(
    loss_fn: Callable[..., Any],
    params: PyTree,
    scale: Float[Array, ""],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_aux: bool = False,
) -> tuple[Any, PyTree]:
    """The loss, or `(loss, aux)`, and gradients of the loss times a scale.

    For apex's older interfaces, without a policy. The product is float32.
    """

    def scaled_loss(trained):
        out = loss_fn(merge(trained, params), *args, **kwargs)
        loss, aux = split_aux(out, has_aux)
        return loss * scale, ((loss, aux) if has_aux else loss)

    grads, value = jax.grad(scaled_loss, has_aux=True)(differentiable(params))
    return value, row_major_on_cuda(grads)
