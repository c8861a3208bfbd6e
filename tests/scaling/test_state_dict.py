"""Test `state_dict`, `load_state_dict` and `check`."""

import collections
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.support import states
from tests.support.bits import assert_same_bits


def make(level="O2", **kwargs):
    """Returns a state with its own optimizer, by which `check` recognizes it."""
    return states.make(level, {"w": jnp.full(3, 0.1)}, optax.sgd(0.5), **kwargs)


def loss_fn(params, x):
    return (params["w"].astype(jnp.float32) * x).sum()


def step(state, x, loss_id=0):
    grads = jamp.scaled_grad(loss_fn, loss_id=loss_id)(state, jnp.float32(x))
    return state.apply_gradients(grads=grads, loss_id=loss_id)


def scalers(*pairs):
    """Returns apex's dict from a scale and a count per loss."""
    entries = [{"loss_scale": scale, "unskipped": count} for scale, count in pairs]
    return {f"loss_scaler{k}": entry for k, entry in enumerate(entries)}


def test_the_state_dict_is_apexs_and_survives_json():
    state = make(num_losses=2)
    for loss_id, x in ((0, 0.25), (1, np.inf), (0, 0.25)):
        state = step(state, x, loss_id)
    saved = jamp.state_dict(state)
    assert saved == scalers((65536.0, 2), (32768.0, 0))
    for entry in saved.values():
        assert [type(x) for x in entry.values()] == [float, int]
    loaded = jamp.load_state_dict(make(num_losses=2), json.loads(json.dumps(saved)))
    assert jamp.state_dict(loaded) == saved
    for a, b in zip(loaded.loss_scales, state.loss_scales, strict=True):
        assert_same_bits((a.scale, a.unskipped), (b.scale, b.unskipped))


# The result of apex's amp.state_dict() after a run with two losses.
APEX = collections.OrderedDict(scalers((4096.0, 1999), (0.5, 17)))


def test_names_count_and_not_their_order():
    # apex_semantics 5.5: apex writes the i-th entry into scaler i, whatever its name.
    for given in (APEX, dict(reversed(APEX.items()))):
        state = jamp.load_state_dict(make(num_losses=2), given)
        assert [float(s) for s in state.loss_scale] == [4096.0, 0.5]
        assert [int(s.unskipped) for s in state.loss_scales] == [1999, 17]
    # The 2000th clean step doubles the scale, as in apex.
    assert jamp.state_dict(step(state, 1.0)) == scalers((8192.0, 0), (0.5, 17))


def test_a_static_scale_takes_another_value():
    # apex_semantics 5.5: apex also loads values into static scalers.
    rule = jamp.StaticLossScale(128.0, check=True)
    state, saved = make(loss_scale=rule, num_losses=2), scalers((4.0, 9), (128.0, 3))
    state = jamp.load_state_dict(state, saved)
    assert state.loss_scale_rules == (jamp.StaticLossScale(4.0, check=True), rule)
    assert jamp.state_dict(state) == saved
    state, plain = step(state, 0.25), step(make("O2", loss_scale=4.0), 0.25)
    assert_same_bits(state.params, plain.params)
    # apex_semantics 5.4: in static mode `unskipped` grows without end.
    assert jamp.state_dict(state) == scalers((4.0, 10), (128.0, 3))


ONE = scalers((4.0, 1))
ENTRIES = "loss_scaler0 must hold loss_scale and unskipped, got "
NAMES = r"must map \['loss_scaler0'\] .*{}.*num_losses.* to jamp.initialize"
SCALE = r"loss_scaler0\['loss_scale'\]` must be a finite number .* got {}\."
COUNT = r"loss_scaler0\['unskipped'\]` must be an integer of at least 0, got {}\."
BAD_SCALES = (0.0, -2.0, np.nan, -np.inf, 2.0**127, "4", True, None, [4.0], 1e-40)
BAD_COUNTS = (-1, 0.5, np.nan, np.inf, "4", True, None, [1])
WRONG = [
    (ONE | {"optimizer": {}}, NAMES.format("'optimizer'")),
    ({"loss_scaler1": ONE["loss_scaler0"]}, NAMES.format("loss_scaler1")),
    ([ONE], NAMES.format("")),
    ({"loss_scaler0": {"loss_scale": 4.0}}, ENTRIES + "{'loss_scale': 4.0}"),
    (scalers((4.0, 2**31)), "int32|too large"),
    *((scalers((x, 1)), SCALE.format(re.escape(repr(x)))) for x in BAD_SCALES),
    *((scalers((4.0, x)), COUNT.format(re.escape(repr(x)))) for x in BAD_COUNTS),
]


def test_load_state_dict_names_a_misfit():
    for given, words in WRONG:
        for level in ("O0", "O2"):
            with pytest.raises((ValueError, OverflowError), match=words):
                jamp.load_state_dict(make(level), given)


