"""Loss scale rules against a pure Python oracle, and what they promise beside it."""

import dataclasses
import functools
import math
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

import jamp
from tests.oracles import loss_scale as oracle

F32_MAX = float(np.finfo(np.float32).max)
LENGTH = 48

RULES = [
    oracle.Rule(window=3),
    oracle.Rule(window=1, max_scale=2.0**18),
    oracle.Rule(window=4, min_scale=2.0**10, max_scale=2.0**20),
    oracle.Rule(window=2, factor=4.0, hysteresis=3),
    oracle.Rule(window=3, factor=1.5, hysteresis=2, init_scale=2.0**10, min_scale=1.0),
    oracle.Rule(window=5, min_scale=2.0**16, max_scale=2.0**16),
    oracle.Rule(window=2, init_scale=2.0**-124, max_scale=2.0**-120, hysteresis=2),
]


def ours(rule):
    return jamp.DynamicLossScale(**dataclasses.asdict(rule))


@functools.cache
def run(rule):
    """Jitted: (LENGTH,) flags -> the LossScaleState after each of them."""

    def step(state, finite):
        state = ours(rule).update(state, finite)
        return state, state

    return jax.jit(lambda flags: jax.lax.scan(step, ours(rule).init(), flags)[1])


def run_oracle(rule, flags):
    state, states = oracle.init(rule), []
    for finite in flags:
        state = oracle.update(rule, state, bool(finite))
        states.append(state)
    return states


def assert_same(rule, states, expected):
    exact = math.frexp(rule.factor)[0] == 0.5  # powers of two lose no bit
    scales = [s.scale for s in expected]
    np.testing.assert_allclose(states.scale, scales, rtol=0 if exact else 1e-5)
    np.testing.assert_array_equal(states.unskipped, [s.unskipped for s in expected])
    skips = [s.consecutive_skips for s in expected]
    np.testing.assert_array_equal(states.consecutive_skips, skips)
    # Below zero the tracker means what it means at zero.
    left = [max(s.hysteresis, 0) for s in expected]
    np.testing.assert_array_equal(np.maximum(states.hysteresis, 0), left)


def advance(rule, flags, state=None):
    state = rule.init() if state is None else state
    for finite in flags:
        state = rule.update(state, jnp.asarray(finite))
    return state


# The oracle itself, on values worked out by hand


def test_oracle_grows_and_backs_off_as_worked_out_by_hand():
    rule = oracle.Rule(window=2, max_scale=2.0**17)
    states = run_oracle(rule, [True, True, True, False, True, True, True, True])
    assert [s.scale for s in states] == [
        2.0**k for k in (16, 17, 17, 16, 16, 17, 17, 17)
    ]
    assert [s.unskipped for s in states] == [1, 0, 1, 0, 1, 0, 1, 0]


def test_oracle_tolerates_hysteresis_minus_one_overflows():
    rule = oracle.Rule(hysteresis=3)
    states = run_oracle(rule, [False, False, False, False, True, False, False, False])
    assert [s.scale for s in states] == [
        2.0**k for k in (16, 16, 15, 14, 14, 14, 14, 13)
    ]


# Dynamic rule


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_init_matches_oracle(rule):
    state, expected = ours(rule).init(), oracle.init(rule)
    assert isinstance(state, jamp.LossScaleState)
    assert state._fields == ("scale", "unskipped", "hysteresis", "consecutive_skips")
    assert tuple(map(float, state)) == dataclasses.astuple(expected)


@settings(max_examples=150)
@given(
    rule=st.sampled_from(RULES),
    flags=st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH),
)
def test_update_matches_oracle_on_any_sequence(rule, flags):
    assert_same(rule, run(rule)(np.array(flags)), run_oracle(rule, flags))


@settings(max_examples=60)
@given(rule=st.sampled_from(RULES), data=st.data())
def test_update_matches_oracle_where_overflows_are_rare_or_common(rule, data):
    # Fair coins seldom reach a window or a floor: draw runs instead.
    runs = data.draw(
        st.lists(
            st.tuples(st.booleans(), st.integers(1, 12)), min_size=1, max_size=LENGTH
        )
    )
    flags = [flag for flag, n in runs for _ in range(n)]
    flags = (flags * LENGTH)[:LENGTH]
    assert_same(rule, run(rule)(np.array(flags)), run_oracle(rule, flags))


