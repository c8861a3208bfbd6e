"""The steps of `tests.support.by_hand` as people write them with jamp."""

from typing import Any

from jax import Array

import jamp
from tests.support.by_hand import with_stats

type PyTree = Any


def amp_init(model: Any, variables: PyTree, tx: Any, level: str) -> jamp.AmpState:
    return jamp.initialize(
        variables["params"],
        tx,
        level,
        apply_fn=model.apply,
        batch_stats=variables.get("batch_stats", {}),
        verbosity=0,
    )


def amp_step(state: Any, inputs: Array, labels: Array):
    loss_fn = with_stats(state.apply_fn, state.batch_stats, inputs, labels)
    grad = jamp.scaled_value_and_grad(loss_fn, has_aux=True)
    (loss, stats), grads = grad(state)
    return state.apply_gradients(grads=grads, batch_stats=stats), loss
