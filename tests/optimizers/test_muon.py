"""The recipe for Muon: Newton-Schulz iterations in bfloat16 by autocast."""

import jax
import jax.numpy as jnp
import numpy as np
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


@pytest.mark.standard_promotion
def test_the_loss_follows_float32s():
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(256, 16)), jnp.float32)
    y = jnp.asarray(np.sin(x @ rng.normal(size=(16, 4))), jnp.float32)
    shapes = (16, 64), (64, 64), (64, 4)
    params = [rng.normal(size=s, scale=s[0] ** -0.5).astype(np.float32) for s in shapes]

    def loss_of(params):
        return jnp.square(
            jnp.tanh(jnp.tanh(x @ params[0]) @ params[1]) @ params[2] - y
        ).mean()

    def train(tx):
        def step(carry, _):
            params, state = carry
            loss, grads = jax.value_and_grad(loss_of)(params)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), loss

        begin = jax.tree.map(jnp.asarray, params)
        return jax.lax.scan(step, (begin, tx.init(begin)), length=300)[1]

    half, wide = np.asarray(train(IN_BFLOAT16)), np.asarray(train(MUON))
    assert wide[-1] < wide[0] / 100
    np.testing.assert_allclose(half[:100:10], wide[:100:10], rtol=0.02)
    np.testing.assert_allclose(half[-1], wide[-1], rtol=0.05)
