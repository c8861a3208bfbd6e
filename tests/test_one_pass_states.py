"""AmpState with fused optimizers: losses, groups, fields, loops, donation, new states.

Gradients and rates are powers of two, so that what a step gives is known to the bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from jamp import optimizers as jo
from tests.bits import assert_same_bits, copy
from tests.one_pass import (
    F32,
    HALF,
    KEPT,
    dot,
    each_backend,
    inner,
    one_step,
    start,
    step,
)

GOOD = 2.0**-6
LEVELS = {"bare": "O0", "masters": "O2", "split": "O5"}
each_kept = pytest.mark.parametrize("kept", KEPT)


def small():
    """A leaf that kernels take, and one that they do not."""
    return {"v": jnp.full(130, 1.0), "w": jnp.full(2, 2.0)}


def like(value, place=None):
    """Gradients of one value; `value` at one place of the first leaf, else GOOD."""
    v = np.full(130, value if place is None else GOOD, np.float32)
    if place is not None:
        v[place] = value
    return {"v": v, "w": np.full(2, v[1], np.float32)}


def sgd(backend="xla", momentum=0.0):
    return jo.fused_sgd(1.0, momentum, backend=backend)


def make(tx=None, kept="masters", **kwargs):
    tx = sgd() if tx is None else tx
    store = kept == "split"
    return start(tx, LEVELS[kept], small(), store_remainder=store, **kwargs)


def assert_stepped_by(state, value):
    """One step down from the first params, by `value`."""
    for key, p in small().items():
        expected = np.asarray(p) - np.float32(value)
        np.testing.assert_array_equal(jamp.master_params(state)[key], expected)


def assert_skipped(after, before):
    assert_same_bits(after.params, before.params)
    assert_same_bits(after.opt_state, before.opt_state)
    assert after.step == before.step


# What is checked


@each_backend
def test_a_static_scale_checks_nothing(backend):
    state = make(sgd(backend), loss_scale=4.0)
    after = step(state, like(np.nan, place=3))
    assert (after.step, after.skipped_steps, after.loss_scale) == (1, 0, 4.0)
    v = np.asarray(jamp.master_params(after)["v"])
    assert np.isnan(v[3])
    assert (np.delete(v, 3) == 1 - GOOD).all()


@each_backend
def test_a_static_scale_that_checks_skips_and_stays(backend):
    state = make(sgd(backend), loss_scale=jamp.StaticLossScale(4.0, check=True))
    after = step(state, like(np.nan, place=129))
    assert_skipped(after, state)
    assert (after.skipped_steps, after.loss_scale) == (1, 4.0)


@pytest.mark.parametrize("kept, backend", [("masters", "xla"), ("bare", "interpret")])
def test_plain_gradients_are_taken_as_unscaled_and_checked(kept, backend):
    state = make(sgd(backend), kept)

    @jax.jit
    def plain(state, x):
        return state.apply_gradients(grads=x)

    assert_stepped_by(plain(state, like(GOOD)), GOOD)
    after = plain(state, like(np.inf, place=0))
    assert_skipped(after, state)
    assert after.loss_scale == state.loss_scale / 2


@each_backend
def test_losses_with_different_scales_are_summed_in_fp32(backend):
    state = make(sgd(backend), num_losses=2)
    scales = zip(state.loss_scales, (8.0, 2.0), strict=True)
    state = state.replace(
        loss_scales=tuple(s._replace(scale=F32(x)) for s, x in scales)
    )

    @jax.jit
    def both(state, *xs):
        grads = [jamp.scaled_grad(dot, loss_id=i)(state, x) for i, x in enumerate(xs)]
        return state.apply_gradients(grads=grads)

    # 2^-9 + 2^4: fp16 has no such number.
    after = both(state, like(2.0**-9), like(16.0))
    assert_stepped_by(after, 16 + 2.0**-9)
    assert [int(s.unskipped) for s in after.loss_scales] == [1, 1]
    after = both(state, like(2.0**-9), like(np.inf, place=7))
    assert_skipped(after, state)
    assert after.skipped_steps == 1
    assert tuple(map(float, after.loss_scale)) == (8.0, 1.0)


@pytest.mark.parametrize("kept, backend", [("split", "xla"), ("masters", "interpret")])
def test_accumulated_gradients_step_once_or_not_at_all(kept, backend):
    state = make(sgd(backend), kept)

    @jax.jit
    def accumulated(state, a, b):
        grad = jamp.scaled_grad(dot)
        total = jamp.zero_grads(state) + grad(state, a) + grad(state, b)
        return state.apply_gradients(grads=total / 2)

    # In bfloat16 the sum would lose the smaller one.
    assert_stepped_by(accumulated(state, like(2.0**-9), like(4.0)), 2 + 2.0**-10)
    after = accumulated(state, like(np.inf, place=100), like(4.0))
    assert_skipped(after, state)
    assert (after.skipped_steps, after.loss_scale) == (1, state.loss_scale / 2)


def test_update_args_are_ignored():
    @jax.jit
    def both(state, x):
        args = {"value": F32(1), "grad": None, "grad_scale": F32(0), "found_inf": True}
        with_args = state.apply_gradients(grads=x, update_args=args)
        return with_args, state.apply_gradients(grads=x)

    assert_same_bits(*both(make(), like(GOOD)))


BEYOND = {
    "O3": (1.0, 1e6, 65504.0, 65504.0),
    "O2": (1.0, 1e6, 65504.0, 1000001.0),
    "O5": (3.3e38, 1e37, 3.3895314e38, 3.3961775e38),
}


@each_backend
@pytest.mark.parametrize("level", BEYOND)
def test_params_beyond_half_are_clamped(level, backend):
    begin, up, largest, master = BEYOND[level]
    tree = {"v": jnp.full(130, begin), "w": jnp.full(2, -begin)}
    store = level == "O5"
    state = start(sgd(backend), level, tree, store_remainder=store)
    grads = jax.tree.map(lambda p: -up * jnp.sign(p), tree)
    after = state.apply_gradients(grads=grads)
    for key, sign in (("v", 1), ("w", -1)):
        np.testing.assert_allclose(np.float32(after.params[key]), sign * largest, 1e-6)
        masters = jamp.master_params(after)[key]
        np.testing.assert_allclose(masters, np.float32(sign * master), 1e-6)


# Groups


@functools.cache
def three():
    """Two fused optimizers, of two backends, and one of optax's."""
    txs = {"d": sgd(momentum=0.5), "g": sgd("interpret"), "o": optax.sgd(1.0)}
    trees = {key: small() for key in txs}
    return jamp.initialize(trees, txs, "O2", num_losses=2, verbosity=0)


