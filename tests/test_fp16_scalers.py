"""fp16_utils: LossScaler and DynamicLossScaler."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jamp import fp16_utils as fu
from tests.oracles import fp16_optimizer as oracle

F16, F32 = jnp.float16, jnp.float32


def test_a_static_scaler_never_moves():
    scaler, model = fu.LossScaler(128.0), oracle.LossScaler(128.0)
    state = scaler.init()
    for bad in (False, True):
        grads = {"w": jnp.asarray([np.inf if bad else 1.0], F16)}
        assert not scaler.has_overflow(grads)
        state = scaler.update_scale(state, bad)
        model.update_scale(bad)
        assert scaler.loss_scale(state) == model.scale == 128
    assert fu.LossScaler().loss_scale(fu.LossScaler().init()) == 1
    assert hash(scaler) == hash(fu.LossScaler(128.0))


def overflows(steps, seed, rate):
    return np.random.default_rng(seed).random(steps) < rate


@pytest.mark.parametrize(
    ("kwargs", "steps", "rate"),
    [
        ({}, 6000, 0.001),
        ({"init_scale": 8.0, "scale_window": 3}, 2000, 0.3),
        ({"init_scale": 2.0**16, "scale_factor": 4.0, "scale_window": 5}, 2000, 0.15),
        ({"init_scale": 0.25, "scale_window": 1}, 40, 0.4),
    ],
)
def test_a_dynamic_scaler_follows_apex_through_random_overflows(kwargs, steps, rate):
    scaler, model = fu.DynamicLossScaler(**kwargs), oracle.DynamicLossScaler(**kwargs)
    flags = overflows(steps, 1, rate)

    @jax.jit
    def run(state, flags):
        def step(state, flag):
            state = scaler.update_scale(state, flag)
            return state, state

        return lax.scan(step, state, flags)

    start = scaler.init()
    assert (start[0], start[1], start[2]) == (model.cur_scale, 0, -1)
    _, trajectory = run(start, flags)
    expected = []
    for flag in flags:
        model.update_scale(bool(flag))
        expected.append((model.cur_scale, model.cur_iter, model.last_overflow_iter))
    scales, iterations, lasts = zip(*expected, strict=True)
    np.testing.assert_array_equal(trajectory[0], np.float32(scales))
    np.testing.assert_array_equal(trajectory[1], iterations)
    np.testing.assert_array_equal(trajectory[2], lasts)
    assert [x.dtype for x in trajectory] == [F32, jnp.int32, jnp.int32]
    assert len(set(scales)) > 2


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
    assert found.dtype == bool
    assert bool(found) == (bad is not None)
    assert not scaler.has_overflow({})


@pytest.mark.parametrize("make", [fu.LossScaler, fu.DynamicLossScaler])
def test_backward_and_scale_gradient_multiply_by_the_scale(make):
    scaler = make(512.0)
    state = scaler.init()
    params = {"w": jnp.asarray([1.0, 2.0], F16)}

    def loss_fn(p, x):
        return (p["w"].astype(F32) * x).sum()

    x = jnp.asarray([0.5, 0.25], F32)
    loss, grads = jax.jit(lambda s: scaler.backward(s, loss_fn, params, x))(state)
    assert loss == 1.0
    assert grads["w"].dtype == F16
    assert grads["w"].tolist() == [256.0, 128.0]
    scaled = scaler.scale_gradient(state, {"w": x, "b": None})
    assert scaled["w"].tolist() == [256.0, 128.0]
    assert scaled["b"] is None


def test_scalers_refuse_impossible_numbers():
    for kwargs in ({"init_scale": 0.0}, {"scale_factor": 0.5}, {"scale_window": 0}):
        with pytest.raises(ValueError):
            fu.DynamicLossScaler(**kwargs)
    with pytest.raises(ValueError):
        fu.LossScaler(0.0)


def test_a_run_with_the_dynamic_scaler_skips_and_recovers():
    """The recipe of apex's docs: backward, has_overflow, update, step if clean."""
    scaler, model = fu.DynamicLossScaler(), oracle.DynamicLossScaler()
    state, w = scaler.init(), jnp.asarray([1.0], F16)

    @jax.jit
    def step(state, w):
        _, grads = scaler.backward(state, lambda w: w.astype(F32).sum(), w)
        overflow = scaler.has_overflow(grads)
        unscaled = grads.astype(F32) / scaler.loss_scale(state)
        moved = (w.astype(F32) - 0.125 * unscaled).astype(F16)
        return scaler.update_scale(state, overflow), jnp.where(overflow, w, moved)

    for _ in range(20):
        state, w = step(state, w)
        model.update_scale(model.cur_scale > 65504)
    # 2**32 to 2**15 takes 17 overflows.
    assert scaler.loss_scale(state) == model.cur_scale == 2.0**15
    assert w[0] == 1 - 3 * 0.125
