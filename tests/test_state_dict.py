"""`state_dict` and `load_state_dict`: the loss scales in apex's form, by name."""

import collections
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.bits import assert_same_bits

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")


def make(level="O2", seed=0, **kwargs):
    params = {"w": jnp.full(3, 0.1 + seed)}
    tx = optax.sgd(0.5, momentum=0.5)
    return jamp.initialize(params, tx, level, verbosity=0, **kwargs)


def loss_fn(params, x):
    return (params["w"].astype(jnp.float32) * x).sum()


def step(state, x, loss_id=0):
    grads = jamp.scaled_grad(loss_fn, loss_id=loss_id)(state, jnp.float32(x))
    return state.apply_gradients(grads=grads)


def scaler(loss_scale, unskipped):
    return {"loss_scale": loss_scale, "unskipped": unskipped}


# Saving


def test_it_is_apexs_dict_of_numbers():
    state = make(num_losses=2)
    for loss_id, x in ((0, 0.25), (1, np.inf), (0, 0.25)):
        state = step(state, x, loss_id)
    saved = jamp.state_dict(state)
    assert saved == {
        "loss_scaler0": scaler(65536.0, 2),
        "loss_scaler1": scaler(32768.0, 0),
    }
    assert list(saved) == ["loss_scaler0", "loss_scaler1"]
    for entry in saved.values():
        assert [type(x) for x in entry.values()] == [float, int]


@pytest.mark.parametrize("level", LEVELS)
def test_every_level_has_one_static_scales_too(level):
    scale = 65536.0 if level in ("O1", "O2") else 1.0
    assert jamp.state_dict(make(level)) == {"loss_scaler0": scaler(scale, 0)}


def test_a_static_scale_counts_as_apexs_does():
    # apex_semantics 5.4: in static mode `unskipped` counts up for ever.
    state = step(step(make(loss_scale=128.0), 1.0), 1.0)
    assert jamp.state_dict(state) == {"loss_scaler0": scaler(128.0, 2)}


def test_eleven_losses_are_in_order():
    names = list(jamp.state_dict(make(num_losses=11)))
    assert names == [f"loss_scaler{k}" for k in range(11)]


# Loading


def test_through_json_and_back():
    state = step(step(make(num_losses=2), 0.25), np.inf, loss_id=1)
    text = json.dumps(jamp.state_dict(state))
    loaded = jamp.load_state_dict(make(num_losses=2), json.loads(text))
    assert jamp.state_dict(loaded) == json.loads(text) == jamp.state_dict(state)
    assert loaded.loss_scale == state.loss_scale
    for name in ("loss_scale", "unskipped"):
        field = "scale" if name == "loss_scale" else name
        for k in range(2):
            pair = (getattr(s.loss_scales[k], field) for s in (loaded, state))
            assert_same_bits(*pair)


# What apex's amp.state_dict() gave after a run with two losses.
APEX = collections.OrderedDict(
    loss_scaler0={"loss_scale": 4096.0, "unskipped": 1999},
    loss_scaler1={"loss_scale": 0.5, "unskipped": 17},
)


def test_apexs_own_dict_loads_and_counts_on():
    state = jamp.load_state_dict(make(num_losses=2), APEX)
    assert [float(s) for s in state.loss_scale] == [4096.0, 0.5]
    assert [int(s.unskipped) for s in state.loss_scales] == [1999, 17]
    # The 2000th clean step doubles the scale, as in apex.
    state = step(state, 1.0)
    assert jamp.state_dict(state)["loss_scaler0"] == scaler(8192.0, 0)


def test_names_count_and_not_their_order():
    # apex_semantics 5.5: apex writes the i-th entry into scaler i, whatever its name.
    shuffled = dict(reversed(APEX.items()))
    state = jamp.load_state_dict(make(num_losses=2), shuffled)
    assert [float(s) for s in state.loss_scale] == [4096.0, 0.5]


def test_nothing_but_scales_and_counts_changes():
    before = step(make(num_losses=2), 0.25)
    after = jamp.load_state_dict(before, APEX)
    for name in ("params", "opt_state", "step", "skipped_steps", "last_step_skipped"):
        assert_same_bits(getattr(after, name), getattr(before, name))
    assert after.loss_scale_rules == before.loss_scale_rules
    assert jax.tree.structure(after) == jax.tree.structure(before)
    dtypes = [[x.dtype for x in jax.tree.leaves(s)] for s in (after, before)]
    assert dtypes[0] == dtypes[1]


def test_a_dynamic_scale_loaded_is_the_one_that_is_used():
    state = jamp.load_state_dict(make(), {"loss_scaler0": scaler(8.0, 0)})
    assert jamp.scale_loss(jnp.float32(3.0), state) == 24.0
    assert step(state, np.inf).loss_scale == 4.0


