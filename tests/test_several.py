"""Several models, optimizers and losses, exactly: after apex's own test of them.

Weights, learning rates and momenta are dyadic, so float64 and every level compute the
same numbers, and equality is exact.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp.optimizers import fused_sgd
from tests import several
from tests.bits import assert_same_bits
from tests.oracles import several as oracle

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# So that each model has a half and a float32 weight, where the level casts.
KEEP = {level: {"keep_fp32": "w0"} for level in ("O2", "O3", "O5")}


# The oracle


def test_apexs_two_models_by_hand():
    setup = several.CASES["2 models, 2 losses, 1 optimizer"].setup
    first, second = (w for *_, w, _ in oracle.plain(setup, [[0], [0]]))
    # w0 = (1, 2), w1 = (2, 3); each is the gradient of the other; rate 1/4.
    np.testing.assert_array_equal(first[0], [[0.5, 1.25], [1.75, 2.5]])
    # Traces 1/8 (2, 3) + (1.75, 2.5) and 1/8 (1, 2) + (0.5, 1.25).
    np.testing.assert_array_equal(second[0], [[0.0, 0.53125], [1.59375, 2.125]])
    # w0 = (2, 3), w1 = (3, 4), rate 1/2; then traces (2.375, 3) and (0.75, 1.375).
    np.testing.assert_array_equal(first[1], [[0.5, 1.0], [2.0, 2.5]])
    np.testing.assert_array_equal(second[1], [[-0.6875, -0.5], [1.625, 1.8125]])


@pytest.mark.parametrize("loss", [0, 1])
@pytest.mark.parametrize("iteration", [0, 1, 2])
def test_the_oracle_is_a_shorter_run_where_one_optimizer_skips(iteration, loss):
    case = several.CASES["2 models, 2 losses, 1 optimizer"]
    bad = [set() for _ in range(3)]
    bad[iteration] = {loss}
    *_, skipped = oracle.train(case.setup, several.scaling(case, False), bad)
    *_, (_, _, weights, trace) = oracle.plain(case.setup, [[0], [0]])
    np.testing.assert_array_equal(skipped.weights, weights)
    np.testing.assert_array_equal(skipped.trace, trace)
    assert (skipped.step, skipped.skipped_steps) == (2, [1])


# Everything that a state holds, after every step


SHARINGS = [
    pytest.param(name, shared, id=f"{name}, {'one scale' if shared else 'own scales'}")
    for name, case in several.CASES.items()
    for shared in ((False, True) if len(case.setup.losses) > 1 else (True,))
]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name, shared", SHARINGS)
def test_skipped_steps_are_left_out_of_a_plain_run(name, level, shared):
    case = several.CASES[name]
    scales, tree = several.scaling(case, shared), several.params(case)
    state = several.begin(case, scales, level, tree, **KEEP.get(level, {}))
    several.assert_trains(state, name, shared)


@pytest.mark.parametrize(
    "level, static",
    [("O0", None), ("O2", 128.0), ("O3", None), ("O4", 2), ("O5", None)],
)
def test_a_static_scale_trains_as_the_plain_run(level, static):
    case = several.CASES["3 models, 2 losses, 2 optimizers"]
    keep = KEEP.get(level, {})
    scales, tree = several.scaling(case, False), several.params(case)
    state = several.begin(case, scales, level, tree, loss_scale=static, **keep)
    state = several.batch(state)
    step = several.make_step(case, scales.loss_ids)
    clean = np.stack([several.spoil(case.setup, ())[0]] * several.BATCH)
    step = several.batched(step, state, clean)
    for result in several.expected("3 models, 2 losses, 2 optimizers", False)[0]:
        state, *_, finite = step(state, clean)
        weights = np.stack([result.weights] * several.BATCH)
        several.assert_models(several.by_model(state.params), weights, "params")
        masters = several.by_model(jamp.master_params(state))
        several.assert_models(masters, weights, "masters")
        assert (state.step == result.step).all()
        assert np.all(finite)
    assert not np.any(state.skipped_steps)
    assert np.unique(state.loss_scale) == (static or 1.0)


def test_a_compiled_step_is_the_same_and_traced_once():
    name = "3 models, 3 losses, 3 optimizers"
    case, traces = several.CASES[name], []
    scales = several.scaling(case, False)
    body = several.make_step(case, scales.loss_ids)

    def counted(state, spoil):
        traces.append(1)
        return body(state, spoil)

    step = jax.jit(counted, donate_argnums=0)
    every = several.spoilings(case.setup)
    for n in (0, 5, 14, 24, 25, 26, 27):
        tree = several.params(case)
        state = several.begin(case, scales, "O2", tree, keep_fp32="w0")
        spoil = several.spoil(case.setup, every[n])
        for i, result in enumerate(several.expected(name, False)[n]):
            state, *_ = step(state, spoil[i])
            batch = jax.tree.map(lambda x: x[None], jax.device_get(state))
            several.assert_state(batch, [result], case)
    assert len(traces) == 1


# Which groups skip, and whose scale moves


def slope(p, x):
    """A loss whose gradient is `x`, for one group or several."""
    return sum((w.astype(jnp.float32) * x).sum() for w in jax.tree.leaves(p))


@jax.jit
def step_of_three_losses(state, slopes):
    """Of losses over the first group, over both, and over the second."""

    def loss_fn(p, keys, x):
        return sum(slope(p[key], {"d": 1.0, "g": 4.0}[key] * x) for key in keys)

    grads = [
        jamp.scaled_grad(loss_fn, loss_id=i, wrt=wrt)(state, wrt, slopes[i])
        for i, wrt in enumerate(["d", ("g", "d"), "g"])
    ]
    return state.apply_gradients(grads=grads)


# The losses that overflow, and whether the first and the second group skip.
COVERED = {
    (): (False, False),
    (0,): (True, False),
    (1,): (True, True),
    (2,): (False, True),
    (0, 1): (True, True),
    (0, 2): (True, True),
    (1, 2): (True, True),
    (0, 1, 2): (True, True),
}


def test_an_overflow_skips_the_groups_that_its_loss_covers():
    txs = {key: optax.sgd(1.0, momentum=0.5) for key in "dg"}
    state = jamp.initialize(
        {key: {"w": jnp.full(2, 8.0, jnp.float32)} for key in "dg"},
        txs,
        "O2",
        loss_scale=jamp.DynamicLossScale(16.0),
        num_losses=3,
        verbosity=0,
    )
    for bad, skipped in COVERED.items():
        slopes = [np.inf if i in bad else 2.0**i for i in range(3)]
        after = step_of_three_losses(state, np.array(slopes, np.float32))
        # From 8 by 1 + 2, and by 4 (2 + 4).
        for key, skips, moved in zip("dg", skipped, (5.0, -16.0), strict=True):
            assert (after.params[key]["w"] == (8.0 if skips else moved)).all()
            assert int(after.skipped_steps[key]) == skips
            assert bool(after.last_step_skipped[key]) == skips
            if skips:
                assert_same_bits(after.params[key], state.params[key])
                assert_same_bits(after.opt_state[key], state.opt_state[key])
        assert int(after.step) == (not all(skipped))
        for i, scale in enumerate(after.loss_scales):
            wanted = (8.0, 0, 1) if i in bad else (16.0, 1, 0)
            got = (scale.scale, scale.unskipped, scale.consecutive_skips)
            assert got == wanted, (bad, i)


def test_a_group_that_no_loss_covers_remembers_its_skip():
    tree, tx = {"w": jnp.full(2, 8.0, jnp.float32)}, optax.sgd(1.0)
    state = jamp.initialize([tree, tree], [tx, tx], "O2", verbosity=0)
    for group, x in ((1, jnp.inf), (0, 2.0**-9), (0, 2.0**-9)):
        grads = jamp.scaled_grad(lambda p, k, x: slope(p[k], x), wrt=group)
        state = state.apply_gradients(grads=grads(state, group, x))
    assert [int(n) for n in state.skipped_steps] == [0, 1]
    assert [bool(b) for b in state.last_step_skipped] == [False, True]
    assert (state.step, state.loss_scales[0].consecutive_skips) == (2, 0)


def step_of_losses(state, slopes):
    """Of losses on a scale each, or on one scale."""
    ids = range(len(state.loss_scales)) if len(state.loss_scales) > 1 else None
    ids = ids or [0] * len(slopes)
    grads = [
        jamp.scaled_grad(slope, loss_id=i)(state, x)
        for i, x in zip(ids, slopes, strict=True)
    ]
    return state.apply_gradients(grads=grads)


@pytest.mark.parametrize(
    "optimizer, level",
    [(optax.sgd, "O2"), (fused_sgd, "O2"), (fused_sgd, "O5")],
    ids=["sgd-O2", "fused_sgd-O2", "fused_sgd-O5"],
)
def test_losses_of_any_scales_are_summed_in_fp32(optimizer, level):
    # apex_semantics 6.5: its FusedSGD errs where the scale of a later loss is lower.
    tree = {"w": jnp.full(2, 16.0, jnp.float32)}
    rule = jamp.DynamicLossScale(2.0)
    state = jamp.initialize(
        tree, optimizer(1.0), level, loss_scale=rule, num_losses=3, verbosity=0
    )
    state = state.replace(
        loss_scales=tuple(
            s._replace(scale=jnp.float32(x))
            for s, x in zip(state.loss_scales, (64.0, 0.5, 4.0), strict=True)
        )
    )
    slopes = (2.0**-9, 8.0, 2.0**-12)  # no half holds their sum
    after = step_of_losses(state, slopes)
    assert (jamp.master_params(after)["w"] == 16 - np.float32(sum(slopes))).all()
    assert [int(s.unskipped) for s in after.loss_scales] == [1, 1, 1]


# Windows


CLEAN = frozenset()
# By hand: losses, window, one scale or each its own, the losses that overflow in each
# step; then after each step, scale and clean passes of each scale. All begin at 4.
WINDOWS = {
    "2 on one scale": (2, 4, True, [CLEAN] * 4, [(4, 2), (8, 0), (8, 2), (16, 0)]),
    "2, growth amid a step": (
        2,
        3,
        True,
        [CLEAN] * 4,
        [(4, 2), (8, 1), (16, 0), (16, 2)],
    ),
    "2, growth in each step": (2, 1, True, [CLEAN] * 2, [(16, 0), (64, 0)]),
    "3 on one scale": (3, 4, True, [CLEAN] * 4, [(4, 3), (8, 2), (16, 1), (32, 0)]),
    "the first overflows": (
        2,
        3,
        True,
        [CLEAN, {0}, CLEAN],
        [(4, 2), (2, 1), (4, 0)],
    ),
    "the second overflows, after growth": (
        2,
        3,
        True,
        [CLEAN, {1}, CLEAN],
        [(4, 2), (4, 0), (4, 2)],
    ),
    "both overflow": (2, 3, True, [CLEAN, {0, 1}, CLEAN], [(4, 2), (1, 0), (1, 2)]),
    "own scales": (
        2,
        3,
        False,
        [CLEAN, {1}, CLEAN, CLEAN],
        [
            (4, 1, 4, 1),
            (4, 2, 2, 0),
            (8, 0, 2, 1),
            (8, 1, 2, 2),
        ],
    ),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_counts_backward_passes(name):
    # apex_semantics 4.5: so with k losses on one scale it takes window / k steps.
    losses, window, shared, steps, wanted = WINDOWS[name]
    rule = jamp.DynamicLossScale(4.0, window=window)
    tree, scales = {"w": jnp.full(2, 8.0, jnp.float32)}, 1 if shared else losses
    state = jamp.initialize(
        tree, optax.sgd(0.5), "O2", loss_scale=rule, num_losses=scales, verbosity=0
    )
    moved = 0
    for bad, numbers in zip(steps, wanted, strict=True):
        slopes = [np.float32(np.inf if i in bad else 0.5) for i in range(losses)]
        state = step_of_losses(state, slopes)
        moved += not bad
        got = [x for s in state.loss_scales for x in (s.scale, s.unskipped)]
        assert tuple(map(float, got)) == numbers
        assert (jamp.master_params(state)["w"] == 8 - moved * losses / 4).all()
    assert (state.step, state.skipped_steps) == (moved, len(steps) - moved)


@pytest.mark.parametrize("bad", [0, 1])
def test_check_sees_one_of_two_losses_that_never_fits_their_scale(bad):
    tree = {"w": jnp.full(2, 8.0, jnp.float32)}
    state = jamp.initialize(tree, optax.sgd(0.5), "O2", verbosity=0)
    slopes = [np.float32(0.5), np.float32(0.5)]
    slopes[bad] = np.float32(np.nan)
    step = jax.jit(step_of_losses)
    for _ in range(50):
        state = step(state, slopes)
    assert (state.step, state.skipped_steps) == (0, 50)
    with pytest.raises(FloatingPointError):
        jamp.check(state, max_consecutive_skips=50)
