"""One optimizer step of one group, in float32, rounded to the params' dtypes."""

from typing import Any

import jax
import optax
from jaxtyping import Array, Bool, Float, PyTree

from jamp._core.dtypes import cast, is_castable, widen
from jamp._core.tree import (
    differentiable,
    join_overwrite,
    merge,
    select,
    split_overwrite,
    trained_params,
)
from jamp._scaling.rules import unscale_tree
from jamp._state.placement import moments_like_params
from jamp.optimizers import FusedTransformation
from jamp.optimizers._masters import (
    MasterWeights,
    MasterWeightsState,
    from_weights,
    full_masters,
    fused_inside,
    init_masters,
    masters_for,
    split_masters,
    weights_for,
    write_back,
)
from pallas_kernels import Weight


def init_optimizer(tx: Any, originals: PyTree, params: PyTree) -> tuple[PyTree, Any]:
    """Params and optimizer state, from the user's params rather than rounded ones."""
    if tx is None:
        return params, None
    if not isinstance(tx, MasterWeights):
        trained = trained_params(params)
        opt_state = tx.init(jax.tree.map(widen, trained))
        return params, moments_like_params(opt_state, trained)
    params, masters = with_masters(tx, originals, params)
    trained = trained_params(params)
    masters, inner = init_masters(tx.inner, masters, trained)
    inner = moments_like_params(inner, trained)
    return params, MasterWeightsState(masters, inner)


def with_masters(tx: MasterWeights, originals: PyTree, params: PyTree) -> Any:
    """Params as they belong to the masters of `originals`, and those as stored."""
    originals, trained = trained_params(originals), trained_params(params)
    if not tx.store_remainder:
        return params, masters_for(originals, trained)
    trained, masters = split_masters(originals, trained)
    whole, overwrite = split_overwrite(params)
    return join_overwrite(merge(trained, whole), overwrite, params), masters


def step(
    tx: Any,
    grads: PyTree,
    overwrite: Any,
    grad_scale: Float[Array, ""] | None,
    opt_state: Any,
    params: PyTree,
    clean: Bool[Array, ""] | None,
    update_args: dict[str, Any],
) -> tuple[PyTree, Any]:
    """Steps the masters, or where there are none the params, widened for the step.

    A fused optimizer does so in one pass over each leaf.

    Moments of half params are in float32 too: in float16 the second would underflow,
    and an epsilon of 1e-8 would be zero.

    Args:
        tx: a transformation, maybe wrapped in `master_weights`.
        grads: gradients, times `grad_scale`.
        overwrite: new values of Flax's `_overwrite_with_gradient`, or None.
        grad_scale: what to divide the gradients by; None for 1.
        opt_state: its state.
        params: the whole params, leaves that are no floats included.
        clean: whether to step; if not, all bits stay. By select: a `lax.cond` would
            spare the work of a rare skip, and cost 40 % more traffic always. None for
            always.
        update_args: extra arguments for `tx.update`.

    Returns:
        New params and optimizer state.
    """
    trained = trained_params(params)
    fused = fused_inside(tx)
    if fused is not None:
        flag = None if clean is None else ~clean
        new, new_state = _step_fused(fused, grads, grad_scale, opt_state, trained, flag)
    else:
        grads = grads if grad_scale is None else unscale_tree(grads, grad_scale)
        new, new_state = _step_optax(tx, grads, opt_state, trained, clean, update_args)
    whole, old_overwrite = split_overwrite(params)
    overwrite = _choose(clean, overwrite, old_overwrite)
    return join_overwrite(merge(new, whole), overwrite, params), new_state


def _step_fused(
    fused: FusedTransformation,
    grads: PyTree,
    grad_scale: Any,
    opt_state: Any,
    params: PyTree,
    found_inf: Any,
) -> tuple[PyTree, Any]:
    has_masters = isinstance(opt_state, MasterWeightsState)
    if has_masters:
        weights, state = weights_for(opt_state.masters, params), opt_state.inner_state
    else:
        weights, state = jax.tree.map(Weight, params), opt_state
    weights, state = fused.apply(
        grads, state, weights, grad_scale=grad_scale, found_inf=found_inf
    )
    params, masters = from_weights(weights)
    return params, MasterWeightsState(masters, state) if has_masters else state


def _step_optax(
    tx: Any,
    grads: PyTree,
    opt_state: Any,
    params: PyTree,
    clean: Any,
    update_args: dict[str, Any],
) -> tuple[PyTree, Any]:
    has_masters = isinstance(tx, MasterWeights)
    if has_masters:
        weights = full_masters(opt_state.masters, params)
        inner, state = tx.inner, opt_state.inner_state
    else:
        weights = jax.tree.map(widen, params)
        inner, state = tx, opt_state
    inner = optax.with_extra_args_support(inner)
    updates, new_state = inner.update(grads, state, weights, **update_args)
    stepped = optax.apply_updates(weights, updates)
    new_state = _choose(clean, new_state, state)
    if has_masters:
        new, masters = write_back(stepped, opt_state.masters, params, clean)
        return new, MasterWeightsState(masters, new_state)
    return _choose(clean, jax.tree.map(_round, stepped, params), params), new_state


def _choose[T](clean: Bool[Array, ""] | None, new: T, old: T) -> T:
    return new if clean is None else select(clean, new, old)


def widened(tx: Any, opt_state: Any, params: PyTree) -> PyTree:
    """The params in float32: the masters where `tx` keeps some."""
    whole, overwrite = split_overwrite(params)
    if isinstance(tx, MasterWeights):
        whole = merge(full_masters(opt_state.masters, differentiable(whole)), whole)
    return join_overwrite(jax.tree.map(widen, whole), overwrite, params)


def _round(master: Array, param: Array) -> Array:
    return cast(master, param.dtype) if is_castable(param) else master
