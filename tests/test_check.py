"""`jamp.check`: the one place that raises, on the host."""

import jax
import jax.numpy as jnp
import pytest

import jamp
from tests.states import make

W = {"w": jnp.ones(2, jnp.float32)}
BAD = {"w": jnp.asarray([1.0, jnp.nan], jnp.float32)}


def after(*good, **kwargs):
    """A state after steps that are good or not."""
    state = make(tree=W, **kwargs)
    for step in good:
        state = state.apply_gradients(grads=W if step else BAD)
    return state


def counted(*skips):
    """A state whose losses have skipped so often in a row."""
    state = make(tree=W, num_losses=len(skips))
    pairs = zip(state.loss_scales, skips, strict=True)
    scales = (s._replace(consecutive_skips=jnp.int32(n)) for s, n in pairs)
    return state.replace(loss_scales=tuple(scales))


STATIC, CHECKED = jamp.StaticLossScale(1.0), jamp.StaticLossScale(4.0, check=True)
LOW = {"min_loss_scale": 2.0**14}
# Where apex's scale went on to 0 and died of a ZeroDivisionError.
LOWEST = {"loss_scale": jamp.DynamicLossScale(2.0**-125)}
RUNS = [
    # A state, at most so many skips, and the message if there is one.
    (lambda: after(0, 0), 3, None),
    (lambda: after(0, 0, 0), 3, "Loss 0 skipped 3 .* scale is 8192: .* any scale"),
    (lambda: after(0, 0, 1, 0, 0), 3, None),
    (lambda: counted(49), 50, None),
    (lambda: counted(50), 50, "Loss 0 skipped 50"),
    (lambda: counted(6, 7), 7, "Loss 1 skipped 7"),
    (lambda: after(0, **LOW), 100, None),
    (lambda: after(0, 0, **LOW), 100, "Loss 0 skipped 2 .* scale is 16384:"),
    (lambda: after(0, 0, 1, **LOW), 100, None),  # it may sit there
    (lambda: after(0, **LOWEST), 100, "Loss 0 skipped 1 .* scale is 1.17549e-38:"),
    (lambda: after(0, 0, 0, loss_scale=STATIC), 1, None),
    (lambda: after(0, 0, 0, loss_scale=2.0**-126), 1, None),
    (lambda: after(0, 0, 0, loss_scale=CHECKED), 4, None),
    (lambda: after(0, 0, 0, loss_scale=CHECKED), 3, "Loss 0 skipped 3"),
]


def test_it_raises_after_n_skips_in_a_row_and_not_before():
    for begin, most, words in RUNS:
        state = begin()
        options = ({"max_consecutive_skips": most}, {})[: 1 + (most == 50)]
        for kwargs in options:  # 50 is the default
            if words is None:
                assert jamp.check(state, **kwargs) is None
            else:
                with pytest.raises(FloatingPointError, match=words):
                    jamp.check(state, **kwargs)
    for level in ("O0", "O1", "O2", "O3", "O4", "O5"):
        assert jamp.check(make(level, W), max_consecutive_skips=1) is None


def test_what_it_refuses():
    with pytest.raises((TypeError, RuntimeError), match="(?s)concrete|traced"):
        jax.jit(lambda s: jamp.check(s) or 0)(make(tree=W))
    for bad in ({"w": 1.0}, None, 3):
        with pytest.raises(TypeError, match=f"AmpState, got {type(bad).__name__}"):
            jamp.check(bad)
    for bad in (0, -1, True):
        with pytest.raises(ValueError, match=f"max_consecutive_skips .* got {bad}"):
            jamp.check(make(tree=W), max_consecutive_skips=bad)
