"""Test loss scale rules against a pure Python oracle, and their limits."""

import dataclasses
import functools
import math
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from hypothesis import given, settings, strategies as st

import jamp
from jamp._scaling.rules import lowest_scale
from tests.oracles import loss_scale as oracle
from tests.support.states import make

F32 = np.finfo(np.float32)
SMALLEST = float(F32.smallest_normal)
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


@functools.partial(jax.jit, static_argnums=0)
def run(rule, flags):
    """Returns the LossScaleState after each flag."""

    def step(state, finite):
        state = rule.update(state, finite)
        return state, state

    return jax.lax.scan(step, rule.init(), flags)[1]


def run_oracle(rule, flags):
    state, states = oracle.init(rule), []
    for finite in flags:
        state = oracle.update(rule, state, bool(finite))
        states.append(state)
    return states


def assert_same(rule, states, expected):
    exact = math.frexp(rule.factor)[0] == 0.5  # a power of two
    scales = [s.scale for s in expected]
    np.testing.assert_allclose(states.scale, scales, rtol=0 if exact else 1e-5)
    for name in ("unskipped", "consecutive_skips"):
        wanted = [getattr(s, name) for s in expected]
        np.testing.assert_array_equal(getattr(states, name), wanted)
    # apex's tracker continues below zero with the same meaning.
    left = [max(s.hysteresis, 0) for s in expected]
    np.testing.assert_array_equal(np.maximum(states.hysteresis, 0), left)


def advance(rule, flags, state=None):
    state = rule.init() if state is None else state
    for finite in flags:
        state = rule.update(state, jnp.asarray(finite))
    return state


# Fair coins seldom reach a window or a floor, unlike runs of equal flags.
RUNS = st.lists(st.tuples(st.booleans(), st.integers(1, 12)), min_size=1)
FLAGS = st.one_of(
    st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH),
    RUNS.map(lambda runs: ([x for x, n in runs for _ in range(n)] * LENGTH)[:LENGTH]),
)


@settings(max_examples=60)
@given(rule=st.sampled_from(RULES), flags=FLAGS)
def test_update_matches_oracle_on_any_sequence(rule, flags):
    assert tuple(ours(rule).init()) == dataclasses.astuple(oracle.init(rule))
    assert_same(rule, run(ours(rule), np.array(flags)), run_oracle(rule, flags))


POWERS = st.integers(-126, 126).map(lambda k: 2.0**k)
SCALES = POWERS | st.floats(2.0**-126, 2.0**126, width=32)
SETTINGS = st.builds(
    lambda scales, floor, **rest: oracle.Rule(
        min_scale=scales[0] if floor else None,
        init_scale=scales[1],
        max_scale=scales[2],
        **rest,
    ),
    scales=st.tuples(SCALES, SCALES, SCALES).map(sorted),
    floor=st.booleans(),
    factor=st.sampled_from([2.0, 4.0]) | st.floats(1.0078125, 2.0**20, width=32),
    window=st.integers(1, 6),
    hysteresis=st.integers(1, 4),
)


@settings(max_examples=20)
@given(rule=SETTINGS, flags=st.lists(st.booleans(), min_size=1, max_size=12))
def test_update_matches_oracle_for_any_rule_without_jit(rule, flags):
    last = advance(ours(rule), flags)
    states = jax.tree.map(lambda x: np.asarray(x)[None], last)
    assert_same(rule, states, run_oracle(rule, flags)[-1:])


@pytest.mark.parametrize("before", [1, 2, 4])
@pytest.mark.parametrize("skipped", [0, 1, 2, 3])
def test_hysteresis_counts_the_row_of_overflows_whatever_rule_began_it(before, skipped):
    row = [True] + [False] * skipped
    old, new = (jamp.DynamicLossScale(hysteresis=n) for n in (before, 3))
    start = advance(old, row)
    for total in range(skipped + 1, 6):
        after = advance(new, [False] * (total - skipped), start)
        falls = max(total - max(skipped, 2), 0)  # from the third overflow on
        assert after.scale == start.scale / 2.0**falls


