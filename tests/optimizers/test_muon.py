"""Test the recipe for Muon, whose Newton-Schulz iterations autocast to bfloat16."""

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import jamp
from benchmarks import h200

MUON = optax.contrib.muon(optax.cosine_decay_schedule(0.02, 300))
IN_BFLOAT16 = optax.GradientTransformation(
    MUON.init, jamp.autocast(MUON.update, "bfloat16")
)


@pytest.mark.h200
@pytest.mark.standard_promotion
def test_matmuls_in_bfloat16_move_fewer_bytes():
    params = {"kernel": jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}

    def compiled(tx):
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.eval_shape(tx.init, params)
        return h200.compile_step(step, params, state, params, donate=(0, 1))

    half, wide = compiled(IN_BFLOAT16), compiled(MUON)
    assert half.products == {("bf16", "bf16"): 15}
    assert half.traffic < 0.78 * wide.traffic
