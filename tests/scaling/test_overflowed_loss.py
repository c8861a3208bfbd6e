"""Test that a loss that is not finite counts as an overflow."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jamp
from jamp import fp16_utils, optimizers as jo
from tests.support.states import all_nan, assert_skipped, make, wide

START = np.float32([1.0, -2.0, 0.5])
LEVELS = ("O0", "O1", "O2", "O5")
CHECKS = jamp.DynamicLossScale(8.0)


def hidden(params, x):
    """Returns a loss whose gradient is 1 for any x."""
    w = wide(params["w"])
    return jnp.maximum(jnp.abs(x + 0 * w.sum()), 0.0) + w.sum()


def begin(level, tx, rule=CHECKS):
    return make(level, {"w": START}, tx, loss_scale=rule)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("tx", [optax.sgd(1.0), jo.fused_adam(0.1)], ids=["", "fused"])
@pytest.mark.parametrize("level", LEVELS)
def test_all_gradients_are_nan_and_the_step_is_skipped(level, tx):
    def step(state, x):
        loss, grads = jamp.scaled_value_and_grad(hidden)(state, x)
        return state.apply_gradients(grads=grads), loss, grads

    state = begin(level, tx)
    for run in (step, jax.jit(step)):
        after, loss, grads = run(state, jnp.float32(2.0))
        assert (after.step, after.skipped_steps) == (1, 0) and loss == 1.5
        np.testing.assert_array_equal(grads["w"], 1.0)
        for bad in (np.nan, np.inf):
            after, loss, grads = run(state, jnp.float32(bad))
            assert not np.isfinite(loss) and all_nan(grads)
            assert_skipped(after, state)
            assert after.loss_scale == 4.0
    for _ in range(3):
        after = run(after, jnp.float32(np.nan))[0]
    with pytest.raises(FloatingPointError, match="Loss 0 skipped 4 steps in a row"):
        jamp.check(after, max_consecutive_skips=4)


@pytest.mark.standard_promotion
def test_a_cpu_checks_a_loss_once():
    # Otherwise, each kernel that steps a leaf computes the loss and its check again.
    def loss_fn(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.square(x).mean()

    @jax.jit
    def step(state, x):
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
        return state.apply_gradients(grads=grads), loss

    state = make("O4", 6 * [jnp.eye(64)], optax.adam(1e-3))
    text = step.lower(state, jnp.ones((8, 64))).compile().as_text()
    assert 1 <= text.count(" is-finite(") <= 2  # 25 before


@pytest.mark.parametrize("rule", [128.0, jamp.StaticLossScale(128.0, check=True)])
def test_a_static_scale_skips_only_if_it_checks(rule):
    state = begin("O2", optax.sgd(1.0), rule)
    grads = jax.jit(jamp.scaled_grad(hidden))(state, jnp.float32(np.nan))
    assert all_nan(grads) == (rule != 128.0)


@pytest.mark.slow
@pytest.mark.parametrize("averaged", [True, False])
def test_one_overflowed_loss_on_a_mapped_axis_skips_all(averaged):
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    # In O2, JAX would sum the gradients of half params, which warns.
    state = begin("O2" if averaged else "O0", jo.fused_sgd(1.0))

    def step(state, x):
        options = {"axis_name": "i"} if averaged else {}
        loss, grads = jamp.scaled_value_and_grad(hidden, **options)(state, x[0])
        return state.apply_gradients(grads=grads), loss[None]

    specs = {"mesh": mesh, "in_specs": (P(), P("i"))}
    run = jax.jit(jax.shard_map(step, out_specs=(P(), P("i")), **specs))
    after, _ = run(state, jnp.float32([np.nan]))
    assert_skipped(after, state)
    assert run(state, jnp.float32([1.0]))[0].step == 1

    def on_each(x):
        return jamp.scaled_value_and_grad(hidden, axis_name="i")(state, x)

    loss, grads = jax.vmap(on_each, axis_name="i")(jnp.float32([1.0, np.nan, 2.0]))
    assert np.isnan(loss).all() and all_nan(grads)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_fp16_optimizer_skips_under_a_dynamic_scale(dynamic):
    """The flat optimizer always skips, as fp16_utils/test_flat.py tests."""
    scale = {"dynamic_loss_args": {"init_scale": 8.0}} if dynamic else {}
    optimizer = fp16_utils.FP16_Optimizer(
        optax.sgd(1.0), dynamic_loss_scale=dynamic, **scale, verbose=False
    )
    state = optimizer.init({"w": jnp.asarray(START, jnp.float16)})
    step = jax.jit(lambda s, x: optimizer.step(optimizer.backward(s, hidden, x)[1]))
    for x, skips in ((np.nan, dynamic), (1.0, False)):
        after = step(state, jnp.float32(x))
        assert after.overflow == skips
        assert (after.params["w"] == START).all() == skips


def test_a_line_search_gets_nan_from_the_closure():
    state = begin("O2", optax.lbfgs())
    value_fn = jamp.closure(hidden)(state, jnp.float32(np.nan))
    loss, grads = jax.value_and_grad(value_fn)({"w": jnp.asarray(START)})
    assert np.isnan(loss) and all_nan(grads)


def test_gradients_of_scale_loss_hide_an_overflowed_loss():
    state, x = begin("O2", optax.sgd(1.0)), jnp.float32(np.nan)
    grads = jax.grad(lambda p: jamp.scale_loss(hidden(p, x), state))(state.params)
    np.testing.assert_array_equal(jamp.unscale(grads, state)["w"], 1.0)
