"""fp16_utils: LossScaler and DynamicLossScaler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jamp import fp16_utils as fu
from tests.bits import assert_same_bits
from tests.fp16 import F16, F32
from tests.oracles import fp16_optimizer as oracle


def test_a_static_scaler_never_moves():
    scaler = fu.LossScaler(128.0)
    state = scaler.init()
    assert not scaler.has_overflow({"w": jnp.asarray([np.inf], F16)})
    assert_same_bits(scaler.update_scale(state, jnp.asarray(True)), state)
    assert (scaler.loss_scale(state), fu.LossScaler().init().cur_scale) == (128, 1)
    assert hash(scaler) == hash(fu.LossScaler(128.0))


@pytest.mark.parametrize(
    "kwargs, steps, rate",
    [
        ({}, 6000, 0.001),
        ({"init_scale": 8.0, "scale_window": 3}, 2000, 0.3),
        ({"init_scale": 2.0**16, "scale_factor": 4.0, "scale_window": 5}, 2000, 0.15),
        ({"init_scale": 0.25, "scale_window": 1}, 40, 0.4),
    ],
)
def test_a_dynamic_scaler_follows_apex_through_random_overflows(kwargs, steps, rate):
    scaler, model = fu.DynamicLossScaler(**kwargs), oracle.DynamicLossScaler(**kwargs)
    flags = np.random.default_rng(1).random(steps) < rate

    def step(state, flag):
        return scaler.update_scale(state, flag), state

    last, before = jax.jit(lambda s, f: lax.scan(step, s, f))(scaler.init(), flags)
    expected = [model.state]
    for flag in flags:
        model.update_scale(bool(flag))
        expected.append(model.state)
    for i, (seen, at_the_end) in enumerate(zip(before, last, strict=True)):
        wanted = [state[i] for state in expected]
        np.testing.assert_array_equal(np.append(seen, at_the_end), wanted)
    assert [x.dtype for x in last] == [F32, jnp.int32, jnp.int32]
    assert len({scale for scale, *_ in expected}) > 2


@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
def test_has_overflow_looks_at_every_element(bad):
    scaler = fu.DynamicLossScaler()
    # The sum of the clean ones is beyond float16, and beyond float32.
    grads = {
        "h": jnp.full(8, 60000.0, F16),
        "w": jnp.full((2, 2), 3e38, F32).at[1, 0].set(3e38 if bad is None else bad),
        "none": None,
    }
    found = jax.jit(scaler.has_overflow)(grads)
    assert_same_bits(found, jnp.asarray(bad is not None))
    assert not scaler.has_overflow({})


@pytest.mark.parametrize("make", [fu.LossScaler, fu.DynamicLossScaler])
def test_backward_and_scale_gradient_multiply_by_the_scale(make):
    scaler = make(512.0)
    state, params = scaler.init(), {"w": jnp.asarray([1.0, 2.0], F16), "n": 3}

    def loss_fn(p, x):
        return (p["w"].astype(F32) * x).sum()

    x = jnp.asarray([0.5, 0.25], F32)
    loss, grads = jax.jit(lambda s: scaler.backward(s, loss_fn, params, x))(state)
    assert loss == 1.0
    assert_same_bits(grads["w"], jnp.asarray([256.0, 128.0], F16))
    scaled = scaler.scale_gradient(state, {"w": x, "b": None})
    assert_same_bits(scaled, {"w": jnp.asarray([256.0, 128.0]), "b": None})
