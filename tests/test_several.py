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
from tests import several
from tests.oracles import several as oracle
from tests.states import make, wide

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# So that each model has a half and a float32 weight, where the level casts.
KEEP = {level: {"keep_fp32": "w0"} for level in ("O2", "O3", "O5")}


def begin(name, shared, level, **kwargs):
    case = several.CASES[name]
    kwargs |= KEEP.get(level, {})
    scales = several.scaling(case, shared)
    return several.begin(case, scales, level, several.params(case), **kwargs)


# The oracle


def test_apexs_two_models_by_hand():
    case = several.CASES["2 models, 2 losses, 1 optimizer"]
    # The second of three steps overflows.
    overflows = [set(), {1}, set()]
    steps = list(oracle.train(case.setup, several.scaling(case, False), overflows))
    (first, second), *_, last = [step.weights for step in steps]
    # w0 = (1, 2), w1 = (2, 3); each is the gradient of the other; rate 1/4.
    np.testing.assert_array_equal(first, [[0.5, 1.25], [1.75, 2.5]])
    # w0 = (2, 3), w1 = (3, 4), rate 1/2.
    np.testing.assert_array_equal(second, [[0.5, 1.0], [2.0, 2.5]])
    np.testing.assert_array_equal(steps[1].weights, steps[0].weights)
    # Traces 1/8 (2, 3) + (1.75, 2.5) and 1/8 (1, 2) + (0.5, 1.25).
    np.testing.assert_array_equal(last[0], [[0.0, 0.53125], [1.59375, 2.125]])
    # Traces (2.375, 3) and (0.75, 1.375).
    np.testing.assert_array_equal(last[1], [[-0.6875, -0.5], [1.625, 1.8125]])
    assert [step.step for step in steps] == [1, 1, 2]
    assert [step.skipped_steps for step in steps] == [[0], [1], [1]]
    assert [step.last_step_skipped for step in steps] == [[False], [True], [False]]
    scales = [[(s.scale, s.unskipped) for s in step.scales] for step in steps]
    assert scales[:2] == [[(4, 1), (16, 1)], [(4, 2), (8, 0)]]
    assert scales[2] == [(8, 0), (8, 1)]


# Everything that a state holds, after every step


@pytest.mark.parametrize(
    "name, shared, level",
    [
        pytest.param(name, shared, level, id=f"{name}, {shared=}, {level}")
        for name, case in several.CASES.items()
        for shared in ((False, True) if len(case.setup.losses) > 1 else (True,))
        for level in (LEVELS if "3 models" in name else ("O2",))
    ],
)
def test_skipped_steps_are_left_out_of_a_plain_run(name, shared, level):
    several.assert_trains(begin(name, shared, level), name, shared)


@pytest.mark.parametrize("level, static", [("O2", 128.0), ("O3", None), ("O4", 2)])
def test_a_static_scale_trains_as_the_plain_run(level, static):
    name = "3 models, 2 losses, 2 optimizers"
    case = several.CASES[name]
    state = several.batch(begin(name, False, level, loss_scale=static))
    clean = np.stack([several.spoil(case.setup, ())[0]] * several.BATCH)
    step = several.make_step(case, several.scaling(case, False).loss_ids)
    step = several.batched(step, state, clean)
    for result in several.expected(name, False)[0]:
        state = step(state, clean)
        weights = np.stack([result.weights] * several.BATCH)
        for tree in (state.params, jamp.master_params(state)):
            several.assert_models(several.by_model(tree), weights, "params")
        assert (state.step == result.step).all()
    assert not np.any(state.skipped_steps)
    assert np.unique(state.loss_scale) == (static or 1.0)


def test_a_compiled_step_is_the_same_and_traced_once():
    name = "3 models, 3 losses, 3 optimizers"
    case, traces = several.CASES[name], []
    body = several.make_step(case, several.scaling(case, False).loss_ids)

    def counted(state, spoil):
        traces.append(1)
        return body(state, spoil)

    step = jax.jit(counted, donate_argnums=0)
    every = several.spoilings(case.setup)
    for n in (0, 5, 14, 24, 25, 26, 27):
        state = begin(name, False, "O2")
        spoil = several.spoil(case.setup, every[n])
        for i, result in enumerate(several.expected(name, False)[n]):
            state = step(state, spoil[i])
            batch = jax.tree.map(lambda x: x[None], jax.device_get(state))
            several.assert_state(batch, [result], case)
    assert len(traces) == 1


