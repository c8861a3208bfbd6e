"""One optimizer step of one group, in float32, rounded to the params' dtypes."""

from typing import Any

import jax
import optax
from jaxtyping import Array, PyTree

from jamp._dtypes import cast, is_castable, widen
from jamp._master_weights import (
    MasterWeights,
    full_masters,
    init_masters,
    masters_for,
    step_masters,
)
from jamp._tree import differentiable, join_overwrite, merge, split_overwrite


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
        update_args: extra arguments for `tx.update`.

    Returns:
        New params and optimizer state.
    """
    trained = _trained(params)
    if isinstance(tx, MasterWeights):
        _, new, opt_state = step_masters(
            tx.inner, grads, opt_state, trained, update_args
        )
    else:
        wide = jax.tree.map(widen, trained)
        tx = optax.with_extra_args_support(tx)
        updates, opt_state = tx.update(grads, opt_state, wide, **update_args)
        new = optax.apply_updates(wide, updates)
    new = jax.tree.map(_round, new, trained)
    return join_overwrite(merge(new, split_overwrite(params)[0]), overwrite), opt_state


def widened(tx: Any, opt_state: Any, params: PyTree) -> PyTree:
    """The params in float32: the masters where `tx` keeps some."""
    whole, overwrite = split_overwrite(params)
    if isinstance(tx, MasterWeights):
        whole = merge(full_masters(opt_state.masters, differentiable(whole)), whole)
    return join_overwrite(jax.tree.map(widen, whole), overwrite)


def _trained(params: PyTree) -> PyTree:
    return differentiable(split_overwrite(params)[0])


def _round(master: Array, param: Array) -> Array:
    return cast(master, param.dtype) if is_castable(param) else master
