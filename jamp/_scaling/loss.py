"""The loss times its scale: checks of the loss, and the gradients of the product."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from jamp._autocast.reduction import summed_in_float32
from jamp._core.dtypes import HALF_DTYPES, is_differentiable
from jamp._core.layout import Layout
from jamp._core.show import format_shapes, short_repr
from jamp._core.tracers import depends_on
from jamp._core.tree import all_finite
from jamp._core.warnings import PrecisionWarning, warn
from jamp._scaling.mapped_axis import alike
from jamp._scaling.rules import (
    HasLossScales,
    LossScaleRule,
    LossScaleState,
    check_state,
    current_scale,
    unscale_tree,
)
from jamp._scaling.unscaled import nan_unless, origin_of
from pallas_kernels.layouts import row_major_on_cuda

_UNSCALED = (
    "jamp.unscale got gradients that jamp.scaled_grad or jamp.unscale has already "
    "divided by the loss scale. Delete the call of jamp.unscale."
)
_CONSTANT = (
    "The loss does not depend on the params that jamp passed to loss_fn, so all "
    "gradients are zero. Compute it from the first argument of loss_fn, and not from "
    "`state.params` or a model outside."
)


def scale_loss(loss: Array, state: HasLossScales, loss_id: int = 0) -> Float[Array, ""]:
    """Multiplies a loss by the loss scale in float32, for your own `jax.grad`.

    `unscale` does not see the loss. If the loss is NaN, and `abs`, `max`, `where` or
    `clip` makes the gradients finite, the step is not skipped. `scaled_value_and_grad`
    skips it.

    Args:
        loss: a float scalar, not yet scaled. `scaled_value_and_grad` scales its loss
            itself.
        state: an AmpState.
        loss_id: which of the state's loss scales to use.

    Returns:
        The scaled loss, shape (), float32.

    Raises:
        TypeError: the loss is not a float scalar.
        IndexError: `loss_id` is out of range.

    >>> import jax, jax.numpy as jnp, jamp, optax
    >>> state = jamp.initialize(
    ...     jnp.ones(2), optax.sgd(1.0), "O2", loss_scale=4, verbosity=0
    ... )
    >>> loss_fn = lambda w: scale_loss(w.sum(dtype="float32"), state)
    >>> grads = jax.grad(loss_fn)(state.params)
    >>> print(grads, jamp.unscale(grads, state))
    [4. 4.] [1. 1.]
    """
    check_state(state, "jamp.scale_loss(loss, state)")
    rule, scale_state = find_loss_scale(state, loss_id)
    return rule.scale_loss(checked_loss(loss)[0], scale_state)


def unscale(grads: PyTree, state: HasLossScales, loss_id: int = 0) -> PyTree:
    """Divides the gradients of a loss from `scale_loss` by the scale, in float32.

    If a gradient is not finite, all become NaN, as in `scaled_value_and_grad`. With a
    static scale, gradients are not checked.

    Args:
        grads: a tree of scaled gradients. jamp refuses leaves that it unscaled, but
            does not recognize values computed from them, such as a mean.
        state: the AmpState that scaled the loss, before it is updated.
        loss_id: which of the state's loss scales was used.

    Returns:
        The tree in float32.

    Raises:
        TypeError: `state` is not an AmpState.
        IndexError: `loss_id` is out of range.
        ValueError: jamp has already unscaled the gradients.
    """
    check_state(state, "jamp.unscale(grads, state)")
    rule, scale_state = find_loss_scale(state, loss_id)
    layout, leaves = Layout.of(grads)
    raw = layout.pick(leaves)
    if origin_of(raw) is not None:
        raise ValueError(_UNSCALED)
    scale = current_scale(rule, scale_state)
    divided = unscale_tree(raw, scale)
    finite = all_finite(divided) if rule.check else None
    unscaled = nan_unless(finite, divided, raw, scale, loss_id)
    return layout.structure.unflatten(layout.fill(leaves, unscaled))


def find_loss_scale(
    state: HasLossScales, loss_id: int
) -> tuple[LossScaleRule, LossScaleState]:
    """Returns the rule and the state of a loss scale."""
    count = len(state.loss_scale_rules)
    try:
        index = operator.index(loss_id)
    except TypeError:
        raise TypeError(f"loss_id must be an int, got {short_repr(loss_id)}.") from None
    if isinstance(loss_id, bool) or index not in range(count):
        raise IndexError(
            f"loss_id={loss_id!r} is out of range: the state has {count} loss "
            "scale(s). Pass num_losses to jamp.initialize."
        )
    return state.loss_scale_rules[index], state.loss_scales[index]


def checked_loss(out: Any, has_aux: bool = False) -> tuple[Array, Any]:
    """Returns the loss in float32 and aux; raises unless the loss is a float scalar."""
    loss, aux = out, None
    if has_aux:
        if not (isinstance(out, tuple) and len(out) == 2):
            raise TypeError(
                "With has_aux=True the loss function must return (loss, aux), got "
                f"{out!r}."
            )
        loss, aux = out
    if isinstance(loss, tuple):
        raise TypeError(
            "The loss function returned a tuple: pass has_aux=True for (loss, aux)."
        )
    if not is_differentiable(loss) or jnp.iscomplexobj(loss) or jnp.shape(loss) != ():
        is_array = hasattr(loss, "dtype")
        given = format_shapes((loss,)) if is_array else type(loss).__name__
        raise TypeError(
            f"The loss must be a float scalar, got {given.rstrip(',')}. Reduce it, "
            "with `.mean()` for example."
        )
    loss = jnp.asarray(loss)
    if loss.dtype in HALF_DTYPES:
        warn(
            f"The loss is {loss.dtype}. Its value is rounded, and its gradient is the "
            "loss scale, which overflows float16 above 65504. Compute the loss in "
            "float32, from `logits.astype(jnp.float32)`.",
            PrecisionWarning,
        )
    return loss.astype(jnp.float32), aux


def grad_of_scaled(
    loss_fn: Callable[..., Any],
    params: PyTree,
    scale: Float[Array, ""],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    has_aux: bool = False,
    *,
    checks: bool,
) -> tuple[Any, PyTree]:
    """Returns the loss, or `(loss, aux)`, and the gradients of the loss times a scale.

    `fp16_utils` uses it. If `checks`, a loss that is not finite makes all gradients
    NaN.
    """
    layout, leaves = Layout.of(params)

    def run(floats):
        every = layout.fill(floats, layout.pick(leaves, "fixed"), "fixed")
        return loss_fn(layout.structure.unflatten(every), *args, **kwargs)

    floats = layout.without_fixed(leaves)
    value, grads = grad_of_product(run, floats, scale, has_aux)
    if checks:
        finite = lax.is_finite(value[0])
        grads = jax.tree.map(
            lambda g: g * jnp.where(alike(finite, g), 1, np.nan).astype(g.dtype), grads
        )
    return (value if has_aux else value[0]), layout.structure.unflatten(grads)


def grad_of_product(
    loss_fn: Callable[[PyTree], Any],
    trained: PyTree,
    scale: Float[Array, ""],
    has_aux: bool,
    in_float32: bool = False,
) -> tuple[tuple[Array, Any], PyTree]:
    """Returns `((loss, aux), grads)`, where `grads` are scaled.

    They have the dtypes of the params. With `in_float32`, sums and results are float32.
    """

    def scaled_loss(trained):
        loss, aux = checked_loss(loss_fn(trained), has_aux)
        leaves = jax.tree.leaves(trained)
        if leaves and not depends_on(loss, leaves):
            warn(_CONSTANT, UserWarning)
        return loss * scale, (loss, aux)

    grad = jax.grad(scaled_loss, has_aux=True)
    grads, value = (summed_in_float32(grad) if in_float32 else grad)(trained)
    return value, row_major_on_cuda(grads)
