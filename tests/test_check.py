"""`jamp.check`: the one place that raises, on the host."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp

# The contract names no class; it must be one that a training script would not swallow.
FAILED = (RuntimeError, ArithmeticError, ValueError)


def make(level="O2", **kwargs):
    params = {"w": jnp.ones(2, jnp.float32)}
    return jamp.initialize(params, optax.sgd(0.1), level, verbosity=0, **kwargs)


def spoil(state, times):
    bad = jax.tree.map(lambda x: jnp.full(x.shape, jnp.inf, jnp.float32), state.params)
    for _ in range(times):
        state = state.apply_gradients(grads=bad)
    return state


def step(state):
    return state.apply_gradients(grads=jax.tree.map(jnp.zeros_like, state.params))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_a_fresh_state_passes(level):
    state = make(level)
    assert jamp.check(state) is None
    assert jamp.check(state, max_consecutive_skips=1) is None


def test_it_raises_after_n_skips_in_a_row_and_not_before():
    state = spoil(make(), 2)
    assert jamp.check(state, max_consecutive_skips=3) is None
    with pytest.raises(FAILED, match="3"):
        jamp.check(spoil(state, 1), max_consecutive_skips=3)


def test_a_clean_step_ends_the_row():
    state = spoil(step(spoil(make(), 2)), 2)
    assert state.skipped_steps == 4
    assert jamp.check(state, max_consecutive_skips=3) is None


def test_it_raises_by_default_before_a_run_is_lost():
    with pytest.raises(FAILED):
        jamp.check(spoil(make(), 100))


def test_a_start_with_a_high_scale_is_no_failure_by_default():
    # 2^24 down to 2^10, which is what recovering from a far too high scale takes.
    rule = jamp.DynamicLossScale(init_scale=2.0**24)
    assert jamp.check(spoil(make(loss_scale=rule), 14)) is None


def test_it_raises_when_a_scale_sits_at_its_floor():
    state = spoil(make(min_loss_scale=2.0**14), 1)
    assert jamp.check(state, max_consecutive_skips=100) is None
    state = spoil(state, 2)
    assert state.loss_scale == 2.0**14
    with pytest.raises(FAILED, match="16384"):
        jamp.check(state, max_consecutive_skips=100)


def test_it_raises_at_the_floor_of_fp32():
    # Where apex's scale went on to 0 and died of a ZeroDivisionError.
    state = spoil(make(loss_scale=jamp.DynamicLossScale(init_scale=2.0**-125)), 3)
    assert state.loss_scale == 2.0**-126
    with pytest.raises(FAILED):
        jamp.check(state, max_consecutive_skips=100)


def test_the_message_names_the_loss():
    state = make(num_losses=2)
    scale = state.loss_scales[1]._replace(consecutive_skips=jnp.int32(7))
    state = state.replace(loss_scales=(state.loss_scales[0], scale))
    with pytest.raises(FAILED, match=r"(?si)loss\D*1\b.*7|7.*loss\D*1\b"):
        jamp.check(state, max_consecutive_skips=7)


@pytest.mark.parametrize("scale", [1.0, 2.0**-126])
def test_a_static_scale_is_never_at_its_floor(scale):
    assert jamp.check(spoil(make(loss_scale=scale), 3)) is None


def test_a_static_scale_that_checks_counts_skips_too():
    state = spoil(make(loss_scale=jamp.StaticLossScale(4.0, check=True)), 3)
    with pytest.raises(FAILED, match="3"):
        jamp.check(state, max_consecutive_skips=3)


def test_under_jit_it_says_that_it_belongs_on_the_host():
    with pytest.raises((TypeError, RuntimeError), match="(?s)jit|host|concrete|traced"):
        jax.jit(lambda s: jamp.check(s) or 0)(make())


@pytest.mark.parametrize("bad", [{"w": 1.0}, None, optax.EmptyState()], ids=str)
def test_what_is_no_state_is_refused(bad):
    with pytest.raises(TypeError, match=r"jamp\.initialize|AmpState"):
        jamp.check(bad)


@pytest.mark.parametrize("bad", [0, -1])
def test_a_senseless_number_of_skips_is_refused(bad):
    with pytest.raises((TypeError, ValueError), match="max_consecutive_skips"):
        jamp.check(make(), max_consecutive_skips=bad)
