"""redo_on_overflow: the same batch again at a lower scale, instead of a skip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests import hlo
from tests.bits import assert_same_bits
from tests.states import SGD, assert_skipped, make, params, wide, with_scales

W = params()["w"]
DYNAMIC = jamp.DynamicLossScale


def dot(p, x):
    """Its gradient for each w is x, which overflows float16 where x * scale does."""
    return (wide(p["w"]) * x).sum() + wide(p["norm"]["scale"]) * 2.0**-10


@functools.cache
def stepper(loss_fn=dot, times=0, **options):
    """Jitted: (state, *args) -> (next state, loss, grads)."""
    both = jamp.scaled_value_and_grad(loss_fn, redo_on_overflow=times, **options)

    def step(state, *args):
        loss, grads = both(state, *args)
        return state.apply_gradients(grads=grads), loss, grads

    return jax.jit(step)


def x_for(redos):
    """What the scale 2^16 must be halved `redos` times for: 65536 is inf in float16."""
    return jnp.float32(2.0 ** (redos - 1))


def assert_moved(state, slope):
    """One step of SGD from the start."""
    np.testing.assert_array_equal(jamp.master_params(state)["w"], W - 0.5 * slope)


# How far the scale falls, and what the step is then

# By hand: a rule, how many redos it may take, and batches: how often each needs the
# scale halved (19 never fits); then log2 of the scale, and the counts of its state.
RUNS = {
    "a redo restarts the window": (
        (DYNAMIC(), 5),
        [(1, 15, 1, 1, 0), (1, 15, 2, 1, 0), (5, 11, 1, 1, 0), (0, 11, 2, 1, 0)],
    ),
    "it falls by the factor, grows, and waits for no hysteresis": (
        (DYNAMIC(factor=4.0, window=2, hysteresis=3), 5),
        [(1, 14, 1, 3, 0), (0, 16, 0, 3, 0), (3, 12, 1, 3, 0), (2, 14, 0, 3, 0)],
    ),
    # Where all redos overflow it falls once more; skips count batches, not attempts.
    "given up": (
        (DYNAMIC(), 2),
        [(4, 13, 0, 0, 1), (19, 10, 0, 0, 2), (19, 7, 0, 0, 3), (0, 7, 1, 1, 0)],
    ),
    "the floor": (
        (DYNAMIC(min_scale=2.0**13), 9),
        [(3, 13, 1, 1, 0), (5, 13, 0, 0, 1)],
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_scale_falls_once_per_redo_and_nothing_is_skipped(name):
    (rule, times), batches = RUNS[name]
    state = make(loss_scale=rule)
    for redos, power, *counts in batches:
        before, x = state, x_for(redos)
        state, loss, grads = stepper(times=times)(state, x)
        assert tuple(state.loss_scales[0]) == (2.0**power, *counts)
        assert isinstance(grads.scale_state, jamp.LossScaleState)
        assert grads.scale_state.scale == grads.scale
        if counts[-1]:
            assert_skipped(state, before)
            assert (state.skipped_steps, grads.finite) == (counts[-1], False)
            continue
        assert state.step == before.step + 1
        np.testing.assert_array_equal(wide(grads.tree["w"]), [x * grads.scale] * 3)
        assert before.step or loss == -0.5 * x + 3 * 2.0**-10
    if name == "the floor":
        with pytest.raises(FloatingPointError, match="8192"):
            jamp.check(state)


def curved(p, x):
    """A matmul and curvature, so that the bits depend on where it is rounded."""
    y = jnp.tanh(x.astype(p["w"].dtype) @ p["w"]) * 40
    return (wide(y) ** 2).mean()


CURVED = {"w": jnp.linspace(-1.0, 0.7, 12, dtype=jnp.float32).reshape(4, 3)}
BATCH = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4)), jnp.float32)
HUGE = jnp.float32(2.0**114)  # at 2^14 it is inf in fp32 and bf16
FUSED = jamp.optimizers.fused_sgd(0.5, momentum=0.5)


ROWS = [(level, CURVED, SGD, curved, BATCH) for level in ("O1", "O2", "O3")]
ROWS += [(level, None, SGD, dot, HUGE) for level in ("O0", "O5")]
ROWS += [("O2", None, FUSED, dot, x_for(3))]


@pytest.mark.parametrize("level, tree, tx, loss_fn, x", ROWS)
def test_the_step_is_bit_for_bit_that_of_the_lower_scale_from_the_start(
    level, tree, tx, loss_fn, x
):
    state = make(level, tree, tx, loss_scale="dynamic")
    redone, loss, grads = stepper(loss_fn, times=9)(state, x)
    assert 2.0 <= grads.scale < 2.0**15  # several redos
    assert (redone.step, redone.skipped_steps) == (1, 0)
    lower = with_scales(state, grads.scale)
    expected, expected_loss, plain = stepper(loss_fn)(lower, x)
    assert plain.finite
    assert_same_bits((loss, grads.tree), (expected_loss, plain.tree))
    assert_same_bits(redone, expected)
    # One power of two higher it would not have been.
    _, _, higher = stepper(loss_fn)(with_scales(state, 2 * grads.scale), x)
    assert not higher.finite


# How often it runs


@pytest.mark.parametrize(
    "x, floor, runs",
    [
        *((x_for(redos), None, redos + 1) for redos in (0, 4)),
        (x_for(5), None, 5),  # one too many
        (jnp.float32(np.inf), 2.0**14, 3),  # 2^16, 2^15, and the floor itself
    ],
    ids=str,
)
def test_the_program_runs_once_and_once_more_per_redo(x, floor, runs):
    calls = []

    def loss_fn(p, x):
        jax.debug.callback(lambda x: calls.append(float(x)), x)
        return dot(p, x)

    jamp.scaled_grad(loss_fn, redo_on_overflow=4)(make(min_loss_scale=floor), x)
    jax.effects_barrier()
    assert len(calls) == runs


def test_the_program_is_there_once_and_one_trace_serves_all_batches():
    state, traces = make("O2", CURVED), []

    def counted(p, x):
        traces.append(None)
        return curved(p, x)

    plain, redone = stepper(curved), stepper(counted, times=9)
    texts = [f.lower(state, BATCH).compile().as_text() for f in (plain, redone)]
    products = [len(hlo.Program(text).products) for text in texts]
    assert products[0] == products[1] > 0
    assert [" while(" in text for text in texts] == [False, True]
    types, before = jax.tree.map(jax.typeof, state), len(traces)
    for factor in (1, 0, np.nan, 2):
        state, *_ = redone(state, factor * BATCH)
    assert (len(traces), redone._cache_size()) == (before, 1)
    assert jax.tree.map(jax.typeof, state) == types


# Options


def test_a_number_of_times_is_a_non_negative_int():
    for bad in (-1, 2.0, True):
        for call, arg in ((jamp.scaled_grad, dot), (jamp.zero_grads, make())):
            with pytest.raises(ValueError, match=f"redo_on_overflow .* got {bad!r}"):
                call(arg, redo_on_overflow=bad)


@pytest.mark.parametrize("check", [False, True])
def test_a_static_scale_has_nothing_to_lower_and_warns(check):
    state = make(loss_scale=jamp.StaticLossScale(2.0**16, check=check))
    plain = stepper()(state, x_for(1))  # no warning
    words = "redo_on_overflow=2 has no effect"
    with pytest.warns(jamp.UnusedOptionWarning, match=words):
        assert_same_bits(stepper(times=2)(state, x_for(1)), plain)
    with pytest.warns(jamp.UnusedOptionWarning, match=words):
        zeros = jamp.zero_grads(state, redo_on_overflow=2)
    assert plain[0].skipped_steps == int(check)
    assert zeros.scale_state is plain[2].scale_state is None


# aux


def test_aux_is_that_of_the_last_attempt_in_its_dtypes():
    arrays = {"key": jax.random.key(3), "int": jnp.int32(7), "none": None}

    def with_aux(p, x, mean, more=1.5):
        aux = {"half": p["w"].astype("float16") * 2, "flag": x > 1, "more": more}
        return dot(p, x), (arrays | aux, 0.5 * mean + 0.5 * x)

    state = make(mean=jnp.float32(0.0))
    options = {"has_aux": True, "redo_on_overflow": 5}
    step = jamp.scaled_value_and_grad(with_aux, **options)
    (loss, (aux, mean)), grads = step(state, x_for(3), state.mean)
    assert (loss, grads.scale) == (-0.5 * x_for(3) + 3 * 2.0**-10, 2.0**13)
    assert_same_bits(aux["half"], 2 * W.astype(jnp.float16))
    assert_same_bits({name: aux[name] for name in arrays}, arrays)
    assert (aux["flag"], aux["more"]) == (True, 1.5)
    # The statistics of a batch that is computed again move once.
    assert state.apply_gradients(grads=grads, mean=mean).mean == x_for(3) / 2
    words = r"redo_on_overflow.*arrays: aux\[0\]\['more'\] is"
    with pytest.raises(TypeError, match=words):
        step(state, x_for(0), state.mean, more="text")


# Several losses and groups


@functools.partial(jax.jit, static_argnames="ids")
def step_of_losses(state, *xs, ids=(0, 0)):
    grads = [
        jamp.scaled_grad(dot, loss_id=i, redo_on_overflow=5)(state, x)
        for i, x in zip(ids, xs, strict=True)
    ]
    return state.apply_gradients(grads=grads)


def test_losses_redone_differently_are_summed_each_at_its_scale():
    begun = make(num_losses=2)
    state = step_of_losses(begun, x_for(1), x_for(4), ids=(0, 1))
    assert state.loss_scale == (2.0**15, 2.0**12)
    assert [s.unskipped for s in state.loss_scales] == [1, 1]
    assert_moved(state, 1.0 + 8.0)
    state = step_of_losses(begun, x_for(3), ids=(1,))
    assert state.loss_scale == (2.0**16, 2.0**13)
    assert_same_bits(state.loss_scales[0], begun.loss_scales[0])
    for x, y in ((1, 3), (3, 1)):  # those that share a scale go on from the lower
        state = step_of_losses(make(), x_for(x), x_for(y))
        assert (state.loss_scale, state.step, state.skipped_steps) == (2.0**13, 1, 0)
        assert_moved(state, 1.0 + 4.0)


# Sums


@jax.jit
def accumulate(state, redos):
    """The sum over micro-batches, its tree unscaled, and a step on it."""
    grad = jamp.scaled_grad(dot, redo_on_overflow=5)
    zeros = jamp.zero_grads(state, redo_on_overflow=5)
    xs = 2.0 ** (redos - 1)
    total, _ = lax.scan(lambda sum, x: (sum + grad(state, x), None), zeros, xs)
    return total, total.unscale()[0], state.apply_gradients(grads=total)


def test_a_scan_sums_what_was_redone_at_different_scales():
    for redos in ((0, 3, 1), (1, 3, 0), (3, 1, 0)):
        total, tree, after = accumulate(make(), jnp.float32(redos))
        np.testing.assert_array_equal(tree["w"], np.full(3, 0.5 + 4.0 + 1.0))
        assert (total.finite, total.scale_state.scale) == (True, 2.0**13)
        assert tuple(after.loss_scales[0]) == (2.0**13, 1, 1, 0)
        assert (after.step, after.skipped_steps) == (1, 0)
        assert_moved(after, 5.5)
    # One micro-batch that stays bad skips the sum.
    total, _, after = accumulate(make(), jnp.float32([0, 9, 1]))
    assert (total.finite, after.skipped_steps) == (False, 1)
    assert after.loss_scale == 2.0**10  # 5 redos, a fall
    assert_skipped(after, make())
    # So it is of one that was redone and one that never would be.
    (_, _, plain), (_, _, redone) = (
        stepper(times=times)(make(), x_for(redos)) for times, redos in ((0, 0), (5, 4))
    )
    for total in (plain + redone, redone + plain):
        assert total.scale_state.scale == 2.0**12
        np.testing.assert_array_equal(total.unscale()[0]["w"], np.full(3, 8.5))
        assert_moved(make().apply_gradients(grads=total / 2), 4.25)
    # Zeros begin where the state is.
    state = with_scales(make(num_losses=2), 2.0**16, 2.0**9)
    zeros = jamp.zero_grads(state, 1, redo_on_overflow=3)
    assert_same_bits(zeros.scale_state, state.loss_scales[1])
