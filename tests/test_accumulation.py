"""Accumulated and clipped gradients, exactly: all numbers here are dyadic."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.bits import assert_same_bits
from tests.several import FAST

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# So that there are a half and a float32 leaf, where the level casts.
KEEP = {level: {"keep_fp32": "b"} for level in ("O2", "O3", "O5")}
LR, MOMENTUM = 0.5, 0.5
SGD = optax.sgd(LR, MOMENTUM)
START = {"w": [2.0, -1.0], "b": [1.0, 0.5]}


def weights():
    return {k: jnp.asarray(x, jnp.float32) for k, x in START.items()}


def make(level, tx=SGD, tree=None, **kwargs):
    tree, rule = tree or weights(), jamp.DynamicLossScale(16.0)
    kwargs = KEEP.get(level, {}) | {"loss_scale": rule} | kwargs
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def loss_fn(p, x):
    """A loss whose gradient is `x`: for "w" its first entry, for "b" its second."""
    w, b = (p[k].astype(jnp.float32) for k in "wb")
    return (jnp.dot(w, x[0]) + jnp.dot(b, x[1])).astype(jnp.float32)


def gradients(*rows):
    """One gradient for all four weights, per micro-batch."""
    return np.float32(rows)[:, None, None] * np.ones((2, 2), np.float32)


def assert_finite(state):
    for path, leaf in jax.tree.leaves_with_path(state):
        assert np.isfinite(np.float32(leaf)).all(), jax.tree_util.keystr(path)


def assert_held(after, before):
    """Params, masters, optimizer state and step have their old bits."""
    for name in ("params", "opt_state", "step"):
        assert_same_bits(getattr(after, name), getattr(before, name))
    assert_finite(after)


def momentum(*grads):
    """How far SGD goes in some steps, in float64."""
    moved = trace = 0.0
    for g in grads:
        trace = g + MOMENTUM * trace
        moved += LR * trace
    return moved


def assert_moved(state, by):
    """Masters and params are where they began, less `by`."""
    masters = jamp.master_params(state)
    for name, start in START.items():
        wanted = np.float64(start) - by
        np.testing.assert_array_equal(np.float64(masters[name]), wanted)
        rounded = wanted.astype(state.params[name].dtype)
        np.testing.assert_array_equal(np.asarray(state.params[name]), rounded)


# Sums of ScaledGrads


def sum_by_loop(state, xs):
    grads = [jamp.scaled_grad(loss_fn)(state, x) for x in xs]
    total = grads[0]
    for more in grads[1:]:
        total = total + more
    return total


def sum_by_scan(state, xs):
    def add(total, x):
        return total + jamp.scaled_grad(loss_fn)(state, x), None

    return jax.lax.scan(add, jamp.zero_grads(state), xs)[0]


@pytest.fixture(scope="module")
def mean_step():
    """A step on the mean of four micro-batches, summed in both ways."""

    def step(state, xs):
        sums = sum_by_loop(state, xs), sum_by_scan(state, xs)
        return [state.apply_gradients(grads=total / 4) for total in sums]

    return jax.jit(step, compiler_options=FAST)


@pytest.mark.parametrize("level", LEVELS)
def test_micro_batches_step_once_by_their_mean_or_not_at_all(mean_step, level):
    state = make(level)
    first, second = gradients(1.0, 0.5, -0.25, 0.75), gradients(2.0, 1.0, 0.5, 0.5)
    after, scanned = mean_step(state, first)
    assert_same_bits(scanned, after)
    assert_moved(after, momentum(0.5))
    assert (after.step, after.loss_scales[0].unskipped) == (1, 1)
    for place in range(4):
        xs = first.copy()
        xs[place, place % 2, 0] = (np.inf, -np.inf, np.nan, np.inf)[place]
        bad, scanned = mean_step(after, xs)
        assert_same_bits(scanned, bad)
        assert_held(bad, after)
        # One overflow, however many micro-batches.
        assert (bad.loss_scale, bad.skipped_steps) == (8.0, 1)
        assert bad.loss_scales[0].unskipped == 0
    worse, _ = mean_step(bad, np.full_like(first, np.nan))
    assert (worse.loss_scale, worse.skipped_steps) == (4.0, 2)
    # And what follows is the plain run without the skipped steps.
    again, _ = mean_step(worse, second)
    assert_moved(again, momentum(0.5, 1.0))
    assert (again.step, again.skipped_steps) == (2, 2)


@pytest.mark.parametrize("level", LEVELS)
def test_the_sum_is_one_that_half_could_not_hold(mean_step, level):
    # float16 and bfloat16 have no 2049, nor 257.
    for large in (2048.0, 256.0):
        xs = gradients(large, 1.0, 1.0, 1.0) / np.float32(1024)
        after, scanned = mean_step(make(level), xs)
        moved = momentum((large + 3) / 4096)
        if level == "O3":  # without masters, which hold all of it
            wanted = np.float16(np.float64(START["w"]) - moved)
            np.testing.assert_array_equal(np.asarray(after.params["w"]), wanted)
        else:
            assert_moved(after, moved)
        assert_same_bits(scanned, after)


@pytest.mark.parametrize("level", LEVELS)
def test_a_sum_beyond_the_largest_half_is_no_overflow(mean_step, level):
    # 16 * 4000 four times: each fits float16, the sum does not.
    after, scanned = mean_step(make(level), gradients(4000, 4000, 4000, -4000.0))
    assert (after.step, after.skipped_steps, scanned.skipped_steps) == (1, 0, 0)
    if level != "O4":  # 4000 is no bfloat16
        assert_moved(after, momentum(2000.0))


def test_losses_of_several_groups_accumulate_side_by_side():
    # The first loss covers "d", the second both; in half a mean of 2049 is none.
    txs, trees = {"d": SGD, "g": SGD}, {"d": weights(), "g": weights()}
    state = make("O2", txs, trees, num_losses=2)
    low, high = (
        s._replace(scale=jnp.float32(x))
        for s, x in zip(state.loss_scales, (16, 2), strict=True)
    )
    state = state.replace(loss_scales=(low, high))

    def first(p, x):
        return loss_fn(p["d"], x)

    def both(p, x):
        return loss_fn(p["d"], x) + loss_fn(p["g"], x)

    @jax.jit
    def step(state, xs):
        def add(totals, x):
            one, two = totals
            one += jamp.scaled_grad(first, wrt="d")(state, x[0])
            two += jamp.scaled_grad(both, loss_id=1)(state, x[1])
            return (one, two), None

        zeros = jamp.zero_grads(state, wrt="d"), jamp.zero_grads(state, 1)
        totals, _ = jax.lax.scan(add, zeros, xs)
        return state.apply_gradients(grads=[total / 2 for total in totals])

    xs = np.stack([gradients(2.0, 2.0**-10), gradients(0.5, 1.0)], 1)
    after = step(state, xs)
    for key, moved in {"d": momentum(1 + 2.0**-11 + 0.75), "g": momentum(0.75)}.items():
        assert_group_moved(after, key, moved)
    assert [int(s.unskipped) for s in after.loss_scales] == [1, 1]
    for loss, held, scales in ((0, "d", (8, 2)), (1, "dg", (16, 1))):
        bad = xs.copy()
        bad[1, loss, 0, 0] = np.inf
        skipped = step(after, bad)
        assert_finite(skipped)
        assert tuple(map(float, skipped.loss_scale)) == scales
        for key in "dg":
            assert int(skipped.skipped_steps[key]) == (key in held)
            if key in held:
                assert_same_bits(skipped.params[key], after.params[key])
                assert_same_bits(skipped.opt_state[key], after.opt_state[key])
        if held == "d":
            assert_group_moved(skipped, "g", momentum(0.75, 0.75))


def assert_group_moved(state, key, by):
    masters = jamp.master_params(state)[key]
    for name, start in START.items():
        np.testing.assert_array_equal(np.float64(masters[name]), np.float64(start) - by)


@pytest.mark.parametrize("scales", [(16.0, 2.0), (2.0, 16.0)])
def test_micro_batches_at_two_scales_add_at_the_first(scales):
    state, totals = make("O2"), []
    for scale, x in zip(scales, gradients(1.0, 0.5), strict=True):
        (old,) = state.loss_scales
        now = state.replace(loss_scales=(old._replace(scale=jnp.float32(scale)),))
        totals.append(jamp.scaled_grad(loss_fn)(now, x))
    total = totals[0] + totals[1]
    assert total.scale == scales[0]
    assert_moved(state.apply_gradients(grads=total), momentum(1.5))


# optax.MultiSteps


def every_second(tx):
    return optax.MultiSteps(tx, 2).gradient_transformation()


MULTI = every_second(SGD)


@pytest.fixture(scope="module")
def micro_step():
    def step(state, x):
        return state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state, x))

    return jax.jit(step, compiler_options=FAST)


@pytest.mark.standard_promotion  # its mean divides by an integer
@pytest.mark.parametrize("level", LEVELS)
def test_multi_steps_drops_the_micro_batch_that_overflowed(micro_step, level):
    xs = gradients(1.0, 0.5, 0.25, 1.25)
    plain = make(level, MULTI)
    for x in xs:
        plain = micro_step(plain, x)
    assert_moved(plain, momentum(0.75, 0.75))
    bad = xs[0].copy()
    bad[LEVELS.index(level) % 2, 1] = np.inf  # in the half leaf, or the other
    for place in range(5):
        state = make(level, MULTI)
        for i, x in enumerate([*xs[:place], bad, *xs[place:]]):
            before, state = state, micro_step(state, x)
            assert_finite(state)
            if i == place:
                assert_held(state, before)
        assert_same_bits(state.params, plain.params)
        assert_same_bits(state.opt_state, plain.opt_state)
        assert (state.step, state.skipped_steps, state.loss_scale) == (4, 1, 8.0)


@pytest.mark.standard_promotion
def test_multi_steps_of_one_group_waits_for_the_other_does_not():
    state = make(
        "O2",
        {"d": MULTI, "g": MULTI},
        {"d": weights(), "g": weights()},
        num_losses=2,
    )

    @jax.jit
    def step(state, d, g):
        grads = [
            jamp.scaled_grad(lambda p: loss_fn(p["d"], d), wrt="d")(state),
            jamp.scaled_grad(lambda p: loss_fn(p["g"], g), wrt="g", loss_id=1)(state),
        ]
        return state.apply_gradients(grads=grads)

    one, two, bad = gradients(1.0, 0.5, np.inf)
    state = step(step(state, one, one), bad, two)
    assert_group_moved(state, "d", 0.0)
    assert_group_moved(state, "g", momentum(0.75))
    state = step(state, two, two)
    assert_group_moved(state, "d", momentum(0.75))
    assert_group_moved(state, "g", momentum(0.75))
    assert (state.step, state.skipped_steps) == (3, {"d": 1, "g": 0})


# Clipping


CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), SGD)


def clipped(*grads):
    """Scaled so that their joint norm is 1; `ScaledGrads` that keep their flags."""
    trees = [g.unscale()[0] for g in grads]
    total = jax.tree.map(lambda *x: sum(x), *trees)
    factor = jnp.minimum(1.0, 1.0 / optax.tree.norm(total))
    trees = [jax.tree.map(lambda x: x * factor, tree) for tree in trees]
    return [
        g.replace(tree=tree, scale=jnp.float32(1))
        for g, tree in zip(grads, trees, strict=True)
    ]


@pytest.fixture(scope="module")
def clipping_step():
    """Clips by hand and inside of the optimizer: sums of micro-batches, two losses."""

    def step(by_hand, inside, xs):
        def both(state):
            return [jamp.scaled_grad(loss_fn, loss_id=i)(state, xs[i]) for i in (0, 1)]

        total = [sum_by_loop(state, xs) for state in (by_hand, inside)]
        return [
            [
                by_hand.apply_gradients(grads=clipped(total[0])[0]),
                inside.apply_gradients(grads=total[1]),
            ],
            [
                by_hand.apply_gradients(grads=clipped(*both(by_hand))),
                inside.apply_gradients(grads=both(inside)),
            ],
        ]

    return jax.jit(step, compiler_options=FAST)


@pytest.mark.parametrize("level", LEVELS)
def test_the_norm_is_that_of_all_unscaled_gradients_in_fp32(clipping_step, level):
    state = make(level, num_losses=2), make(level, CLIPPED, num_losses=2)
    # The sum of each weight is 1024: squared, beyond float16. The joint norm is 2048.
    for after in np.ravel(clipping_step(*state, gradients(2048.0, -1024.0))):
        assert_moved(after, momentum(0.5))
        assert after.step == 1
    # Below the limit nothing is clipped, though the scaled norm is beyond it.
    for after in np.ravel(clipping_step(*state, gradients(0.125, 0.125))):
        assert_moved(after, momentum(0.25))


@pytest.mark.parametrize("level", LEVELS)
def test_clipping_hides_no_overflow(clipping_step, level):
    state = make(level, num_losses=2), make(level, CLIPPED, num_losses=2)
    for loss in (0, 1):
        xs = gradients(0.5, 0.25)
        xs[loss, 1, 0] = (np.inf, np.nan)[loss]
        sums, losses = clipping_step(*state, xs)
        for after, before in zip(sums + losses, state * 2, strict=True):
            assert_held(after, before)
            assert after.skipped_steps == 1
        for after in sums:
            assert tuple(map(float, after.loss_scale)) == (8.0, 16.0)
        for after in losses:
            wanted = (8.0, 16.0) if loss == 0 else (16.0, 8.0)
            assert tuple(map(float, after.loss_scale)) == wanted


def test_each_group_clips_by_its_own_norm():
    state = make("O2", {"d": CLIPPED, "g": CLIPPED}, {"d": weights(), "g": weights()})
    d, g = gradients(1024.0, 0.25)
    grads = jamp.scaled_grad(lambda p: loss_fn(p["d"], d) + loss_fn(p["g"], g))(state)
    after = state.apply_gradients(grads=grads)
    assert_group_moved(after, "d", momentum(0.5))
    assert_group_moved(after, "g", momentum(0.25))
