"""LARC around fused and other optimizers, against its oracle in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jamp import optimizers as jo
from tests.bits import assert_same_bits
from tests.fused import assert_close, first, update
from tests.oracles import fused as oracles

# optax's inner transformations promote as they like.
pytestmark = pytest.mark.standard_promotion

STEPS = 20
RATE = 0.05
SKIPPED = (0, 1, 7, 19)


def schedule(count):
    return RATE / (1 + count)


def problem():
    """Leaves of several shapes, one of zeros, and gradients; one of those is zero."""
    rng = np.random.default_rng(0)
    shapes = [(3, 4), (5,), (), (0,), (2,), (3,)]
    params = [rng.normal(size=s).astype(np.float32) for s in shapes]
    grads = [
        rng.normal(size=(STEPS, *s)).astype(np.float32) * np.float32(0.1)
        for s in shapes
    ]
    params[4][:] = 0
    grads[5][:] = 0
    return params, grads


# Ours with weight decay `wd`, and the oracle of the inner one, without.
def fused_sgd(rate, wd=0.0, **options):
    inner = jo.fused_sgd(rate, 0.9, nesterov=True, weight_decay=wd)
    return jo.larc(inner, **options)


def optax_sgd(rate, wd=0.0, **options):
    inner = optax.sgd(rate, 0.9, nesterov=True)
    return jo.larc(inner, rate, weight_decay=wd, **options)


def fused_adam(rate, wd=0.0, **options):
    return jo.larc(jo.fused_adam(rate, 0.8, weight_decay=wd), **options)


def optax_adam(rate, wd=0.0, **options):
    return jo.larc(optax.adam(rate, 0.8), rate, weight_decay=wd, **options)


SGD = functools.partial(oracles.fused_sgd, momentum=0.9, nesterov=True)
ADAM = functools.partial(oracles.fused_adam, b1=0.8)
INNERS = {fused_sgd: SGD, optax_sgd: SGD, fused_adam: ADAM, optax_adam: ADAM}
UNCLIPPED = {"clip": False, "trust_coefficient": 0.3, "eps": 1e-3}
each_inner = pytest.mark.parametrize("make", INNERS)


@each_inner
@pytest.mark.parametrize(
    "rate, wd, options",
    [(RATE, 0.1, {}), (schedule, 0.0, {}), (RATE, 0.1, UNCLIPPED)],
    ids=["clipped", "schedule", "unclipped"],
)
def test_twenty_steps_match_float64(make, rate, wd, options):
    """With a scale, and steps that are skipped, or without."""
    params, grads = problem()
    skip = [bool(wd) and t in SKIPPED for t in range(STEPS)]
    expected = oracles.larc(
        params,
        zip(*grads, strict=True),
        learning_rate=rate,
        weight_decay=wd,
        inner=INNERS[make],
        skip=skip,
        **options,
    )
    tx = make(rate, wd, **options)
    scale = 2.0**8 if wd else 1.0

    def step(carry, x):
        params, state = carry
        grads, skips = x
        grads = [jnp.where(skips, jnp.nan, g * scale) for g in grads]
        how = {"grad_scale": jnp.float32(scale), "found_inf": skips} if wd else {}
        updates, state = tx.update(grads, state, params, **how)
        carry = optax.apply_updates(params, updates), state
        return carry, carry

    params = [jnp.asarray(p) for p in params]
    start = params, tx.init(params)
    xs = grads, jnp.asarray(skip)
    (_, state), history = jax.jit(lambda c: jax.lax.scan(step, c, xs))(start)
    assert state.count == STEPS - sum(skip)
    # optax corrects Adam's bias in float32: 1 - 0.999 is off by 1e-5 of itself there.
    tolerance = 1e-5 if make is optax_adam else 2e-6
    for t, (wanted, _) in enumerate(expected):
        now, before = (jax.tree.map(lambda x, k=k: x[k], history) for k in (t, t - 1))
        if skip[t]:
            assert_same_bits(now, before if t else start)
        for x, y in zip(now[0], wanted, strict=True):
            np.testing.assert_allclose(x, y, 10 * tolerance, tolerance)


@pytest.mark.parametrize("make", [fused_sgd, optax_sgd])
def test_both_ends_of_the_clip(make):
    # 0.02 * 5 / 0.5 = 0.2 is above the rate and 0.02 * 5 / 50 = 0.002 below.
    params = jnp.asarray([3.0, 4.0])
    for size, effective in ((0.1, 0.1), (10.0, 0.002)):
        updates, _ = first(make(0.1), params, params * size)
        # Nesterov's first step is g + 0.9 g.
        np.testing.assert_allclose(updates, -1.9 * effective * size * params, rtol=1e-5)


@each_inner
def test_a_zero_norm_leaves_the_gradient_alone_and_decays_nothing(make):
    params = {"zero": jnp.zeros(3), "still": jnp.ones(3)}
    grads = {"zero": jnp.ones(3), "still": jnp.zeros(3)}
    updates, _ = first(make(RATE, 0.5), params, grads)
    adam = optax.adam(RATE, 0.8)
    inner = adam if INNERS[make] is ADAM else optax.sgd(RATE, 0.9, nesterov=True)
    assert_close(updates, first(inner, params, grads)[0], rtol=1e-5)
    assert_close(first(make(RATE), params, grads)[0], updates)


@each_inner
def test_a_warm_up_may_start_at_a_rate_of_zero(make):
    tx, params = make(lambda count: 0.1 * count, 0.1), jnp.asarray([3.0, 4.0])
    updates, state = first(tx, params)
    np.testing.assert_array_equal(updates, 0)
    assert (update(tx, params, state, params)[0] < 0).all()


def test_what_is_given_to_larc_goes_before_what_the_inner_one_has():
    params = [jnp.asarray(x) for x in problem()[0]]
    inner = jo.fused_sgd(RATE, 0.9, weight_decay=0.1, mask=False)
    pairs = [
        ({"weight_decay": 0.3, "mask": True}, {"weight_decay": 0.3}),
        ({"weight_decay": 0.0}, {}),
        ({"mask": True}, {"weight_decay": 0.1}),
    ]
    for given, same in pairs:
        wanted = jo.larc(jo.fused_sgd(RATE, 0.9, **same))
        got = jo.larc(inner, **given)
        assert_same_bits(first(got, params)[0], first(wanted, params)[0])
    theirs = jo.larc(optax.sgd(RATE, 0.9), 1e-3)
    assert_close(first(jo.larc(inner, 1e-3), params)[0], first(theirs, params)[0])


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_around_a_fused_one_half_leaves_are_computed_in_float32(dtype):
    params, grads = problem()
    grads = [g[0] for g in grads]
    half = [[jnp.asarray(x, dtype) for x in tree] for tree in (params, grads)]
    wide = [[x.astype(jnp.float32) for x in tree] for tree in half]
    assert_close(first(fused_sgd(RATE, 0.1), *half), first(fused_sgd(RATE, 0.1), *wide))


def test_around_a_chain_and_inside_one():
    params, grads = ([jnp.asarray(x) for x in tree] for tree in problem())
    grads = [g[0] for g in grads]
    inner = optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(RATE))
    tx = optax.chain(optax.scale(2.0), jo.larc(inner, RATE), optax.scale(0.5))
    got, _ = first(tx, params, [g * 0.5 for g in grads])
    whole, _ = first(jo.larc(jo.fused_sgd(RATE, 0.9)), params, grads)
    assert_close(got, [u * 0.5 for u in whole], rtol=1e-5)


def test_extra_args_reach_the_inner_transformation():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = jo.larc(optax.chain(optax.sgd(1.0), plateau), 1.0)
    params = [jnp.ones(2)]
    state = tx.init(params)
    for _ in range(3):
        _, state = update(tx, params, state, params, value=jnp.float32(1))
    # The second and the third value are no better than the first.
    assert optax.tree.get(state, "scale") == 0.25