# Which groups skip, and whose scale moves


def slope(p, x):
    """A loss whose gradient is `x`, for one group or several."""
    return sum((wide(w) * x).sum() for w in jax.tree.leaves(p))


def test_a_group_that_no_loss_covers_remembers_its_skip():
    tree, tx = {"w": jnp.full(2, 8.0, jnp.float32)}, optax.sgd(1.0)
    state = make("O2", [tree, tree], [tx, tx])
    for group, x in ((1, jnp.inf), (0, 2.0**-9), (0, 2.0**-9)):
        grads = jamp.scaled_grad(lambda p, k, x: slope(p[k], x), wrt=group)
        state = state.apply_gradients(grads=grads(state, group, x))
    assert [int(n) for n in state.skipped_steps] == [0, 1]
    assert [bool(b) for b in state.last_step_skipped] == [False, True]
    assert (state.step, state.loss_scales[0].consecutive_skips) == (2, 0)


@jax.jit
def step_of_losses(state, slopes):
    """Of losses on a scale each, or on one scale."""
    shared = len(state.loss_scales) == 1
    return state.apply_gradients(
        grads=[
            jamp.scaled_grad(slope, loss_id=0 if shared else i)(state, x)
            for i, x in enumerate(slopes)
        ]
    )


# By hand: losses, window, one scale or each its own; then the losses that overflow in
# each step, and scale and clean passes of each scale after it. All begin at 4.
WINDOWS = [
    (2, 4, True, [((), 4, 2), ((), 8, 0), ((), 8, 2), ((), 16, 0)]),
    (2, 3, True, [((), 4, 2), ((), 8, 1), ((), 16, 0), ((), 16, 2)]),  # amid a step
    (2, 1, True, [((), 16, 0), ((), 64, 0)]),  # twice in each
    (3, 4, True, [((), 4, 3), ((), 8, 2), ((), 16, 1), ((), 32, 0)]),
    (2, 3, True, [((), 4, 2), ((0,), 2, 1), ((), 4, 0)]),
    (2, 3, True, [((), 4, 2), ((1,), 4, 0), ((), 4, 2)]),  # after growth
    (2, 3, True, [((), 4, 2), ((0, 1), 1, 0), ((), 1, 2)]),
    (2, 3, False, [((), 4, 1, 4, 1), ((1,), 4, 2, 2, 0), ((), 8, 0, 2, 1)]),
]


def losses_on(losses, shared=True, **kwargs):
    tree = {"w": jnp.full(2, 8.0, jnp.float32)}
    return make(tree=tree, num_losses=1 if shared else losses, **kwargs)


@pytest.mark.parametrize("losses, window, shared, steps", WINDOWS)
def test_a_window_counts_backward_passes(losses, window, shared, steps):
    # apex_semantics 4.5: so with k losses on one scale it takes window / k steps.
    rule = jamp.DynamicLossScale(4.0, window=window)
    state = losses_on(losses, shared, tx=optax.sgd(0.5), loss_scale=rule)
    moved = 0
    for bad, *wanted in steps:
        slopes = [np.float32(np.inf if i in bad else 0.5) for i in range(losses)]
        state = step_of_losses(state, slopes)
        moved += not bad
        got = [x for s in state.loss_scales for x in (s.scale, s.unskipped)]
        assert got == wanted
        assert (jamp.master_params(state)["w"] == 8 - moved * losses / 4).all()
    assert (state.step, state.skipped_steps) == (moved, len(steps) - moved)


@pytest.mark.parametrize("bad", [0, 1])
def test_check_sees_one_of_two_losses_that_never_fits_their_scale(bad):
    state, slopes = losses_on(2), np.float32([0.5, 0.5])
    slopes[bad] = np.nan
    for _ in range(5):
        state = step_of_losses(state, list(slopes))
    assert (state.step, state.skipped_steps) == (0, 5)
    assert jamp.check(state, max_consecutive_skips=6) is None
    with pytest.raises(FloatingPointError):
        jamp.check(state, max_consecutive_skips=5)
