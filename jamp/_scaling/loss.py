"""A loss times its scale: what a loss may be, and gradients of the product.

`scale_loss` and `unscale` are for people who call `jax.grad` themselves.
"""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float, PyTree

from jamp._autocast.reduction import summed_in_float32
from jamp._autocast.tracers import depends_on
from jamp._core.devices import moves_constants
from jamp._core.dtypes import HALF_DTYPES, is_differentiable
from jamp._core.show import brief
from jamp._core.tree import (
    all_finite,
    differentiable,
    merge,
    split_overwrite,
    with_trained,
)
from jamp._core.warnings import PrecisionWarning, warn
from jamp._policy.levels import Properties
from jamp._scaling.rules import (
    HasLossScales,
    LossScaleRule,
    LossScaleState,
    unscale_tree,
)
from jamp._scaling.unscaled import nan_unless, warn_of_float32_gradients

_CONSTANT = (
    "The loss does not depend on the params that loss_fn was called with: all "
    "gradients are zero. Let it read its first argument, and not `state.params` or a "
    "model from outside."
)


@moves_constants
def scale_loss(loss: Array, state: HasLossScales, loss_id: int = 0) -> Float[Array, ""]:
    """The float32 loss times a loss scale, for a `jax.grad` of your own.

    Args:
        loss: a float scalar.
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
    rule, scale_state = find_loss_scale(state, loss_id, "jamp.scale_loss(loss, state)")
    return rule.scale_loss(checked_loss(loss)[0], scale_state)


@moves_constants
def unscale(grads: PyTree, state: HasLossScales, loss_id: int = 0) -> PyTree:
    """Gradients of a loss from `scale_loss`, in float32, divided by the scale.

    If one of them is not finite, all are NaN, as of `scaled_value_and_grad`. A static
    scale does not look: inf stays inf.

    Args:
        grads: a tree of gradients.
        state: the AmpState that scaled the loss, before it is updated.
        loss_id: which of the state's loss scales was used.

    Returns:
        The tree in float32.

    Raises:
        TypeError: `state` is not an AmpState.
        IndexError: `loss_id` is out of range.
    """
    rule, scale_state = find_loss_scale(state, loss_id, "jamp.unscale(grads, state)")
    warn_of_float32_gradients(grads, state)
    raw, scale = split_overwrite(grads)[0], rule.current(scale_state)
    divided = unscale_tree(raw, scale)
    finite = all_finite(divided) if rule.checks else None
    return with_trained(grads, nan_unless(finite, divided, raw, scale, loss_id))


def find_loss_scale(
    state: Any, loss_id: int, call: str
) -> tuple[LossScaleRule, LossScaleState]:
    """The rule and the state of a loss scale; `call` is what the user wrote."""
    if not isinstance(getattr(state, "properties", None), Properties):
        raise TypeError(
            f"{call} takes the AmpState that `jamp.initialize` returned, got "
            f"{type(state).__name__}."
        )
    count = len(state.loss_scale_rules)
    try:
        index = operator.index(loss_id)
    except TypeError:
        raise TypeError(f"loss_id must be an int, got {brief(loss_id)}.") from None
    if isinstance(loss_id, bool) or index not in range(count):
        raise IndexError(
            f"loss_id={loss_id!r} is out of range: the state has {count} loss "
            "scale(s). Pass num_losses to jamp.initialize."
        )
    return state.loss_scale_rules[index], state.loss_scales[index]


def checked_loss(out: Any, has_aux: bool = False) -> tuple[Array, Any]:
    """The loss in float32, if it is a float scalar; and aux."""
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
    return loss.astype(jnp.float32), aux


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

    def run(trained):
        return loss_fn(merge(trained, params), *args, **kwargs)

    value, grads = grad_of_product(run, differentiable(params), scale, has_aux)
    return (value if has_aux else value[0]), grads


def grad_of_product(
    loss_fn: Callable[[PyTree], Any],
    trained: PyTree,
    scale: Float[Array, ""],
    has_aux: bool,
    in_float32: bool = False,
) -> tuple[tuple[Array, Any], PyTree]:
    """`((loss, aux), grads)`: the gradients are of the loss times a scale.

    In the dtypes of the params, or summed and left in float32.
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


def row_major_on_cuda(grads: PyTree) -> PyTree:
    """Asks XLA, on NVIDIA GPUs only, for row-major gradients of three axes and more.

    cuDNN writes the gradient of an HWIO kernel as OHWI. XLA then runs the optimizer in
    that layout, and transposes the params, masters, moments and half params back:
    compiled for an H200, 64 bytes per parameter of an Adam step instead of 32.
    Transposing the gradient alone is cheaper, and the finite check fuses into that.

    So are those of attention's kernels of three axes, which XLA would rather have the
    other way round. A learned position embedding is left alone: its gradient is a sum
    of activations, which XLA would lay out as is asked of it, and a ViT's with the
    batch innermost, so that a step moves 17 % more bytes. It shows by its first axis,
    of one.
    """
    leaves, structure = jax.tree.flatten(grads)
    indices = [
        i for i, x in enumerate(leaves) if x.ndim > 3 or x.ndim == 3 and x.shape[0] > 1
    ]
    chosen = [leaves[i] for i in indices]
    if chosen:
        chosen = jax.lax.platform_dependent(
            chosen, cuda=_row_major, default=lambda x: x
        )
    for i, x in zip(indices, chosen, strict=True):
        leaves[i] = x
    return structure.unflatten(leaves)


def _row_major(leaves: list[Array]) -> list[Array]:
    layouts = [Layout(major_to_minor=tuple(range(x.ndim))) for x in leaves]
    return list(map(with_layout_constraint, leaves, layouts))