@settings(max_examples=25)
@given(
    rule=st.builds(
        oracle.Rule,
        init_scale=st.sampled_from([1.0, 2.0**8, 2.0**16]),
        factor=st.sampled_from([2.0, 4.0, 8.0]),
        window=st.integers(1, 6),
        min_scale=st.sampled_from([None, 2.0**-10, 0.5, 1.0]),
        max_scale=st.sampled_from([2.0**16, 2.0**20, 2.0**60]),
        hysteresis=st.integers(1, 4),
    ),
    flags=st.lists(st.booleans(), min_size=1, max_size=12),
)
def test_update_matches_oracle_for_any_rule_without_jit(rule, flags):
    last = advance(ours(rule), flags)
    states = jax.tree.map(lambda x: np.asarray(x)[None], last)
    assert_same(rule, states, run_oracle(rule, flags)[-1:])


def test_scale_doubles_on_the_2000th_clean_step():
    rule = jamp.DynamicLossScale()
    flags = jnp.ones(4001, bool)

    def step(state, finite):
        state = rule.update(state, finite)
        return state, state

    states = jax.jit(lambda f: jax.lax.scan(step, rule.init(), f)[1])(flags)
    assert states.scale[1998] == 2.0**16
    assert states.scale[1999] == 2.0**17
    assert states.scale[3998] == 2.0**17
    assert states.scale[3999] == 2.0**18
    assert states.unskipped[1998] == 1999
    assert states.unskipped[1999] == 0


def test_an_overflow_restarts_the_window():
    rule = jamp.DynamicLossScale(window=3)
    state = advance(rule, [True, True, False, True, True])
    assert (state.scale, state.unskipped) == (2.0**15, 2)
    assert rule.update(state, jnp.asarray(True)).scale == 2.0**16


def test_counter_still_resets_at_the_ceiling():
    rule = jamp.DynamicLossScale(init_scale=2.0**24, window=2)
    state = advance(rule, [True, True])
    assert (state.scale, state.unskipped) == (2.0**24, 0)


def test_a_floor_stops_the_fall():
    rule = jamp.DynamicLossScale(init_scale=8.0, min_scale=3.0)
    assert advance(rule, [False]).scale == 4.0
    assert advance(rule, [False] * 5).scale == 3.0


@functools.cache
def fall(rule):
    def step(state, _):
        state = rule.update(state, jnp.asarray(False))
        return state, state.scale

    return jax.jit(lambda: jax.lax.scan(step, rule.init(), None, length=1200))()


@pytest.mark.parametrize("factor", [2.0, 1000.0])
def test_scale_never_reaches_zero(factor):
    state, scales = fall(jamp.DynamicLossScale(factor=factor))
    assert np.all(np.asarray(scales) >= np.finfo(np.float32).smallest_normal)
    assert np.all(np.diff(scales) <= 0)
    assert state.scale == np.finfo(np.float32).smallest_normal
    assert state.consecutive_skips == 1200


def test_the_lowest_scale_still_scales_and_unscales():
    rule = jamp.DynamicLossScale()
    state, _ = fall(rule)
    scaled = rule.scale_loss(jnp.float32(4.0), state)
    assert scaled == 2.0**-124
    back = rule.unscale({"w": jnp.float32(2.0**-124)}, state)
    assert back["w"] == 4.0


def test_the_lowest_scale_grows_again():
    rule = jamp.DynamicLossScale(window=1)
    state, _ = fall(rule)
    assert rule.update(state, jnp.asarray(True)).scale == 2.0**-125


@pytest.mark.parametrize("factor", [2.0, 1e30])
def test_scale_never_reaches_inf(factor):
    rule = jamp.DynamicLossScale(
        init_scale=2.0**126, factor=factor, window=1, max_scale=F32_MAX
    )
    state = advance(rule, [True] * 5)
    assert np.isfinite(state.scale)
    assert state.scale >= 2.0**126
    assert advance(rule, [False], state).scale < state.scale


