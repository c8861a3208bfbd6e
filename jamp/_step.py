"""One optimizer step of one group, in float32, rounded to the params' dtypes."""

from typing import Any

import jax
import optax
from jaxtyping import Array, Bool, PyTree

from jamp._dtypes import cast, is_castable, widen
from jamp._master_weights import (
    MasterWeights,
    MasterWeightsState,
    full_masters,
    init_masters,
    keep_holes,
    masters_for,
)
from jamp._tree import differentiable, join_overwrite, merge, select, split_overwrite


def init_optimizer(tx: Any, originals: PyTree, params: PyTree) -> Any:
    """The optimizer's state, from the user's params rather than from rounded ones."""
    if tx is None:
        return None
    originals, params = _trained(originals), _trained(params)
    if isinstance(tx, MasterWeights):
        return init_masters(tx.inner, masters_for(originals, params), params)
    return tx.init(jax.tree.map(widen, params))


def step(
    tx: Any,
    grads: PyTree,
    overwrite: Any,
    opt_state: Any,
    params: PyTree,
    clean: Bool[Array, ""],
    update_args: dict[str, Any],
) -> tuple[PyTree, Any]:
    """Steps the masters, or where there are none the params, widened for the step.

    Moments of half params are in float32 too: in float16 the second would underflow,
    and an epsilon of 1e-8 would be zero.

    Args:
        tx: a transformation, maybe wrapped in `master_weights`.
        grads: float32 gradients.
        overwrite: new values of Flax's `_overwrite_with_gradient`, or None.
        opt_state: its state.
        params: the whole params, leaves that are no floats included.
        clean: whether to step; if not, all bits stay. By select: a `lax.cond` would
            spare the work of a rare skip, and cost 40 % more traffic always.
        update_args: extra arguments for `tx.update`.

    Returns:
        New params and optimizer state.
    """
    trained = _trained(params)
    if isinstance(tx, MasterWeights):
        masters = full_masters(opt_state.masters, trained)
        inner, inner_state = tx.inner, opt_state.inner_state
    else:
        masters = jax.tree.map(widen, trained)
        inner, inner_state = optax.with_extra_args_support(tx), opt_state
    updates, new_state = inner.update(grads, inner_state, masters, **update_args)
    stepped = optax.apply_updates(masters, updates)
    new_state = select(clean, new_state, inner_state)
    if isinstance(tx, MasterWeights):
        # Select, then round: the other way round would read the old half params too.
        masters = select(clean, stepped, masters)
        new_state = MasterWeightsState(
            keep_holes(masters, opt_state.masters), new_state
        )
        new = jax.tree.map(_round, masters, trained)
    else:
        new = select(clean, jax.tree.map(_round, stepped, trained), trained)
    whole, old_overwrite = split_overwrite(params)
    overwrite = select(clean, overwrite, old_overwrite)
    return join_overwrite(merge(new, whole), overwrite, params), new_state


def widened(tx: Any, opt_state: Any, params: PyTree) -> PyTree:
    """The params in float32: the masters where `tx` keeps some."""
    whole, overwrite = split_overwrite(params)
    if isinstance(tx, MasterWeights):
        whole = merge(full_masters(opt_state.masters, differentiable(whole)), whole)
    return join_overwrite(jax.tree.map(widen, whole), overwrite, params)


def _trained(params: PyTree) -> PyTree:
    return differentiable(split_overwrite(params)[0])


def _round(master: Array, param: Array) -> Array:
    return cast(master, param.dtype) if is_castable(param) else master
