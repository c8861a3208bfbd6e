"""Training steps without jamp: plain float32, and O2 by hand.

Tests compare jamp's bytes and results with these steps, which do not import jamp.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState
from jax import Array
from jax.typing import DTypeLike

type PyTree = Any

WINDOW = 2000  # clean steps before the scale doubles


class PlainState(TrainState):
    """Flax's TrainState and the running statistics of BatchNorm."""

    batch_stats: PyTree


class MixedState(NamedTuple):
    """The state of O2 by hand; `half` has None where the model reads the master."""

    step: Array
    half: PyTree
    masters: PyTree
    opt_state: PyTree
    batch_stats: PyTree
    scale: Array
    unskipped: Array
    skipped_steps: Array


def loss_of(logits: Array, labels: Array) -> Array:
    losses = optax.softmax_cross_entropy_with_integer_labels
    return losses(logits.astype(jnp.float32), labels).mean()


def with_stats(
    apply_fn: Callable, stats: PyTree, inputs: Array, labels: Array
) -> Callable:
    """Returns `params -> (loss, new statistics)`."""

    def loss_fn(params):
        variables = {"params": params, "batch_stats": stats}
        logits, new = apply_fn(variables, inputs, mutable=["batch_stats"])
        return loss_of(logits, labels), new.get("batch_stats", {})

    return loss_fn


def plain_init(model: Any, variables: PyTree, tx: Any) -> PlainState:
    return PlainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables.get("batch_stats", {}),
    )


def plain_step(state: PlainState, inputs: Array, labels: Array):
    loss_fn = with_stats(state.apply_fn, state.batch_stats, inputs, labels)
    (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss


def mixed_init(variables: PyTree, tx: Any, dtype: DTypeLike) -> MixedState:
    masters = variables["params"]
    return MixedState(
        step=jnp.int32(0),
        half=_halve(masters, dtype),
        masters=masters,
        opt_state=tx.init(masters),
        batch_stats=variables.get("batch_stats", {}),
        scale=jnp.float32(2.0**16),
        unskipped=jnp.int32(0),
        skipped_steps=jnp.int32(0),
    )


def _halve(masters: PyTree, dtype: DTypeLike) -> PyTree:
    def cast(path, master):
        is_kept = "BatchNorm" in jax.tree_util.keystr(path)
        return None if is_kept else master.astype(dtype)

    return jax.tree.map_with_path(cast, masters)


def model_params(state: MixedState) -> PyTree:
    """Returns the model's params: half params, and masters without a half param."""

    def choose(half, master):
        return master if half is None else half

    return jax.tree.map(choose, state.half, state.masters, is_leaf=lambda x: x is None)


def mixed_step(model: Any, tx: Any, dtype: DTypeLike) -> Callable:
    """Returns an O2 step for a model in `dtype`, with a dynamic scale and a skip."""

    def step(state: MixedState, inputs: Array, labels: Array):
        loss_fn = with_stats(model.apply, state.batch_stats, inputs, labels)
        return scaled_update(state, loss_fn, tx, dtype)

    return step


def scaled_update(state: MixedState, loss_fn: Callable, tx: Any, dtype: DTypeLike):
    """Returns the state after a step with a dynamic scale, and the loss.

    `loss_fn` takes params, and returns the loss and new statistics.
    """

    def scaled_loss(params):
        loss, stats = loss_fn(params)
        return loss * state.scale, (loss, stats)

    grads, (loss, stats) = jax.grad(scaled_loss, has_aux=True)(model_params(state))
    finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
    grads = jax.tree.map(lambda g: g.astype(jnp.float32) / state.scale, grads)
    new = _updated(state, grads, stats, tx)
    new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, state)
    # Rounding the selected masters saves a read of the old half params.
    new = new._replace(half=_halve(new.masters, dtype))
    return _update_scale(new, finite), loss


def unscaled_update(state: MixedState, loss_fn: Callable, tx: Any, dtype: DTypeLike):
    """Returns the same without a scale, as in O5 by hand."""
    grad = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, stats), grads = grad(model_params(state))
    grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    new = _updated(state, grads, stats, tx)
    return new._replace(half=_halve(new.masters, dtype)), loss


def _updated(state: MixedState, grads: PyTree, stats: PyTree, tx: Any) -> MixedState:
    updates, opt_state = tx.update(grads, state.opt_state, state.masters)
    return state._replace(
        step=state.step + 1,
        masters=optax.apply_updates(state.masters, updates),
        opt_state=opt_state,
        batch_stats=stats,
    )


def _update_scale(state: MixedState, finite: Array) -> MixedState:
    unskipped = jnp.where(finite, state.unskipped + 1, 0)
    grows = unskipped == WINDOW
    grown = jnp.minimum(state.scale * 2, 2.0**24)
    fallen = jnp.maximum(state.scale / 2, 2.0**-126)
    return state._replace(
        scale=jnp.where(grows, grown, jnp.where(finite, state.scale, fallen)),
        unskipped=jnp.where(grows, 0, unskipped),
        skipped_steps=state.skipped_steps + ~finite,
    )
