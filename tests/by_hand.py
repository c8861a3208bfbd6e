"""Training steps as people write them without jamp: plain fp32, and O2 by hand.

They are what the budgets compare jamp with, and a second derivation of what a step of O2
computes. They import nothing of jamp.
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


class PlainState(TrainState):
    """Flax's TrainState and the running statistics of BatchNorm."""

    batch_stats: PyTree


class MixedState(NamedTuple):
    """What O2 by hand keeps; `half` has None where the model consumes the master."""

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


def plain_init(model: Any, variables: PyTree, tx: Any) -> PlainState:
    return PlainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables.get("batch_stats", {}),
    )


def plain_step(state: PlainState, inputs: Array, labels: Array):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(variables, inputs, mutable=["batch_stats"])
        return loss_of(logits, labels), new.get("batch_stats", {})

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
        return None if "BatchNorm" in jax.tree_util.keystr(path) else master.astype(dtype)

    return jax.tree.map_with_path(cast, masters)


def _params(state: MixedState) -> PyTree:
    def choose(half, master):
        return master if half is None else half

    return jax.tree.map(choose, state.half, state.masters, is_leaf=lambda x: x is None)


def mixed_step(
    model: Any, tx: Any, dtype: DTypeLike, *, static_scale: float | None = None
) -> Callable:
    """O2 for `model`, which has `dtype`; without `static_scale` the scale is dynamic."""

    def gradients(state, scale, inputs, labels):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            logits, new = model.apply(variables, inputs, mutable=["batch_stats"])
            loss = loss_of(logits, labels)
            return loss * scale, (loss, new.get("batch_stats", {}))

        grads, (loss, stats) = jax.grad(loss_fn, has_aux=True)(_params(state))
        return loss, stats, grads

    def advance(state, scale, stats, grads) -> MixedState:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        updates, opt_state = tx.update(grads, state.opt_state, state.masters)
        masters = optax.apply_updates(state.masters, updates)
        return state._replace(
            step=state.step + 1,
            half=_halve(masters, dtype),
            masters=masters,
            opt_state=opt_state,
            batch_stats=stats,
        )

    def static_step(state: MixedState, inputs: Array, labels: Array):
        loss, stats, grads = gradients(state, static_scale, inputs, labels)
        return advance(state, static_scale, stats, grads), loss

    def dynamic_step(state: MixedState, inputs: Array, labels: Array):
        loss, stats, grads = gradients(state, state.scale, inputs, labels)
        finite = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(grads)]).all()
        new = advance(state, state.scale, stats, grads)
        new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, state)
        # Rounding the chosen masters again saves the read of the old half parameters.
        new = new._replace(half=_halve(new.masters, dtype))
        return _update_scale(new, finite), loss

    return dynamic_step if static_scale is None else static_step


def _update_scale(state: MixedState, finite: Array) -> MixedState:
    grows = finite & (state.unskipped + 1 == 2000)
    grown = jnp.minimum(state.scale * 2, 2.0**24)
    return state._replace(
        scale=jnp.where(finite, jnp.where(grows, grown, state.scale), state.scale / 2),
        unskipped=jnp.where(finite & ~grows, state.unskipped + 1, 0),
        skipped_steps=state.skipped_steps + ~finite,
    )