@functools.partial(jax.jit, static_argnums=3)
def losses_of_groups(state, x, y, which=(0, 1)):
    """Loss 0 is of the groups d and o, loss 1 of g."""
    grads = [
        jamp.scaled_grad(
            lambda p: dot(p["d"], x) + dot(p["o"], x), wrt=("d", "o"), loss_id=0
        )(state),
        jamp.scaled_grad(lambda p: dot(p["g"], y), wrt="g", loss_id=1)(state),
    ]
    return state.apply_gradients(grads=[grads[k] for k in which])


OVERFLOWS = {"none": "", "first": "do", "second": "g"}


@pytest.mark.parametrize("name", OVERFLOWS)
def test_an_overflow_in_one_loss_skips_its_groups_alone(name):
    bad, state = OVERFLOWS[name], three()
    x, y = (like(np.inf if key in bad else GOOD, place=64) for key in "dg")
    after = losses_of_groups(state, x, y)
    masters = jamp.master_params(after)
    for key in "dgo":
        assert after.skipped_steps[key] == int(key in bad)
        if key in bad:
            assert_same_bits(after.params[key], state.params[key])
            assert_same_bits(after.opt_state[key], state.opt_state[key])
        else:
            np.testing.assert_array_equal(masters[key]["v"], np.float32(1 - GOOD))
            np.testing.assert_array_equal(masters[key]["w"], np.float32(2 - GOOD))
    halves = [2.0**16 / (1 + (key in bad)) for key in "dg"]
    assert list(map(float, after.loss_scale)) == halves
    assert after.step == 1


def test_a_group_without_gradients_does_not_move():
    state = three()
    after = losses_of_groups(state, like(GOOD), like(GOOD), (1,))
    for key in "do":
        assert_same_bits(after.params[key], state.params[key])
        assert_same_bits(after.opt_state[key], state.opt_state[key])
    assert (jamp.master_params(after)["g"]["v"] == 1 - GOOD).all()


# Leaves that no optimizer steps


@jax.custom_vjp
def measured(amax, x, new):
    """`x`; its backward pass says what `amax` is to be."""
    del amax, new
    return x * 1.0


measured.defvjp(
    lambda amax, x, new: (measured(amax, x, new), new),
    lambda new, g: (new, g, jnp.zeros_like(new)),
)


@each_kept
def test_fp8_scales_are_written_and_integers_stay(kept):
    tree = {
        "params": {"v": jnp.full(130, 1.0), "ids": jnp.arange(3), "gain": jnp.ones(())},
        "_overwrite_with_gradient": {"amax": jnp.asarray(3.0, F32)},
    }
    store = kept == "split"
    state = start(sgd(), LEVELS[kept], tree, store_remainder=store)
    assert_same_bits(state.params["params"]["ids"], jnp.arange(3))

    @jax.jit
    def fp8_step(state, x, new):
        def loss_fn(p):
            v, gain = (p["params"][k].astype(F32) for k in ("v", "gain"))
            v = measured(p["_overwrite_with_gradient"]["amax"], v, new)
            return (v * x).sum() + gain * GOOD

        return state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state))

    x, bad = (np.full(130, value, np.float32) for value in (GOOD, np.inf))
    # Not scaled, not unscaled, not stepped, not checked: written.
    for new in (7.0, np.inf):
        after = fp8_step(state, x, F32(new))
        amax = after.params["_overwrite_with_gradient"]["amax"]
        assert (amax.dtype, amax) == (F32, new)
        assert_same_bits(after.params["params"]["ids"], jnp.arange(3))
        masters = jamp.master_params(after)["params"]
        assert (masters["v"] == 1 - GOOD).all() and masters["gain"] == 1 - GOOD
        assert after.params["params"]["v"].dtype == HALF.get(LEVELS[kept], F32)
    assert_skipped(fp8_step(state, bad, F32(7.0)), state)