@pytest.mark.parametrize("check", [False, True])
def test_a_static_scale_takes_another_value(check):
    # apex_semantics 5.5: values are loaded into static scalers, too.
    rule = jamp.StaticLossScale(128.0, check=check)
    state = jamp.load_state_dict(
        make(loss_scale=rule), {"loss_scaler0": scaler(4.0, 9)}
    )
    assert state.loss_scale_rules == (jamp.StaticLossScale(4.0, check=check),)
    assert jamp.state_dict(state) == {"loss_scaler0": scaler(4.0, 9)}
    # Compiled with the new value.
    assert jax.jit(jamp.scale_loss)(jnp.float32(3.0), state) == 12.0
    stepped, plain = (step(s, 0.25) for s in (state, make("O2", loss_scale=4.0)))
    assert_same_bits(stepped.params, plain.params)


def test_one_static_scale_of_two_changes_alone():
    state = make("O5", num_losses=2)
    loaded = jamp.load_state_dict(
        state, {"loss_scaler0": scaler(1.0, 3), "loss_scaler1": scaler(64.0, 5)}
    )
    assert [rule.scale for rule in loaded.loss_scale_rules] == [1.0, 64.0]
    assert [int(s.unskipped) for s in loaded.loss_scales] == [3, 5]


# Errors

ONE = {"loss_scaler0": scaler(4.0, 1)}
WRONG = {
    "an unexpected key": (
        {**ONE, "optimizer": {}},
        ["'optimizer'", r"\['loss_scaler0'\]", "num_losses=1"],
    ),
    "a surplus scaler": (
        {**ONE, "loss_scaler1": scaler(4.0, 1)},
        ["loss_scaler1", "num_losses=1", "jamp.initialize"],
    ),
    "another number": (
        {"loss_scaler1": scaler(4.0, 1)},
        ["loss_scaler1", "loss_scaler0", "num_losses=1"],
    ),
    "no scaler": ({}, [r"\[\]", "loss_scaler0", "num_losses=1"]),
    "a missing entry": (
        {"loss_scaler0": {"loss_scale": 4.0}},
        ["loss_scaler0", "unskipped", r"\{'loss_scale': 4.0\}"],
    ),
    "a surplus entry": (
        {"loss_scaler0": {**scaler(4.0, 1), "window": 5}},
        ["loss_scaler0", "window", "unskipped"],
    ),
    "an entry that is a number": (
        {"loss_scaler0": 65536.0},
        ["loss_scaler0", "loss_scale", "65536.0"],
    ),
}
SCALES = [0.0, -2.0, np.nan, np.inf, -np.inf, 2.0**127, "4", True, None, [4.0], 1e-40]
COUNTS = [-1, 0.5, np.nan, np.inf, "4", True, None, [1]]


@pytest.mark.message
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named(name):
    given, words = WRONG[name]
    with pytest.raises(ValueError) as error:
        jamp.load_state_dict(make(), given)
    for word in words:
        assert error.match(word)


@pytest.mark.message
@pytest.mark.parametrize("value", SCALES, ids=repr)
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_scale_must_be_a_positive_finite_number(level, value):
    with pytest.raises(ValueError) as error:
        jamp.load_state_dict(make(level), {"loss_scaler0": scaler(value, 1)})
    assert repr(value) in str(error.value)
    assert "loss_scaler0['loss_scale']" in str(error.value)
    assert "finite" in str(error.value)


@pytest.mark.message
@pytest.mark.parametrize("value", COUNTS, ids=repr)
def test_unskipped_must_be_a_count(value):
    with pytest.raises(ValueError) as error:
        jamp.load_state_dict(make(), {"loss_scaler0": scaler(4.0, value)})
    assert repr(value) in str(error.value)
    assert "loss_scaler0['unskipped']" in str(error.value)


def test_a_count_beyond_int32_is_an_error_and_not_wrapped():
    with pytest.raises((ValueError, OverflowError)):
        jamp.load_state_dict(make(), {"loss_scaler0": scaler(4.0, 2**31)})


def test_all_is_checked_before_anything_is_loaded():
    # apex_semantics 5.5: apex had loaded what it saw before it raised.
    state = make(num_losses=2)
    given = {"loss_scaler0": scaler(4.0, 1), "loss_scaler1": scaler(-1.0, 1)}
    with pytest.raises(ValueError):
        jamp.load_state_dict(state, given)
    assert jamp.state_dict(state) == jamp.state_dict(make(num_losses=2))
    assert given["loss_scaler0"] == scaler(4.0, 1)


def test_numbers_of_numpy_and_jax_are_numbers():
    given = {"loss_scaler0": scaler(np.float32(4.0), jnp.int32(7))}
    loaded = jamp.load_state_dict(make(), given)
    assert jamp.state_dict(loaded) == {"loss_scaler0": scaler(4.0, 7)}


@pytest.mark.message
def test_they_take_states_and_mappings_outside_of_jit():
    state = make()
    for call in (
        lambda: jamp.state_dict(state.params),
        lambda: jamp.load_state_dict(state.params, ONE),
    ):
        with pytest.raises(TypeError, match="AmpState, got dict"):
            call()
    with pytest.raises(TypeError, match="mapping, got list"):
        jamp.load_state_dict(state, [ONE])
    with pytest.raises(TypeError, match="outside of `jit`"):
        jax.jit(lambda s: jamp.state_dict(s)["loss_scaler0"]["loss_scale"])(state)
