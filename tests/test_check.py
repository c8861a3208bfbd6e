"""`jamp.check`: the one place that raises, on the host."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from tests.states import make

W = {"w": jnp.ones(2, jnp.float32)}
BAD = {"w": jnp.asarray([1.0, jnp.nan], jnp.float32)}


def spoil(state, times):
    for _ in range(times):
        state = state.apply_gradients(grads=BAD)
    return state


def test_it_raises_after_n_skips_in_a_row_and_not_before():
    for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
        assert jamp.check(make(level, W), max_consecutive_skips=1) is None
    two = spoil(make(tree=W), 2)
    assert jamp.check(two, max_consecutive_skips=3) is None
    with pytest.raises(FloatingPointError, match="Loss 0 skipped 3 steps .* is 8192:"):
        jamp.check(spoil(two, 1), max_consecutive_skips=3)
    # A clean step ends the row.
    four = spoil(two.apply_gradients(grads=W), 2)
    assert four.skipped_steps == 4
    assert jamp.check(four, max_consecutive_skips=3) is None
    # 50 by default: recovering from a far too high scale takes fewer.
    (scale,) = two.loss_scales
    for skips in (49, 50):
        now = scale._replace(consecutive_skips=jnp.int32(skips))
        state = two.replace(loss_scales=(now,))
        if skips == 50:
            with pytest.raises(FloatingPointError, match="50 steps"):
                jamp.check(state)
        else:
            assert jamp.check(state) is None


FLOORS = {
    "given": ({"min_loss_scale": 2.0**14}, 2, 16384),
    # Where apex's scale went on to 0 and died of a ZeroDivisionError.
    "float32's": ({"loss_scale": jamp.DynamicLossScale(2.0**-125)}, 1, 1.17549e-38),
}


@pytest.mark.parametrize("name", FLOORS)
def test_it_raises_when_a_scale_sits_at_its_floor(name):
    kwargs, falls, floor = FLOORS[name]
    above, at_floor = (spoil(make(tree=W, **kwargs), n) for n in (falls - 1, falls))
    assert jamp.check(above, max_consecutive_skips=100) is None
    with pytest.raises(FloatingPointError, match=f"its scale is {floor}: .*any scale"):
        jamp.check(at_floor, max_consecutive_skips=100)
    # It may sit there, if it has not skipped.
    assert jamp.check(at_floor.apply_gradients(grads=W)) is None


def test_a_static_scale_has_no_floor_but_may_count_skips():
    for scale in (1.0, 2.0**-126):
        assert jamp.check(spoil(make(tree=W, loss_scale=scale), 3)) is None
    rule = jamp.StaticLossScale(4.0, check=True)
    state = spoil(make(tree=W, loss_scale=rule), 3)
    assert jamp.check(state) is None
    with pytest.raises(FloatingPointError, match="Loss 0 skipped 3"):
        jamp.check(state, max_consecutive_skips=3)


def test_the_message_names_the_loss():
    state = make(tree=W, num_losses=2)
    scale = state.loss_scales[1]._replace(consecutive_skips=jnp.int32(7))
    state = state.replace(loss_scales=(state.loss_scales[0], scale))
    with pytest.raises(FloatingPointError, match="Loss 1 skipped 7"):
        jamp.check(state, max_consecutive_skips=7)


def test_what_it_refuses():
    with pytest.raises((TypeError, RuntimeError), match="(?s)concrete|traced"):
        jax.jit(lambda s: jamp.check(s) or 0)(make(tree=W))
    for bad in ({"w": 1.0}, None, optax.EmptyState()):
        with pytest.raises(TypeError, match=f"AmpState, got {type(bad).__name__}"):
            jamp.check(bad)
    for bad in (0, -1, True):
        with pytest.raises(ValueError, match=f"max_consecutive_skips .* got {bad}"):
            jamp.check(make(tree=W), max_consecutive_skips=bad)