def test_hysteresis_holds_after_replace_and_across_checkpoints():
    one, four = (jamp.DynamicLossScale(hysteresis=n) for n in (1, 4))
    first, target = (make("O2", jnp.ones(2), loss_scale=rule) for rule in (one, four))
    bad = jnp.full(2, jnp.inf)
    overflowed = first.apply_gradients(grads=bad)
    for state, left in ((first, 4), (overflowed, 3)):
        checkpoint = jamp.to_checkpoint(state)
        flax = serialization.to_state_dict(state)
        for now in (
            state.replace(loss_scale_rules=(four,)),
            jamp.from_checkpoint(target, checkpoint),
            serialization.from_state_dict(target, flax),
        ):
            scale = now.loss_scale
            for skips in range(left):
                assert now.loss_scale == scale, skips
                now = now.apply_gradients(grads=bad)
            assert now.loss_scale == scale / 2
    # A rule with a smaller hysteresis accepts a larger count.
    back = jamp.from_checkpoint(first, jamp.to_checkpoint(target))
    assert back.apply_gradients(grads=bad).loss_scale == 2.0**15


def test_a_loss_that_always_overflows_lowers_a_shared_scale_despite_hysteresis():
    rule = jamp.DynamicLossScale(hysteresis=3)
    state = make("O2", jnp.ones(2), loss_scale=rule)
    bad, good = jnp.full(2, jnp.inf), jnp.zeros(2)
    scales = []
    for _ in range(4):
        state = state.apply_gradients(grads=(bad, good), loss_id=(0, 0))
        scales.append(float(state.loss_scale))
    assert scales == [2.0**16, 2.0**16, 2.0**15, 2.0**14]


def test_counter_still_resets_at_the_ceiling():
    rule = jamp.DynamicLossScale(init_scale=2.0**24, window=2)
    state = advance(rule, [True, True])
    assert (state.scale, state.unskipped) == (2.0**24, 0)
    # A checkpoint may come from a run with a longer window.
    late = state._replace(scale=jnp.float32(8), unskipped=jnp.int32(5))
    assert tuple(rule.update(late, True)) == (16.0, 0, 1, 0)


@pytest.mark.parametrize("factor", [2.0, 1000.0])
def test_scale_never_reaches_zero(factor):
    rule = jamp.DynamicLossScale(factor=factor, window=1)
    states = run(rule, np.zeros(200, bool))
    assert np.all(np.asarray(states.scale) >= SMALLEST)
    assert np.all(np.diff(states.scale) <= 0)
    state = jax.tree.map(lambda x: x[-1], states)
    assert (state.scale, state.consecutive_skips) == (SMALLEST, 200)
    # At the floor, the rule still scales, unscales and grows.
    assert rule.scale_loss(jnp.float32(4.0), state) == 2.0**-124
    assert rule.unscale({"w": jnp.float32(2.0**-124)}, state)["w"] == 4.0
    np.testing.assert_allclose(rule.update(state, True).scale, SMALLEST * factor)
    assert lowest_scale(jamp.DynamicLossScale(min_scale=0)) == SMALLEST


@pytest.mark.parametrize("factor", [2.0, 1e30])
def test_scale_never_reaches_inf(factor):
    for most in (2.0**126, None):
        rule = jamp.DynamicLossScale(2.0**125, factor, window=1, max_scale=most)
        state = advance(rule, [True] * 3)
        assert state.scale == 2.0**126
        # XLA flushes 1 / 2^127 to zero, and all gradients with it.
        assert rule.unscale({"w": jnp.float32(2.0**127)}, state)["w"] == 2.0
        assert advance(rule, [False], state).scale < state.scale


def test_states_have_strong_fixed_dtypes_and_no_array_twice():
    dynamic, static = jamp.DynamicLossScale(), jamp.StaticLossScale(2.0, check=True)
    for rule in (dynamic, static, jamp.StaticLossScale(2.0)):
        for state in (rule.init(), advance(rule, [True]), advance(rule, [False])):
            types = jax.tree.map(jax.typeof, dynamic.init())
            assert jax.tree.map(jax.typeof, state) == types
    scalar = ["float32[]", "int32[]", "int32[]", "int32[]"]
    assert [str(x) for x in types] == scalar  # weak types have a ~
    leaves = jax.tree.leaves([dynamic.init(), static.init()])
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves) == 8


@pytest.mark.parametrize("check", [False, True])
def test_static_scale_never_moves_but_counts(check):
    rule = jamp.StaticLossScale(128.0, check=check)
    states = run(rule, np.array([True, True, False, False, True]))
    assert states.scale.tolist() == [128.0] * 5
    wanted = ([1, 2, 0, 0, 1], [0, 0, 1, 2, 0]) if check else ([1, 2, 3, 4, 5], [0] * 5)
    assert (states.unskipped.tolist(), states.consecutive_skips.tolist()) == wanted
    assert (rule.check, rule.moves) == (check, False)