def test_only_states_of_concrete_arrays_are_accepted():
    on_host = {
        jamp.check: "(?s)concrete|traced|inside jit",
        jamp.state_dict: "outside of `jit`",
    }
    for call in (*on_host, lambda s: jamp.load_state_dict(s, ONE)):
        with pytest.raises(TypeError, match="AmpState .* got dict"):
            call({"w": 1.0})
    for call, words in on_host.items():
        with pytest.raises(TypeError, match=words):
            jax.jit(lambda s, call=call: call(s) or 0)(make())


def after(*good, **kwargs):
    """Returns a state after good and bad steps."""
    state = make(**kwargs)
    for x in good:
        state = step(state, x or np.inf)
    return state


def skipping(count):
    """Returns a state with this count of skips."""
    state = after(0)
    many = state.loss_scales[0]._replace(consecutive_skips=jnp.int32(count))
    return state.replace(loss_scales=(many,))


def ensemble():
    """Returns an ensemble whose second member has skipped every step."""
    begin = lambda w: states.make("O2", w)  # noqa: E731
    state, grads = jax.vmap(begin)(jnp.ones((2, 3))), jnp.ones((2, 3))
    apply = jax.vmap(lambda state, grads: state.apply_gradients(grads=grads))
    for _ in range(3):
        state = apply(state, grads.at[1].set(jnp.inf))
    return state


STATIC, CHECKED = jamp.StaticLossScale(1.0), jamp.StaticLossScale(4.0, check=True)
LOW = {"min_loss_scale": 2.0**14}
# apex's scale falls to 0 and raises a ZeroDivisionError.
LOWEST = {"loss_scale": jamp.DynamicLossScale(2.0**-125)}
RUNS = [
    # A state, the largest number of skips, and the message or None.
    (lambda: after(0, 0), 3, None),
    (lambda: after(0, 0, 0), 3, "Loss 0 skipped 3 .* scale is 8192: in each, the loss"),
    (lambda: after(0, 0, 1, 0, 0), 3, None),
    (lambda: skipping(49), 50, None),
    (lambda: skipping(50), 50, "Loss 0 skipped 50"),
    (lambda: after(0, 0, **LOW), 100, "Loss 0 skipped 2 .* scale is 16384:"),
    (lambda: after(0, 0, 1, **LOW), 100, None),  # at the floor without a skip
    (lambda: after(0, **LOWEST), 100, "Loss 0 skipped 1 .* scale is 1.17549e-38:"),
    (lambda: after(0, 0, 0, loss_scale=STATIC), 1, None),
    (lambda: after(0, 0, 0, loss_scale=CHECKED), 4, None),
    (lambda: after(0, 0, 0, loss_scale=CHECKED), 3, "Loss 0 skipped 3"),
    (ensemble, 4, None),
    (ensemble, 3, "Loss 0 skipped 3 .* scale is 8192:"),
]


def test_it_raises_after_n_skips_in_a_row_and_not_before():
    for begin, most, words in RUNS:
        state = begin()
        kwargs = {} if most == 50 else {"max_consecutive_skips": most}  # the default
        if words is None:
            assert jamp.check(state, **kwargs) is None
        else:
            with pytest.raises(FloatingPointError, match=words):
                jamp.check(state, **kwargs)


def test_the_number_of_skips_is_a_positive_integer():
    for bad in (0, -1, True, 50.5, None):
        with pytest.raises(ValueError, match=f"max_consecutive_skips .* got {bad}"):
            jamp.check(make(), max_consecutive_skips=bad)


def test_it_prints_skips_as_apex_does(capsys):
    # apex_semantics 4.4, apex/amp/handle.py
    line = "Gradient overflow.  Skipping step, loss scaler {} reducing loss scale to {}"
    state = make(num_losses=2)
    jamp.check(state)
    for xs, losses, text in (
        ((0.5,), (0,), ""),
        ((np.inf, np.inf), (1, 1), line.format(1, 16384.0)),
        ((0.5,), (0,), line.format(1, 16384.0)),  # the last step of loss 1
        ((0.5,), (1,), ""),
        ((np.inf,), (0,), line.format(0, 32768.0)),
    ):
        for x, loss_id in zip(xs, losses, strict=True):
            state = step(state, x, loss_id)
        capsys.readouterr()
        jamp.check(state)
        assert capsys.readouterr().out.rstrip("\n") == text
    jamp.check(step(state, np.inf), verbosity=0)
    assert capsys.readouterr().out == ""


def test_it_says_reducing_only_if_the_scale_fell(capsys):
    checked = jamp.StaticLossScale(1.0, check=True)
    for rule, scale in ((jamp.DynamicLossScale(hysteresis=2), 65536.0), (checked, 1.0)):
        jamp.check(step(make(loss_scale=rule), np.inf))
        line = f"Skipping step, loss scaler 0 keeping loss scale {scale}\n"
        assert capsys.readouterr().out == f"Gradient overflow.  {line}"
