"""redo_on_overflow: the same batch again at a lower scale, instead of a skip."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from tests import hlo
from tests.bits import assert_same_bits
from tests.subprocesses import on_devices

# Compiling takes the time, running none.
FAST = {"xla_backend_optimization_level": 0}
SGD = optax.sgd(0.5, momentum=0.5)  # the same object each time: jit compares it
quick = functools.partial(jax.jit, compiler_options=FAST)


def params():
    return {
        "w": jnp.asarray([1.0, -2.0, 0.5], jnp.float32),
        "norm": {"scale": jnp.asarray(3.0, jnp.float32)},
    }


def make(level="O2", tree=None, tx=SGD, **kwargs):
    tree = params() if tree is None else tree
    kwargs.setdefault("keep_fp32", "norm" if level in ("O2", "O3", "O5") else None)
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def wide(x):
    return x.astype(jnp.float32)


def dot(p, x):
    """Its gradient for each w is x, which overflows float16 where x * scale does."""
    return (wide(p["w"]) * x).sum() + wide(p["norm"]["scale"]) * 2.0**-10


def rescaled(state, scale, loss_id=0):
    scales = list(state.loss_scales)
    scales[loss_id] = scales[loss_id]._replace(scale=jnp.float32(scale))
    return state.replace(loss_scales=tuple(scales))


@functools.cache
def stepper(loss_fn=dot, times=0, **options):
    """Jitted: (state, *args) -> (next state, loss, grads)."""

    def step(state, *args):
        loss, grads = jamp.scaled_value_and_grad(
            loss_fn, redo_on_overflow=times, **options
        )(state, *args)
        return state.apply_gradients(grads=grads), loss, grads

    return quick(step)


@quick
def apply(state, grads):
    return state.apply_gradients(grads=grads)


def x_for(redos):
    """What the scale 2^16 must be halved `redos` times for: 65536 is inf in float16."""
    return jnp.float32(2.0 ** (redos - 1))


# How far the scale falls, and what the step is then


@pytest.mark.parametrize("redos", [0, 1, 2, 5])
def test_the_scale_falls_once_per_redo_and_nothing_is_skipped(redos):
    state, loss, grads = stepper(times=5)(make(), x_for(redos))
    scale = 2.0 ** (16 - redos)
    assert (grads.scale, grads.finite) == (scale, True)
    assert isinstance(grads.scale_state, jamp.LossScaleState)
    assert grads.scale_state.scale == scale
    np.testing.assert_array_equal(wide(grads.tree["w"]), x_for(redos) * scale)
    assert loss == -0.5 * x_for(redos) + 3 * 2.0**-10
    (after,) = state.loss_scales
    assert tuple(after) == (scale, 1, 1, 0)
    assert (state.step, state.skipped_steps, state.last_step_skipped) == (1, 0, False)


def test_a_redo_restarts_the_window():
    step = stepper(times=5)
    state = make()
    for redos, unskipped in ((0, 1), (0, 2), (3, 1), (0, 2)):
        state, *_ = step(state, x_for(redos))
        assert state.loss_scales[0].unskipped == unskipped
    assert (state.loss_scale, state.step) == (2.0**13, 4)


def test_the_scale_grows_again_after_the_window():
    rule = jamp.DynamicLossScale(window=2)
    state, scales = make(loss_scale=rule), []
    for redos in (2, 0, 0, 0):
        state, *_ = stepper(times=5)(state, x_for(redos))
        scales.append(float(state.loss_scale))
    assert scales == [2.0**14, 2.0**15, 2.0**15, 2.0**16]


@pytest.mark.parametrize("factor", [2.0, 4.0])
def test_it_falls_by_the_factor_of_the_rule(factor):
    state = make(loss_scale=jamp.DynamicLossScale(factor=factor))
    state, _, grads = stepper(times=5)(state, x_for(2))  # 2^14 fits, 2^15 does not
    assert grads.finite
    assert state.loss_scale == {2.0: 2.0**14, 4.0: 2.0**14}[factor]
    state, _, grads = stepper(times=5)(state, x_for(3))
    assert state.loss_scale == {2.0: 2.0**13, 4.0: 2.0**12}[factor]


def test_hysteresis_is_not_waited_for():
    state = make(loss_scale=jamp.DynamicLossScale(hysteresis=3))
    state, _, grads = stepper(times=5)(state, x_for(2))
    assert grads.scale == 2.0**14
    assert tuple(state.loss_scales[0]) == (2.0**14, 1, 3, 0)
    assert state.skipped_steps == 0


def curved(p, x):
    """A matmul and curvature, so that the bits depend on where it is rounded."""
    y = jnp.tanh(x.astype(p["w"].dtype) @ p["w"]) * 40
    return (wide(y) ** 2).mean()


CURVED = {"w": jnp.linspace(-1.0, 0.7, 12, dtype=jnp.float32).reshape(4, 3)}
BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_the_step_is_bit_for_bit_that_of_the_lower_scale_from_the_start(level):
    options = {"tree": CURVED, "keep_fp32": None, "loss_scale": "dynamic"}
    state = make(level, **options)
    redone, loss, grads = stepper(curved, times=9)(state, BATCH)
    assert 2.0 <= grads.scale < 2.0**15  # several redos
    assert (redone.step, redone.skipped_steps) == (1, 0)
    lower = rescaled(state, grads.scale)
    expected, expected_loss, plain = stepper(curved)(lower, BATCH)
    assert plain.finite
    assert_same_bits(loss, expected_loss)
    assert_same_bits(grads.tree, plain.tree)
    for name in ("params", "opt_state", "loss_scales", "step"):
        assert_same_bits(getattr(redone, name), getattr(expected, name))
    # One power of two higher it would not have been.
    _, _, higher = stepper(curved)(rescaled(state, 2 * grads.scale), BATCH)
    assert not higher.finite


def test_fused_optimizers_step_after_a_redo():
    tx = jamp.optimizers.fused_sgd(0.5, momentum=0.5)
    state = make(tx=tx)
    redone, _, grads = stepper(times=5)(state, x_for(3))
    assert (grads.scale, redone.skipped_steps) == (2.0**13, 0)
    expected, *_ = stepper()(rescaled(state, 2.0**13), x_for(3))
    assert_same_bits(redone.params, expected.params)
    assert_same_bits(redone.opt_state, expected.opt_state)


# How often it runs


def counted(calls):
    def loss_fn(p, x):
        jax.debug.callback(lambda x: calls.append(float(x)), x)
        return dot(p, x)

    return loss_fn


@pytest.mark.parametrize(
    "x, floor, runs",
    [
        (x_for(0), None, 1),
        (x_for(2), None, 3),
        (x_for(4), None, 5),
        (x_for(5), None, 5),  # one too many
        (jnp.float32(np.nan), None, 5),
        (jnp.float32(np.inf), 2.0**14, 3),  # 2^16, 2^15, and the floor itself
    ],
    ids=["clean", "two", "four", "five", "nan", "floor"],
)
def test_the_program_runs_once_and_once_more_per_redo(x, floor, runs):
    calls = []
    step = jamp.scaled_grad(counted(calls), redo_on_overflow=4)
    step(make(min_loss_scale=floor), x)
    jax.effects_barrier()
    assert len(calls) == runs


def test_the_program_is_there_once():
    state, x = make("O2", tree=CURVED, keep_fp32=None), BATCH
    texts = [
        stepper(curved, times=times).lower(state, x).compile().as_text()
        for times in (0, 3)
    ]
    plain, redone = (len(hlo.Program(text).products) for text in texts)
    assert plain == redone > 0
    assert [" while(" in text for text in texts] == [False, True]


def test_one_trace_serves_all_batches():
    traces = []

    def loss_fn(p, x):
        traces.append(None)
        return dot(p, x)

    step = stepper(loss_fn, times=5)
    state = make()
    before = jax.tree.map(jax.typeof, state)
    state, *_ = step(state, x_for(0))
    first = len(traces)
    for redos in (2, 0, 5, 9):
        state, *_ = step(state, x_for(redos))
    assert len(traces) == first
    assert step._cache_size() == 1
    assert jax.tree.map(jax.typeof, state) == before


# Given up


def test_when_all_redos_overflow_it_skips_and_falls_once_more():
    state = make()
    after, _, grads = stepper(times=2)(state, x_for(4))
    assert (grads.scale, grads.finite) == (2.0**14, False)
    assert tuple(after.loss_scales[0]) == (2.0**13, 0, 0, 1)
    assert (after.step, after.skipped_steps, after.last_step_skipped) == (0, 1, True)
    for name in ("params", "opt_state"):
        assert_same_bits(getattr(after, name), getattr(state, name))
    # The next batch goes on from there: 2^13, 2^12.
    after, _, grads = stepper(times=2)(after, x_for(4))
    assert (after.loss_scale, after.step, after.skipped_steps) == (2.0**12, 1, 1)


def test_skips_in_a_row_count_batches_and_not_attempts():
    state = make()
    for _ in range(3):
        state, *_ = stepper(times=4)(state, jnp.float32(np.nan))
    assert state.loss_scales[0].consecutive_skips == 3
    assert state.loss_scale == 2.0 ** (16 - 3 * 5)
    assert jamp.check(state, max_consecutive_skips=4) is None
    with pytest.raises(FloatingPointError, match="3 steps"):
        jamp.check(state, max_consecutive_skips=3)
    state, *_ = stepper(times=4)(state, x_for(0))
    assert state.loss_scales[0].consecutive_skips == 0


def test_it_stops_at_the_floor():
    state = make(min_loss_scale=2.0**14)
    after, _, grads = stepper(times=9)(state, x_for(5))
    assert (grads.scale, grads.finite) == (2.0**14, False)
    assert (after.loss_scale, after.skipped_steps) == (2.0**14, 1)
    assert_same_bits(after.params, state.params)
    with pytest.raises(FloatingPointError, match="16384"):
        jamp.check(after)


def test_a_batch_that_fits_at_the_floor_is_taken():
    rule = jamp.DynamicLossScale(min_scale=3 * 2.0**12)  # 2^16, 2^15, 2^14, 3 * 2^12
    state, _, grads = stepper(times=9)(make(loss_scale=rule), x_for(3))
    assert (grads.scale, grads.finite, state.skipped_steps) == (3 * 2.0**12, True, 0)


# Options


@pytest.mark.parametrize("bad", [-1, 1.5, 2.0, True, "2", None], ids=repr)
def test_a_number_of_times_is_a_non_negative_int(bad):
    for call in (
        lambda: jamp.scaled_grad(dot, redo_on_overflow=bad)(make(), x_for(0)),
        lambda: jamp.scaled_value_and_grad(dot, redo_on_overflow=bad)(make(), x_for(0)),
        lambda: jamp.zero_grads(make(), redo_on_overflow=bad),
    ):
        with pytest.raises(ValueError, match="redo_on_overflow"):
            call()


@pytest.mark.parametrize("rule", [128.0, jamp.StaticLossScale(128.0, check=True)])
def test_a_static_scale_has_nothing_to_lower_and_warns(rule):
    state = make(loss_scale=rule)
    plain = quick(jamp.scaled_grad(dot))(state, x_for(3))
    for wrapper in (jamp.scaled_grad, jamp.scaled_value_and_grad):
        step = quick(wrapper(dot, redo_on_overflow=2))
        with pytest.warns(jamp.UnusedOptionWarning, match="redo_on_overflow"):
            grads = step(state, x_for(3))
        grads = grads if wrapper is jamp.scaled_grad else grads[1]
        assert_same_bits(grads, plain)
        assert grads.scale_state is None
    with pytest.warns(jamp.UnusedOptionWarning, match="redo_on_overflow"):
        zeros = jamp.zero_grads(state, redo_on_overflow=2)
    assert zeros.scale_state is None


def test_a_static_scale_that_checks_skips_as_ever():
    state = make(loss_scale=jamp.StaticLossScale(2.0**16, check=True))
    with pytest.warns(jamp.UnusedOptionWarning):
        after, *_ = stepper(times=2)(state, x_for(1))
    assert (after.loss_scale, after.skipped_steps) == (2.0**16, 1)


def test_zero_times_is_no_redo():
    _, _, grads = stepper(times=0)(make(), x_for(1))
    assert (grads.scale, grads.finite, grads.scale_state) == (2.0**16, False, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        stepper(times=0)(make(loss_scale=8.0), x_for(1))
    assert jamp.zero_grads(make()).scale_state is None


@pytest.mark.parametrize("level", ["O0", "O5"])
def test_any_level_redoes_with_a_dynamic_scale(level):
    state = make(level, loss_scale="dynamic")
    state, _, grads = stepper(times=5)(state, jnp.float32(2.0**114))
    assert (grads.scale, state.step) == (2.0**13, 1)  # 2^128 is inf in fp32 and bf16


# aux


def test_aux_is_that_of_the_last_attempt_in_its_dtypes():
    def with_aux(p, x):
        aux = {
            "half": p["w"] * 2,
            "int": jnp.int32(7),
            "flag": x > 1,
            "none": None,
            "key": jax.random.key(3),
            "numbers": (1, 2.5),
            "numpy": np.float32([1.0, 2.0]),
        }
        return dot(p, x), aux

    step = jamp.scaled_value_and_grad(with_aux, has_aux=True, redo_on_overflow=5)
    (loss, aux), grads = quick(step)(make(), x_for(3))
    assert loss == -0.5 * x_for(3) + 3 * 2.0**-10
    assert grads.scale == 2.0**13
    np.testing.assert_array_equal(wide(aux["half"]), [2.0, -4.0, 1.0])
    assert aux["half"].dtype == jnp.float16
    assert (aux["int"], aux["int"].dtype, aux["flag"]) == (7, jnp.int32, True)
    assert (aux["none"], aux["numbers"]) == (None, (1, 2.5))
    np.testing.assert_array_equal(aux["numpy"], [1.0, 2.0])
    assert_same_bits(aux["key"], jax.random.key(3))


def test_scaled_grad_gives_aux_too():
    def with_aux(p, x):
        return dot(p, x), x * 2

    step = jamp.scaled_grad(with_aux, has_aux=True, redo_on_overflow=5)
    grads, aux = step(make(), x_for(3))
    assert (grads.scale, aux) == (2.0**13, 2 * x_for(3))


def test_batch_statistics_of_a_redone_batch_move_once():
    def with_stats(p, x, mean):
        return dot(p, x), 0.5 * mean + 0.5 * x

    @jax.jit
    def step(state, x):
        grads, mean = jamp.scaled_grad(with_stats, has_aux=True, redo_on_overflow=5)(
            state, x, state.mean
        )
        return state.apply_gradients(grads=grads, mean=mean)

    state = step(make(mean=jnp.float32(0.0)), x_for(3))
    assert (state.mean, state.step) == (x_for(3) / 2, 1)


@pytest.mark.parametrize("bad", ["text", print, object()], ids=["text", "fn", "object"])
def test_aux_that_is_no_array_is_named(bad):
    def with_aux(p, x):
        return dot(p, x), {"fine": x, "bad": [bad]}

    words = r"(?s)redo_on_overflow.*arrays.*\['bad'\]\[0\]"
    for wrapper in (jamp.scaled_grad, jamp.scaled_value_and_grad):
        step = wrapper(with_aux, has_aux=True, redo_on_overflow=1)
        with pytest.raises(TypeError, match=words):
            step(make(), x_for(0))
        wrapper(with_aux, has_aux=True)(make(), x_for(0))  # without it, as ever


# Several losses and groups


def groups(num_losses=2):
    trees = {
        k: {"w": jnp.asarray([v, 1], jnp.float32)} for k, v in (("a", 2), ("b", 3))
    }
    txs = dict.fromkeys("ab", SGD)
    return jamp.initialize(trees, txs, "O2", num_losses=num_losses, verbosity=0)


def both(p, x, y):
    return (wide(p["a"]["w"]) * x).sum() + (wide(p["b"]["w"]) * y).sum()


def test_only_the_scale_of_the_loss_that_was_redone_falls():
    state = groups()
    step = stepper(both, times=5, wrt="b", loss_id=1)
    after, _, grads = step(state, x_for(0), x_for(3))
    assert (grads.scale, grads.loss_id, grads.groups) == (2.0**13, 1, "b")
    assert after.loss_scale == (2.0**16, 2.0**13)
    assert_same_bits(after.loss_scales[0], state.loss_scales[0])
    assert after.loss_scales[1].unskipped == 1
    assert_same_bits(after.params["a"], state.params["a"])
    np.testing.assert_array_equal(wide(after.params["b"]["w"]), [1.0, -1.0])
    assert after.skipped_steps == {"a": 0, "b": 0}


def test_what_is_not_differentiated_is_not_redone():
    _, _, grads = stepper(both, times=5, wrt="b", loss_id=1)(
        groups(), jnp.float32(np.inf), x_for(0)
    )
    assert (grads.scale, grads.finite) == (2.0**16, True)


def test_two_losses_redone_differently_are_summed_each_at_its_scale():
    @quick
    def step(state, x, y):
        grads = tuple(
            jamp.scaled_grad(dot, loss_id=i, redo_on_overflow=5)(state, z)
            for i, z in enumerate((x, y))
        )
        return state.apply_gradients(grads=grads)

    state = step(make(num_losses=2), x_for(1), x_for(4))
    assert state.loss_scale == (2.0**15, 2.0**12)
    assert [s.unskipped for s in state.loss_scales] == [1, 1]
    expected = np.float32([1.0, -2.0, 0.5]) - 0.5 * (1.0 + 8.0)
    np.testing.assert_array_equal(jamp.master_params(state)["w"], expected)


def test_losses_that_share_a_scale_go_on_from_the_lower():
    @quick
    def step(state, x, y):
        grads = [jamp.scaled_grad(dot, redo_on_overflow=5)(state, z) for z in (x, y)]
        return state.apply_gradients(grads=grads)

    for x, y in ((1, 3), (3, 1)):
        state = step(make(), x_for(x), x_for(y))
        assert (state.loss_scale, state.step, state.skipped_steps) == (2.0**13, 1, 0)
        expected = np.float32([1.0, -2.0, 0.5]) - 0.5 * (1.0 + 4.0)
        np.testing.assert_array_equal(jamp.master_params(state)["w"], expected)


@pytest.mark.parametrize("window", [1, 3])
def test_losses_that_share_a_scale_grow_it_as_without_redo(window):
    state = make(loss_scale=jamp.DynamicLossScale(window=window))

    @functools.partial(quick, static_argnums=1)
    def step(state, times):
        grads = jamp.scaled_grad(dot, redo_on_overflow=times)(state, x_for(-4))
        return state.apply_gradients(grads=(grads, grads))

    plain, redone = state, state
    for _ in range(2):
        plain, redone = step(plain, 0), step(redone, 3)
        assert_same_bits(redone.loss_scales, plain.loss_scales)
    assert plain.loss_scale == 2.0 ** {1: 20, 3: 17}[window]  # 4 clean losses in all


# Sums


def accumulated(state, xs, times=5):
    def body(total, x):
        return total + jamp.scaled_grad(dot, redo_on_overflow=times)(state, x), None

    zeros = jamp.zero_grads(state, redo_on_overflow=times)
    return lax.scan(body, zeros, xs)[0]


accumulate = quick(accumulated)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_a_scan_sums_what_was_redone_at_different_scales(order):
    redos = np.array([0, 3, 1])[list(order)]
    state = make()
    total = accumulate(state, jnp.stack([x_for(k) for k in redos]))
    tree, finite = total.unscale()
    assert finite
    np.testing.assert_array_equal(tree["w"], np.full(3, 0.5 + 4.0 + 1.0))
    assert total.scale_state.scale == 2.0**13
    after = apply(state, total)
    assert tuple(after.loss_scales[0]) == (2.0**13, 1, 1, 0)
    assert (after.step, after.skipped_steps) == (1, 0)
    expected = np.float32([1.0, -2.0, 0.5]) - 0.5 * 5.5
    np.testing.assert_array_equal(jamp.master_params(after)["w"], expected)


def test_one_micro_batch_that_stays_bad_skips_the_sum():
    state = make()
    total = accumulate(state, jnp.stack([x_for(0), x_for(9), x_for(1)]))
    assert not total.finite
    after = apply(state, total)
    assert (after.loss_scale, after.skipped_steps) == (2.0**10, 1)  # 5 redos, a fall
    assert_same_bits(after.params, state.params)


def test_zeros_for_redone_gradients_begin_where_the_state_is():
    state = make(num_losses=2)
    state = rescaled(state, 2.0**9, loss_id=1)
    zeros = jamp.zero_grads(state, 1, redo_on_overflow=3)
    assert_same_bits(zeros.scale_state, state.loss_scales[1])
    assert (zeros.scale, zeros.loss_id) == (2.0**9, 1)


@pytest.mark.parametrize("swap", [False, True])
def test_of_two_micro_batches_the_lower_scale_wins(swap):
    state = make()
    (_, _, a), (_, _, b) = (stepper(times=5)(state, x_for(k)) for k in (1, 4))
    total = b + a if swap else a + b
    assert total.scale_state.scale == 2.0**12
    np.testing.assert_array_equal(total.unscale()[0]["w"], np.full(3, 9.0))
    mean = (total / 2).unscale()[0]["w"]
    np.testing.assert_array_equal(mean, np.full(3, 4.5))
    after = apply(state, total / 2)
    assert (after.loss_scale, after.loss_scales[0].unskipped) == (2.0**12, 1)


@pytest.mark.parametrize("swap", [False, True])
def test_redone_and_plain_gradients_add(swap):
    state = make()
    _, _, a = stepper(times=0)(state, x_for(0))
    _, _, b = stepper(times=5)(state, x_for(4))
    total = b + a if swap else a + b
    np.testing.assert_array_equal(total.unscale()[0]["w"], np.full(3, 8.5))
    assert apply(state, total).loss_scale == 2.0**12


# Clipping by hand, as docs/loss_scaling.md has it


def test_clipped_by_hand_the_scale_still_falls():
    state = make()
    _, _, grads = stepper(times=5)(state, x_for(3))
    tree, _ = grads.unscale()
    clipped = jax.tree.map(lambda g: g / 4, tree)
    grads = grads.replace(tree=clipped, scale=jnp.float32(1))
    after = apply(state, grads)
    assert (after.loss_scale, after.step) == (2.0**13, 1)
    np.testing.assert_array_equal(
        jamp.master_params(after)["w"], np.float32([1.0, -2.0, 0.5]) - 0.5
    )


# vmap and devices


def test_under_vmap_each_lane_has_its_own_scale():
    state, redos = make(), [0, 3, 1, 9]
    step = jax.vmap(jamp.scaled_value_and_grad(dot, redo_on_overflow=4), (None, 0))
    xs = jnp.stack([x_for(k) for k in redos])
    loss, grads = quick(step)(state, xs)
    np.testing.assert_array_equal(grads.scale, 2.0 ** (16 - np.float32([0, 3, 1, 4])))
    np.testing.assert_array_equal(grads.scale_state.scale, grads.scale)
    np.testing.assert_array_equal(grads.finite, [True, True, True, False])
    np.testing.assert_array_equal(loss, -0.5 * xs + 3 * 2.0**-10)
    tree, _ = jax.vmap(jamp.ScaledGrads.unscale)(grads)
    np.testing.assert_array_equal(tree["w"][:3], np.stack([xs[:3]] * 3, axis=-1))


def test_under_vmap_with_axis_name_all_lanes_redo_together():
    step = jamp.scaled_grad(dot, redo_on_overflow=5, axis_name="i")
    f = quick(jax.vmap(step, (None, 0), axis_name="i"))
    grads = f(make(), jnp.stack([x_for(0), x_for(3)]))
    np.testing.assert_array_equal(grads.scale, [2.0**13] * 2)
    np.testing.assert_array_equal(grads.finite, [True] * 2)
    mean = (0.5 + 4.0) / 2 * 2.0**13
    np.testing.assert_array_equal(grads.tree["w"], np.full((2, 3), mean))


@pytest.fixture(scope="module")
def two_devices():
    """What tests/two_devices_redo.py found on two virtual CPU devices."""
    return on_devices(2, "tests.two_devices_redo")


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_the_devices_redo_together(two_devices, check_vma):
    got = two_devices[f"redo/{check_vma}"]
    assert got["scales"] == [2.0**13, 2.0**13]  # one of them needs that
    assert got["finite"] == [True, True]
    assert got["grads"] == [[2.25 * 2.0**13] * 2] * 2


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_redone_step_in_shard_map_is_that_of_the_lower_scale(two_devices, check_vma):
    got = two_devices[f"step/{check_vma}"]
    assert got["redone"] == got["lower"]
    assert got["redone"]["loss_scale"] == 2.0**13
    assert got["redone"]["step"] == 1
    assert got["redone"]["skipped_steps"] == 0


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map_the_devices_give_up_together(two_devices, check_vma):
    got = two_devices[f"bad/{check_vma}"]
    assert (got["step"], got["skipped_steps"], got["loss_scale"]) == (0, 1, 2.0**10)
    assert got["params"] == [1.0, 1.0]


def test_sharded_arrays_under_jit_redo_without_axis_name(two_devices):
    got = two_devices["jit"]
    assert got["redone"] == got["lower"]
    assert got["redone"]["loss_scale"] == 2.0**13
