"""One test per bug of another library that this one must not have.

The names say whose bug it was; ../shared/peers.md has the measurements.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.bits import assert_same_bits

HALVES = {"O2": jnp.float16, "O3": jnp.float16, "O5": jnp.bfloat16}


def build(level, tree, tx, **kwargs):
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def one(value=1.0):
    return {"w": jnp.full(4, value, jnp.float32)}


def overflowed(state, times):
    """The state after so many steps that overflow."""

    def step(state, _):
        grads = jax.tree.map(lambda x: jnp.full(x.shape, jnp.inf), state.params)
        return state.apply_gradients(grads=grads), None

    return jax.jit(lambda s: jax.lax.scan(step, s, None, length=times))(state)[0]


def test_jmp_min_scale_survives_tree_operations_and_jit():
    # jmp 0.0.4: min_loss_scale is a pytree field that tree_unflatten drops: 1.0.
    state = build("O2", one(), optax.sgd(0.1), min_loss_scale=2.0**14)
    leaves, treedef = jax.tree.flatten(state)
    state = jax.tree.map(lambda x: x, jax.tree.unflatten(treedef, leaves))
    state = overflowed(state, 4)
    assert state.loss_scale == 2.0**14
    assert state.skipped_steps == 4


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_mpx_gradients_and_loss_are_unscaled_with_the_scale_that_scaled_them(level):
    # mpx 0.1.8: on every growth step loss and gradients come out halved.
    rule = jamp.DynamicLossScale(init_scale=4.0, window=1)
    state = build(
        level, {"w": jnp.zeros(2, jnp.float32)}, optax.sgd(1.0), loss_scale=rule
    )

    def loss_fn(p):
        return (p["w"].astype(jnp.float32) * jnp.array([3.0, 4.0])).sum() + 11.0

    before = jnp.zeros(2, jnp.float32)
    for scale in (4.0, 8.0, 16.0):
        assert state.loss_scale == scale
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state)
        assert loss == 11.0 + before @ jnp.array([3.0, 4.0])
        state = state.apply_gradients(grads=grads)
        step = before - state.params["w"].astype(jnp.float32)
        np.testing.assert_array_equal(step, [3.0, 4.0])
        before = state.params["w"].astype(jnp.float32)


def test_mpx_string_dtype_is_never_silently_ignored():
    # mpx: set_half_precision_datatype("bfloat16") is a no-op.
    state = build("O2", one(), optax.sgd(0.1), cast_model_type="bfloat16")
    assert state.params["w"].dtype == jnp.bfloat16
    assert jamp.cast_model(one(), "bfloat16")["w"].dtype == jnp.bfloat16
    with pytest.raises((TypeError, ValueError), match="bfloat17"):
        build("O2", one(), optax.sgd(0.1), cast_model_type="bfloat17")


@pytest.mark.parametrize("max_scale", [2.0**24, float(np.finfo(np.float32).max)])
def test_keras_and_flax_scale_never_reaches_inf(max_scale):
    # keras 3.15: zero gradients and an interval of 2 make it inf at step 263, for ever.
    rule = jamp.DynamicLossScale(window=2, max_scale=max_scale)

    def step(state, _):
        state = rule.update(state, jnp.asarray(True))
        return state, state.scale

    state, scales = jax.lax.scan(step, rule.init(), None, length=300)
    assert np.all(np.isfinite(scales))
    assert scales[-1] <= max_scale
    assert rule.update(state, jnp.asarray(False)).scale == scales[-1] / 2


def test_flax_loss_is_not_nan_on_step_1():
    # flax 0.12 DynamicScale: an fp16 loss times 65536 is inf, and inf / 65536 NaN.
    state = build("O2", one(2.0), optax.sgd(0.1))
    assert state.loss_scale == 2.0**16

    def half_loss(p):
        return jnp.square(p["w"].astype(jnp.float16)).sum()

    with pytest.warns(jamp.PrecisionWarning, match="float16"):
        loss, _ = jamp.scaled_value_and_grad(half_loss)(state)
    assert loss.dtype == jnp.float32
    assert loss == 16.0


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_flax_step_2_does_not_retrace(level):
    # flax DynamicScale: Python scalars become arrays after the first step.
    traces = []
    tree = {"w": jnp.asarray([1.0, 2.0]), "b": jnp.asarray(1.0)}
    assert tree["b"].weak_type and jnp.asarray(0.5).weak_type  # the trap
    fields = {"ema": jnp.asarray(0.5), "best": 0.0}
    state = build(level, tree, optax.sgd(0.1, momentum=0.9), **fields)

    @jax.jit
    def train_step(state, x):
        traces.append(None)

        def loss_fn(p, x):
            return (p["w"].astype(jnp.float32) * x).sum() + p["b"].astype(jnp.float32)

        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
        return state.apply_gradients(grads=grads, ema=loss, best=loss), loss

    for scale in (1.0, 2.0, np.inf, 4.0):
        state, _ = train_step(state, jnp.full(2, scale, jnp.float32))
    assert len(traces) == 1
    assert train_step._cache_size() == 1


def test_flax_scale_grows_after_the_window_and_not_one_step_later():
    # flax: growth_interval=2 grows on steps 3 and 6.
    rule = jamp.DynamicLossScale(init_scale=1.0, window=2)
    state, scales = rule.init(), []
    for _ in range(6):
        state = rule.update(state, jnp.asarray(True))
        scales.append(float(state.scale))
    assert scales == [1.0, 2.0, 2.0, 4.0, 4.0, 8.0]


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_optax_apply_if_finite_never_gives_up_skipping(level):
    # optax: after max_consecutive_errors the inf update is applied.
    rule = jamp.DynamicLossScale()
    start = build(level, one(0.3), optax.sgd(0.1, momentum=0.9), loss_scale=rule)
    state = overflowed(start, 100)
    assert_same_bits(state.params, start.params)
    assert_same_bits(state.opt_state, start.opt_state)
    assert (state.step, state.skipped_steps) == (0, 100)
    assert bool(state.last_step_skipped)
    with pytest.raises((RuntimeError, ValueError, ArithmeticError), match="100"):
        jamp.check(state, max_consecutive_skips=100)
    jamp.check(state, max_consecutive_skips=101)


@pytest.mark.standard_promotion  # for optax.adam
@pytest.mark.parametrize("level", ["O2", "O5"])
def test_optax_and_apex_1728_masters_exist_for_both_halves(level):
    # Adam at 1e-3 on a bf16 param of 1.0 without masters: still 1.0 after 100 steps.
    start = build(level, one(), optax.adam(1e-3), loss_scale=1.0)

    def step(state, _):
        grads = jax.tree.map(jnp.ones_like, state.params)
        return state.apply_gradients(grads=grads), None

    state, _ = jax.jit(lambda s: jax.lax.scan(step, s, None, length=100))(start)
    masters = jamp.master_params(state)["w"]
    assert masters.dtype == jnp.float32
    np.testing.assert_allclose(masters, 0.9, rtol=1e-4)
    assert state.params["w"].dtype == HALVES[level]
    np.testing.assert_array_equal(
        np.asarray(state.params["w"]), np.asarray(masters).astype(HALVES[level])
    )


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_optax_tree_cast_int_leaves_are_not_cast(level):
    # optax.tree.cast turns int32 into bf16, which holds integers up to 256.
    big = 2**24 + 1
    tree = {"w": jnp.ones(2, jnp.float32), "n": jnp.array([big], jnp.int32)}
    state = build(level, tree, optax.sgd(0.1))
    assert state.params["n"].dtype == jnp.int32
    assert state.params["n"].tolist() == [big]
    out = jamp.cast_model(tree, jnp.bfloat16)
    assert out["n"].dtype == jnp.int32
    assert out["n"].tolist() == [big]


def test_apex_834_scale_of_zero_never_comes():
    # apex: 1090 overflows reach 0.0, and 1 / scale raises ZeroDivisionError.
    state = overflowed(build("O2", one(), optax.sgd(0.5)), 1200)
    assert state.loss_scale >= np.finfo(np.float32).smallest_normal
    grads = jamp.unscale({"w": jnp.ones(4, jnp.float32)}, state)
    assert np.all(np.isfinite(grads["w"]))
    assert jamp.scale_loss(jnp.float32(1.0), state) > 0
    with pytest.raises((RuntimeError, ValueError, ArithmeticError)):
        jamp.check(state)