# Loops, donation, new states


@pytest.mark.parametrize("kept, backend", [("masters", "xla"), ("split", "interpret")])
def test_it_is_a_carry_of_scan(kept, backend):
    values = [GOOD, np.inf, GOOD, 2 * GOOD]
    xs = jax.tree.map(lambda *x: np.stack(x), *map(like, values))
    tx = sgd(backend, momentum=0.5)
    scanned = jax.jit(lambda s: lax.scan(lambda s, x: (one_step(s, x), None), s, xs)[0])
    state = scanned(make(tx, kept))
    assert_stepped_by(state, (1 + 1.5 + 2.75) * GOOD)
    assert (state.step, state.skipped_steps, inner(state).count) == (3, 1, 3)


def test_an_ensemble_under_vmap_skips_each_member_alone():
    stacked, xs = (
        jax.tree.map(lambda *x: np.stack(x), *trees)
        for trees in [(small(), small()), (like(np.inf, place=5), like(GOOD))]
    )
    states = jax.vmap(lambda params: start(sgd(momentum=0.5), "O2", params))(stacked)
    after = jax.jit(jax.vmap(one_step))(states, xs)
    assert after.step.tolist() == [0, 1]
    assert after.skipped_steps.tolist() == [1, 0]
    first, second = (jax.tree.map(lambda x, k=k: x[k], after) for k in (0, 1))
    assert_skipped(first, jax.tree.map(lambda x: x[0], states))
    assert_stepped_by(second, GOOD)


@pytest.mark.parametrize(
    "kept, backend",
    [(kept, "xla") for kept in KEPT] + [("bare", "interpret"), ("split", "interpret")],
)
def test_a_donated_state_takes_the_users_arrays_nowhere(kept, backend):
    users = small()
    before = copy(users)
    tx = jo.fused_adam(0.5, backend=backend)
    store = kept == "split"
    state = first = start(tx, LEVELS[kept], users, store_remainder=store)

    def loss_fn(p, x):
        # Not linear, or jit would drop the params that no gradient needs.
        return dot(p, jax.tree.map(lambda p, x: x * p.astype(F32), p, x))

    @functools.partial(jax.jit, donate_argnums=0)
    def donating(state, x):
        return state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state, x))

    # Warnings are errors here: "Some donated buffers were not usable".
    for _ in range(2):
        state = donating(state, like(GOOD))
    assert state.step == 2
    leaves = jax.tree.leaves_with_path(first)
    left = [jax.tree_util.keystr(k) for k, x in leaves if not x.is_deleted()]
    assert left == [".last_step_skipped"]  # no step reads it, so jit drops it too
    assert_same_bits(copy(users), before)


@each_kept
def test_initialize_under_jit_gives_the_same_state(kept):
    tx = jo.fused_adam()
    rng = np.random.default_rng(0)
    tree = {k: np.float32(rng.normal(size=x.shape)) for k, x in small().items()}
    store = kept == "split"

    def init(tree):
        return start(tx, LEVELS[kept], tree, store_remainder=store)

    eager, jitted = init(tree), jax.jit(init)(tree)
    assert_same_bits(jitted, eager)
    predicted = jax.eval_shape(init, tree)
    assert jax.tree.structure(predicted) == jax.tree.structure(eager)
    assert hash(jax.tree.structure(predicted)) == hash(jax.tree.structure(eager))


@each_kept
def test_another_learning_rate_takes_the_state_over(kept):
    def tx(rate):
        tx = jo.fused_sgd(rate, 0.5)
        store = kept == "split"
        return tx if kept == "bare" else jamp.master_weights(tx, store_remainder=store)

    state = step(make(jo.fused_sgd(1.0, 0.5), kept), like(GOOD))
    assert state.tx == tx(1.0)
    state = step(state.replace(tx=tx(2.0)), like(GOOD))
    # Momentum 1, then 1.5, at rates 1 and 2.
    assert_stepped_by(state, 4 * GOOD)
    assert inner(state).count == 2


@each_kept
def test_the_state_shares_no_array(kept):
    state = make(jo.fused_adam(), kept)
    leaves = jax.tree.leaves(state)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
