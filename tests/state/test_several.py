"""Several models, optimizers and losses, exactly: after apex's own test of them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.state import several
from tests.states import like, make, wide

# So that each model has a half and a float32 weight, where the level casts.
KEEP = {level: {"keep_fp32": "w0"} for level in ("O2", "O5")}


# Everything that a state holds, after every step


@pytest.mark.parametrize(
    "name, shared, level",
    [
        pytest.param(name, shared, level, id=f"{name}, {shared=}, {level}")
        for name in several.CASES
        for shared in (False, True)
        for level in (("O0", "O1", "O5") if "3 models" in name else ("O2",))
    ],
)
def test_skipped_steps_are_left_out_of_a_plain_run(name, shared, level):
    state = several.begin(name, shared, level, **KEEP.get(level, {}))
    several.assert_trains(state, name, shared)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_half_leaves_sum_their_losses_in_fp32_with_and_without_masters(level):
    # apex_semantics 6.4: without masters, apex sums in half.
    tree = {"w": jnp.ones(2, jnp.float16), "v": jnp.ones(2, jnp.float32)}
    options = {"cast_model_type": False, "allow_incoming_model_not_fp32": True}
    options |= {"loss_scale": jamp.DynamicLossScale(4.0), "verbosity": 0}
    tx = optax.sgd(2.0**-11)
    state = jamp.initialize(tree, tx, level, num_losses=2, **options)

    def loss_fn(p, x):
        return sum((w.astype(jnp.float32) * x).sum() for w in p.values())

    rows = enumerate((1.0, 2048.0))
    grads = [jamp.scaled_grad(loss_fn, loss_id=i)(state, x) for i, x in rows]
    after = state.apply_gradients(grads=grads, loss_id=(0, 1))
    # float16 knows no 2049.
    for leaf in after.params.values():
        assert (np.float32(leaf) == -(2.0**-11)).all()


# Which groups skip, and whose scale moves


def slope(p, x):
    """A loss whose gradient is `x`, for one group or several."""
    return sum((wide(w) * x).sum() for w in jax.tree.leaves(p))


def test_a_group_that_no_loss_covers_remembers_its_skip():
    tree, tx = {"w": jnp.full(2, 8.0, jnp.float32)}, optax.sgd(1.0)
    state = make("O2", [tree, tree], [tx, tx])
    for group, x in ((1, jnp.inf), (0, 2.0**-9), (0, 2.0**-9)):
        grads = jamp.scaled_grad(lambda p, k, x: slope(p[k], x), wrt=[group])
        state = state.apply_gradients(grads=grads(state, group, x))
    assert [int(n) for n in state.skipped_steps] == [0, 1]
    assert [bool(b) for b in state.last_step_skipped] == [False, True]
    assert (state.step, state.loss_scales[0].consecutive_skips) == (2, 0)
    # Plain trees, one for each group, go together.
    assert state.apply_gradients(grads=[like(tree, 0.5)] * 2).step == 3


@jax.jit
def step_of_losses(state, slopes):
    """Of losses on a scale each, or on one scale."""
    shared = len(state.loss_scales) == 1
    ids = [0 if shared else i for i in range(len(slopes))]
    pairs = zip(ids, slopes, strict=True)
    grads = [jamp.scaled_grad(slope, loss_id=i)(state, x) for i, x in pairs]
    return state.apply_gradients(grads=grads, loss_id=ids)


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