def test_states_have_strong_fixed_dtypes():
    rule = jamp.DynamicLossScale()
    for state in (rule.init(), advance(rule, [True]), advance(rule, [False])):
        dtypes = [x.dtype for x in state]
        assert dtypes == [jnp.float32, jnp.int32, jnp.int32, jnp.int32]
        assert [x.shape for x in state] == [()] * 4
        assert not any(x.weak_type for x in state)


def test_no_array_occurs_twice_in_a_state():
    states = [jamp.DynamicLossScale().init(), jamp.StaticLossScale(2.0).init()]
    leaves = jax.tree.leaves(states)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves) == 8


def test_jitted_update_traces_once_for_many_steps():
    rule, traces = jamp.DynamicLossScale(window=2), []

    @jax.jit
    def step(state, finite):
        traces.append(None)
        return rule.update(state, finite)

    state = rule.init()
    for finite in (True, True, False, True):
        state = step(state, jnp.asarray(finite))
    assert len(traces) == 1
    assert state.scale == 2.0**16


def test_update_under_vmap_keeps_the_lanes_apart():
    rule = RULES[3]
    flags = np.random.default_rng(0).random((3, LENGTH)) < 0.7
    together = jax.vmap(run(rule))(flags)
    for lane in range(3):
        states = jax.tree.map(lambda x, lane=lane: x[lane], together)
        assert_same(rule, states, run_oracle(rule, flags[lane]))


# Static rule


def test_static_scale_never_moves():
    rule = jamp.StaticLossScale(128.0)
    state = advance(rule, [True] * 3)
    assert (state.scale, state.unskipped) == (128.0, 3)
    assert advance(rule, [False] * 3, state).scale == 128.0


def test_checking_static_scale_never_moves_but_counts():
    rule = jamp.StaticLossScale(128.0, check=True)
    state = advance(rule, [True, False, False])
    assert (state.scale, state.consecutive_skips) == (128.0, 2)
    state = advance(rule, [True], state)
    assert (state.scale, state.consecutive_skips) == (128.0, 0)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
@pytest.mark.parametrize("check", [False, True])
def test_only_a_checking_static_scale_skips(level, check):
    state = jamp.initialize(
        {"w": jnp.ones(2, jnp.float32)},
        optax.sgd(0.5),
        level,
        loss_scale=jamp.StaticLossScale(1.0, check=check),
        verbosity=0,
    )
    grads = {"w": jnp.array([jnp.inf, 1.0], jnp.float32)}
    state = state.apply_gradients(grads=grads)
    assert state.params["w"][1] == (1.0 if check else 0.5)
    assert state.params["w"][0] == 1.0 or not check
    assert state.skipped_steps == int(check)


# Scaling and unscaling


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(
    "rule", [jamp.DynamicLossScale(), jamp.StaticLossScale(2.0**16)]
)
def test_scaled_loss_is_fp32_even_beyond_the_range_of_half(rule, dtype):
    scaled = rule.scale_loss(jnp.asarray(3.5, dtype), rule.init())
    assert scaled.dtype == jnp.float32
    assert scaled == 3.5 * 2.0**16


def test_unscale_returns_fp32_and_leaves_the_rest_alone():
    rule = jamp.StaticLossScale(1024.0)
    tree = {
        "half": jnp.array([6e-8, 2048.0], jnp.float16),
        "brain": [jnp.array(3.0, jnp.bfloat16), None],
        "single": jnp.array([1.0, 5.0], jnp.float32),
        "int": jnp.array([7, 8], jnp.int32),
        "bool": jnp.array(True),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(3),
    }
    out = rule.unscale(tree, rule.init())
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    # 6e-8 is 2^-24 in half, its smallest number: the quotient lives only in fp32.
    np.testing.assert_array_equal(out["half"], np.float32([2.0**-34, 2.0]))
    np.testing.assert_array_equal(out["brain"][0], np.float32(3 / 1024))
    np.testing.assert_array_equal(out["single"], np.float32([1 / 1024, 5 / 1024]))
    np.testing.assert_array_equal(out["int"], [7, 8])
    for name in ("half", "single"):
        assert out[name].dtype == jnp.float32
    assert out["brain"][0].dtype == jnp.float32
    for name in ("int", "bool", "float0", "key"):
        assert out[name].dtype == tree[name].dtype
    assert jnp.array_equal(
        jax.random.key_data(out["key"]), jax.random.key_data(tree["key"])
    )


