"""Test that O2 follows the same training written by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.support import by_hand, models
from tests.support.bits import assert_same_bits
from tests.support.by_jamp import amp_init, amp_step
from tests.support.states import with_scales

# optax and models with `dtype=` promote, as in users' programs.
pytestmark = [pytest.mark.slow, pytest.mark.standard_promotion]

TX = optax.adam(1e-2)
STEPS = 8
# Otherwise, LLVM contracts a * b + c in one program only, which saves a rounding.
EXACT = {"xla_backend_optimization_level": 0}
MODEL = models.CNN(features=(8,), depth=1)


def setup(level: str) -> tuple[Any, Any, Any]:
    """Returns the variables, jamp's state and the batches."""
    rng = np.random.default_rng(0)
    images = rng.normal(size=(STEPS, 4, 8, 8, 3)).astype(np.float32)
    data = list(zip(images, rng.integers(10, size=(STEPS, 4)), strict=True))
    variables = jax.jit(MODEL.init)(jax.random.key(0), images[0])
    return variables, amp_init(MODEL, variables, TX, level), data


def train(step: Any, state: Any, data: Any) -> tuple[Any, list[float]]:
    step, losses = jax.jit(step, compiler_options=EXACT), []
    for inputs, labels in data:
        state, loss = step(state, inputs, labels)
        losses.append(float(loss))
    return state, losses


def test_o2_is_o2_by_hand():
    variables, state, data = setup("O2")
    mixed = by_hand.mixed_init(variables, TX, jnp.float16)
    # This scale overflows, so the first steps are skipped.
    state = with_scales(state, 2.0**21)
    mixed = mixed._replace(scale=state.loss_scale)

    step = by_hand.mixed_step(MODEL.clone(dtype=jnp.float16), TX, jnp.float16)
    mixed, expected = train(step, mixed, data)
    state, losses = train(amp_step, state, data)
    assert 0 < mixed.skipped_steps < STEPS
    # jamp rounds a chain of elementwise operations once, the hand-written step often.
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    half, masters = state.params, jamp.master_params(state)
    assert_same_bits(half, jax.tree.map(lambda m, p: m.astype(p.dtype), masters, half))
    pairs = (masters, mixed.masters), (state.batch_stats, mixed.batch_stats)
    for ours, theirs in pairs:
        # Adam turns rounding errors into whole steps, so compare whole trees.
        far = jax.tree.map(jnp.subtract, ours, theirs)
        assert optax.tree.norm(far) <= 0.05 * optax.tree.norm(theirs)
    assert_same_bits(state.loss_scale, mixed.scale)
    for name in ("skipped_steps", "step"):
        assert_same_bits(getattr(state, name), getattr(mixed, name))
