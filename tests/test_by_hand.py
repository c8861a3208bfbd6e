"""A step of jamp computes, bit for bit, what the same step written by hand computes."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests import by_hand, models
from tests.by_jamp import amp_init, amp_step

# optax, and a model with `dtype=`, promote; as in the programs that users write.
pytestmark = pytest.mark.standard_promotion

TX = optax.adam(1e-2)
STEPS = 8
# Otherwise LLVM contracts a * b + c here and not there, which rounds once less.
EXACT = {"xla_backend_optimization_level": 0}
MODELS = {
    "cnn": models.CNN(features=(8,), depth=2),
    "transformer": models.Transformer(16, width=16, heads=2, depth=1, length=8),
}


def batches(name: str) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    if name == "transformer":
        tokens = rng.integers(16, size=(STEPS, 4, 9))
        return [(t[:, :-1], t[:, 1:]) for t in tokens]
    images = rng.normal(size=(STEPS, 4, 8, 8, 3)).astype(np.float32)
    return list(zip(images, rng.integers(10, size=(STEPS, 4)), strict=True))


def train(step: Any, state: Any, data: Any) -> tuple[Any, list[float]]:
    step, losses = jax.jit(step, compiler_options=EXACT), []
    for inputs, labels in data:
        state, loss = step(state, inputs, labels)
        losses.append(float(loss))
    return state, losses


def setup(name: str, level: str) -> tuple[Any, Any]:
    model = MODELS[name]
    inputs, _ = batches(name)[0]
    variables = jax.jit(model.init)(jax.random.key(0), inputs)
    state = amp_init(model, variables, TX, level)
    return variables, state


def assert_same_bits(actual: Any, expected: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def test_o0_is_flax_train_state():
    variables, state = setup("cnn", "O0")
    plain = by_hand.plain_init(MODELS["cnn"], variables, TX)
    plain, expected = train(by_hand.plain_step, plain, batches("cnn"))
    state, losses = train(amp_step, state, batches("cnn"))
    assert losses == expected
    assert_same_bits(state.params, plain.params)
    assert_same_bits(state.opt_state, plain.opt_state)
    assert_same_bits(state.batch_stats, plain.batch_stats)


@pytest.mark.parametrize("name", MODELS)
def test_o2_is_o2_by_hand(name):
    variables, state = setup(name, "O2")
    mixed = by_hand.mixed_init(variables, TX, jnp.float16)
    # More than the gradients bear: the first steps are skipped.
    scale = jnp.float32(2.0**21)
    state = state.replace(loss_scales=(state.loss_scales[0]._replace(scale=scale),))
    mixed = mixed._replace(scale=scale)

    model = MODELS[name].clone(dtype=jnp.float16)
    step = by_hand.mixed_step(model, TX, jnp.float16)
    mixed, expected = train(step, mixed, batches(name))
    state, losses = train(amp_step, state, batches(name))
    assert 0 < mixed.skipped_steps < STEPS
    assert losses == expected
    assert_same_bits(state.params, by_hand.model_params(mixed))
    assert_same_bits(jamp.master_params(state), mixed.masters)
    assert_same_bits(state.opt_state.inner_state, mixed.opt_state)
    assert_same_bits(state.batch_stats, mixed.batch_stats)
    assert_same_bits(state.loss_scale, mixed.scale)
    assert_same_bits(state.skipped_steps, mixed.skipped_steps)
    assert_same_bits(state.step, mixed.step)