def test_unscale_undoes_scale_loss_for_a_scale_that_is_no_power_of_two():
    rule = jamp.StaticLossScale(3.0)
    state = rule.init()
    grads = jax.grad(lambda w: rule.scale_loss(w * 5.0, state))(jnp.float32(1.0))
    np.testing.assert_allclose(rule.unscale(grads, state), 5.0, rtol=1e-6)


def test_non_finite_gradients_stay_non_finite():
    rule = jamp.DynamicLossScale()
    tree = jnp.array([jnp.inf, -jnp.inf, jnp.nan, 1.0], jnp.float16)
    out = rule.unscale(tree, rule.init())
    assert [bool(jnp.isfinite(x)) for x in out] == [False, False, False, True]


# Rules are values

VALUES = [
    lambda: jamp.DynamicLossScale(init_scale=2.0**8, window=7, min_scale=1.0),
    lambda: jamp.StaticLossScale(128.0),
    lambda: jamp.StaticLossScale(128.0, check=True),
]


@pytest.mark.parametrize("make", VALUES)
def test_rules_compare_hash_and_pickle_by_value(make):
    copy = pickle.loads(pickle.dumps(make()))
    assert make() == make() == copy
    assert hash(make()) == hash(make()) == hash(copy)
    assert len({m() for m in VALUES}) == len(VALUES)


@pytest.mark.parametrize(
    "rule, field",
    [(jamp.DynamicLossScale(), "window"), (jamp.StaticLossScale(2.0), "scale")],
)
def test_rules_are_frozen(rule, field):
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(rule, field, 3)


@pytest.mark.parametrize("scalar", [np.float32(8.0), jnp.float32(8.0), 8], ids=type)
def test_rules_built_from_scalars_of_any_kind_are_equal_and_hashable(scalar):
    expected = jamp.DynamicLossScale(init_scale=8.0, factor=8.0, min_scale=8.0)
    got = jamp.DynamicLossScale(init_scale=scalar, factor=scalar, min_scale=scalar)
    assert got == expected
    assert hash(got) == hash(expected)
    assert jamp.StaticLossScale(scalar) == jamp.StaticLossScale(8.0)
    assert hash(jamp.StaticLossScale(scalar)) == hash(jamp.StaticLossScale(8.0))


def test_defaults_are_apexs():
    expected = dict(
        init_scale=2.0**16,
        factor=2.0,
        window=2000,
        min_scale=None,
        max_scale=2.0**24,
        hysteresis=1,
    )
    rule = jamp.DynamicLossScale()
    assert {name: getattr(rule, name) for name in expected} == expected


# Validation

NAN, INF = float("nan"), float("inf")
BAD = [
    *[("factor", x) for x in (1.0, 0.5, 0.0, -2.0, NAN, INF)],
    *[("window", x) for x in (0, -1, 1.5, True)],
    *[("hysteresis", x) for x in (0, -1, 1.5)],
    *[("init_scale", x) for x in (0.0, -1.0, NAN, INF, 1e39, 1e-46)],
    *[("min_scale", x) for x in (-1.0, NAN, INF)],
    *[("max_scale", x) for x in (0.0, -1.0, NAN)],
]


@pytest.mark.parametrize("name, value", BAD, ids=lambda x: str(x))
def test_dynamic_rule_refuses_senseless_settings(name, value):
    words = rf"(?s){name}.*{re.escape(str(value))}"
    with pytest.raises((ValueError, TypeError), match=words):
        jamp.DynamicLossScale(**{name: value})


@pytest.mark.parametrize("value", [0.0, -1.0, NAN, INF, 1e39, 1e-46], ids=str)
def test_static_rule_refuses_senseless_scales(value):
    with pytest.raises(
        (ValueError, TypeError), match=rf"(?s)scale.*{re.escape(str(value))}"
    ):
        jamp.StaticLossScale(value)


def test_a_floor_above_the_ceiling_is_refused():
    with pytest.raises(
        ValueError, match=r"(?s)min_scale.*max_scale|max_scale.*min_scale"
    ):
        jamp.DynamicLossScale(min_scale=2.0**10, max_scale=2.0**9)
