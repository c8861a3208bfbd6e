"""Time of a training step of a small transformer: Flax alone, then each level."""

import jax
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jamp
from tests.models import Transformer

MODEL = Transformer(vocabulary=256, width=128, heads=4, depth=2, length=64)
TOKENS = np.random.default_rng(0).integers(256, size=(8, MODEL.length), dtype=np.int32)


def loss_fn(params, apply_fn):
    logits = apply_fn({"params": params}, TOKENS)[:, :-1]
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, TOKENS[:, 1:])
    return losses.mean()


def flax_step(state):
    loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn)
    return state.apply_gradients(grads=grads), loss


def amp_step(state):
    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, state.apply_fn)
    return state.apply_gradients(grads=grads), loss


def start(level):
    params, tx = MODEL.init(jax.random.key(0), TOKENS)["params"], optax.adam(1e-3)
    if level == "flax":
        return TrainState.create(apply_fn=MODEL.apply, params=params, tx=tx), flax_step
    state = jamp.initialize(params, tx, level, apply_fn=MODEL.apply, verbosity=0)
    return state, amp_step


@pytest.mark.parametrize("level", ["flax", "O0", "O1", "O2", "O3", "O4", "O5"])
def test_train_step(benchmark, level):
    state, step = start(level)
    step = jax.jit(step, donate_argnums=0)

    def run():
        nonlocal state
        state, loss = step(state)
        return loss.block_until_ready()

    first = run()
    benchmark(run)
    assert run() < first