def test_unscale_returns_fp32_and_leaves_the_rest_alone():
    rule = jamp.StaticLossScale(1024.0)
    tree = {
        "half": jnp.array([6e-8, 2048.0, jnp.inf, -jnp.inf, jnp.nan], jnp.float16),
        "brain": [jnp.array(3.0, jnp.bfloat16), None],
        "single": jnp.array([1.0, 5.0], jnp.float32),
        "int": jnp.array([7, 8], jnp.int32),
        "float0": np.zeros(2, jax.dtypes.float0),
        "key": jax.random.key(3),
    }
    out = rule.unscale(tree, rule.init())
    # 6e-8 rounds to 2^-24, half's smallest number. Only float32 holds the quotient.
    half = np.float32([2.0**-34, 2.0, np.inf, -np.inf, np.nan])
    wanted = tree | {
        "half": half,
        "brain": [np.float32(3 / 1024), None],
        "single": np.float32([1 / 1024, 5 / 1024]),
    }
    assert jax.tree.structure(out) == jax.tree.structure(wanted)
    for got, x in zip(jax.tree.leaves(out), jax.tree.leaves(wanted), strict=True):
        assert got.dtype == x.dtype
        assert got is x or np.array_equal(got, x, equal_nan=True)
    for rule in (jamp.StaticLossScale(3.0), jamp.DynamicLossScale(3 * 2.0**15)):
        for dtype in (jnp.float16, jnp.bfloat16, jnp.float32):
            scaled = rule.scale_loss(jnp.asarray(3.5, dtype), rule.init())
            assert (scaled.dtype, scaled) == (jnp.float32, 3.5 * rule.init().scale)
            unscaled = rule.unscale(scaled, rule.init())
            np.testing.assert_allclose(unscaled, 3.5, rtol=1e-6)


def test_rules_are_frozen_and_compare_hash_and_pickle_by_value():
    fields = len(dataclasses.fields(jamp.DynamicLossScale))
    every = [
        lambda x: jamp.DynamicLossScale(*[x] * fields),
        lambda x: jamp.StaticLossScale(x),
        lambda x: jamp.StaticLossScale(x, check=True),
    ]
    for rule in every:
        copies = [rule(x) for x in (np.float32(8.0), jnp.float32(8.0), 8)]
        copies.append(pickle.loads(pickle.dumps(rule(8.0))))
        assert {rule(8.0)} == {rule(8.0), *copies}
    assert len({rule(8.0) for rule in every}) == len(every)
    # The defaults are apex's.
    defaults = (2.0**16, 2.0, 2000, None, 2.0**24, 1)
    assert dataclasses.astuple(jamp.DynamicLossScale()) == defaults
    assert jamp.StaticLossScale(2.0).check is False


NAN, INF = float("nan"), float("inf")
REACH = r"number between 2\*\*-126 and 2\*\*126"
REFUSED = [
    *[("factor", x, "greater than 1") for x in (1.0, 0.5, 0.0, -2.0, NAN, INF, None)],
    *[("window", x, "at least 1") for x in (0, -1, 1.5, True, INF, None, "7")],
    *[("hysteresis", x, "at least 1") for x in (0, -1, 1.5, False)],
    *[("init_scale", x, REACH) for x in (0.0, -1.0, NAN, INF, 2.0**127, None)],
    *[("min_scale", x, REACH) for x in (-1.0, NAN, INF, 2.0**127, "1")],
    *[("max_scale", x, REACH) for x in (0.0, -1.0, NAN, 2.0**127)],
    *[("scale", x, REACH) for x in (0.0, -1.0, NAN, INF, 1e39, 1e-46, 2.0**127)],
    ("scale", True, REACH),
]


@pytest.mark.parametrize("name, value, words", REFUSED, ids=str)
def test_bad_settings_are_refused(name, value, words):
    rule = jamp.StaticLossScale if name == "scale" else jamp.DynamicLossScale
    words = rf"`{name}` must be .*{words}.*got {re.escape(repr(value))}"
    with pytest.raises(ValueError, match=words):
        rule(**{name: value})


def test_floor_ceiling_and_start_must_be_ordered():
    for most, words in ((8.0, ""), (16.0, " `init_scale`")):
        with pytest.raises(ValueError, match=f"`min_scale` must not exceed{words}"):
            jamp.DynamicLossScale(8.0, min_scale=16.0, max_scale=most)
