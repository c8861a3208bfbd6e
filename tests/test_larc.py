"""LARC around fused and other optimizers, against its oracle in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jamp import optimizers as jo
from tests.bits import assert_same_bits
from tests.fused import assert_close, update
from tests.oracles import fused_adam, fused_sgd, larc as oracle

# optax's inner transformations promote as they like.
pytestmark = pytest.mark.standard_promotion

STEPS = 20
RATE = 0.05


def problem(seed=0):
    """Leaves of several shapes, one of zeros, and gradients; one of those is zero."""
    rng = np.random.default_rng(seed)
    shapes = [(3, 4), (5,), (), (0,), (2,), (3,)]
    params = [rng.normal(size=s).astype(np.float32) for s in shapes]
    params[4][:] = 0
    grads = []
    for _ in range(STEPS):
        now = [rng.normal(size=s).astype(np.float32) * 0.1 for s in shapes]
        now[5][:] = 0
        grads.append(now)
    return params, grads


def schedule(count):
    return RATE / (1 + count)


def run(tx, params, grads, **kwargs):
    """The params after each step, and the last state."""

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params, **kwargs)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    stacked = [jnp.stack(g) for g in zip(*grads, strict=True)]
    params = [jnp.asarray(p) for p in params]
    (_, state), history = jax.jit(lambda c: jax.lax.scan(step, c, stacked))(
        (params, tx.init(params))
    )
    return history, state


def assert_matches(history, expected, tolerance=2e-6):
    for t, result in enumerate(expected):
        for got, wanted in zip(history, result.params, strict=True):
            np.testing.assert_allclose(got[t], wanted, 10 * tolerance, tolerance)


# optax corrects Adam's bias in float32: 1 - 0.999 is off by 1e-5 of itself there.
TOLERANCE = {"optax_adam": 1e-5}


SGD = functools.partial(fused_sgd.fused_sgd, momentum=0.9, nesterov=True)
ADAM = functools.partial(fused_adam.fused_adam, b1=0.8)
# Ours with weight decay `wd`, and the oracle of the inner one, without.
INNERS = {
    "fused_sgd": (
        lambda rate, wd: jo.larc(
            jo.fused_sgd(rate, 0.9, nesterov=True, weight_decay=wd)
        ),
        SGD,
    ),
    "optax_sgd": (
        lambda rate, wd: jo.larc(
            optax.sgd(rate, 0.9, nesterov=True), rate, weight_decay=wd
        ),
        SGD,
    ),
    "fused_adam": (
        lambda rate, wd: jo.larc(jo.fused_adam(rate, 0.8, weight_decay=wd)),
        ADAM,
    ),
    "optax_adam": (
        lambda rate, wd: jo.larc(optax.adam(rate, 0.8), rate, weight_decay=wd),
        ADAM,
    ),
}


@pytest.mark.parametrize(
    "rate, weight_decay", [(RATE, 0.1), (schedule, 0.0)], ids=["float", "schedule"]
)
@pytest.mark.parametrize("name", INNERS)
def test_twenty_steps_match_float64(name, rate, weight_decay):
    make, inner = INNERS[name]
    params, grads = problem()
    history, state = run(make(rate, weight_decay), params, grads)
    assert state.count == STEPS
    expected = oracle.larc(
        params, grads, learning_rate=rate, weight_decay=weight_decay, inner=inner
    )
    assert_matches(history, expected, TOLERANCE.get(name, 2e-6))


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("fused", [False, True])
def test_without_clipping_the_rate_is_scaled(fused, weight_decay):
    options = {"clip": False, "trust_coefficient": 0.3, "eps": 1e-3}
    if fused:
        inner = jo.fused_sgd(RATE, 0.9, weight_decay=weight_decay)
        tx = jo.larc(inner, **options)
    else:
        tx = jo.larc(optax.sgd(RATE, 0.9), weight_decay=weight_decay, **options)
    params, grads = problem()
    inner = functools.partial(fused_sgd.fused_sgd, momentum=0.9)
    expected = oracle.larc(
        params,
        grads,
        learning_rate=RATE,
        weight_decay=weight_decay,
        inner=inner,
        **options,
    )
    history, _ = run(tx, params, grads)
    assert_matches(history, expected)


@pytest.mark.parametrize("name", ["fused_sgd", "optax_sgd"])
def test_both_ends_of_the_clip(name):
    # 0.02 * 5 / 0.5 = 0.2 is above the rate and 0.02 * 5 / 50 = 0.002 below.
    make, _ = INNERS[name]
    params = jnp.asarray([3.0, 4.0])
    rate = 0.1
    for size, effective in ((0.1, rate), (10.0, 0.002)):
        grads = params * size
        tx = make(rate, 0.0)
        updates, _ = tx.update(grads, tx.init(params), params)
        # Nesterov's first step is g + 0.9 g.
        np.testing.assert_allclose(updates, -1.9 * effective * grads, rtol=1e-5)


@pytest.mark.parametrize("name", INNERS)
def test_a_zero_norm_leaves_the_gradient_alone_and_decays_nothing(name):
    make, _ = INNERS[name]
    tx, plain = make(RATE, 0.5), make(RATE, 0.0)
    params = {"zero": jnp.zeros(3), "still": jnp.ones(3)}
    grads = {"zero": jnp.ones(3), "still": jnp.zeros(3)}
    updates, _ = tx.update(grads, tx.init(params), params)
    inner = optax.adam(RATE, 0.8) if "adam" in name else None
    inner = inner or optax.sgd(RATE, 0.9, nesterov=True)
    expected, _ = inner.update(grads, inner.init(params), params)
    assert_close(updates, expected, rtol=1e-5)
    assert_close(plain.update(grads, plain.init(params), params)[0], updates)


@pytest.mark.parametrize("name", INNERS)
def test_a_warm_up_may_start_at_a_rate_of_zero(name):
    make, _ = INNERS[name]
    tx = make(lambda count: 0.1 * count, 0.1)
    params = jnp.asarray([3.0, 4.0])
    state = tx.init(params)
    first, state = update(tx, params, state, params)
    second, _ = update(tx, params, state, params)
    np.testing.assert_array_equal(first, 0)
    assert (second < 0).all()


def test_what_is_given_to_larc_goes_before_what_the_inner_one_has():
    params, grads = ([jnp.asarray(x) for x in tree] for tree in problem()[:1] * 2)
    grads = [g + 0.5 for g in grads]

    def first(tx):
        return tx.update(grads, tx.init(params), params)[0]

    inner = jo.fused_sgd(RATE, 0.9, weight_decay=0.1)
    assert_same_bits(
        first(jo.larc(inner, weight_decay=0.3)),
        first(jo.larc(jo.fused_sgd(RATE, 0.9, weight_decay=0.3))),
    )
    assert_same_bits(
        first(jo.larc(inner, weight_decay=0.0)),
        first(jo.larc(jo.fused_sgd(RATE, 0.9))),
    )


@pytest.mark.parametrize("name", INNERS)
def test_grad_scale_and_found_inf(name):
    make, inner = INNERS[name]
    tx = make(schedule, 0.1)
    params, grads = problem()
    state = tx.init(params := [jnp.asarray(p) for p in params])
    skip = [t in (1, 2, 7) for t in range(10)]
    history = []
    for g, skips in zip(grads, skip, strict=False):
        g = [jnp.asarray(x * 2.0**8) for x in g]
        if skips:
            g = [x * jnp.nan for x in g]
        before = state
        updates, state = update(
            tx,
            g,
            state,
            params,
            grad_scale=jnp.float32(2.0**8),
            found_inf=jnp.bool_(skips),
        )
        params = optax.apply_updates(params, updates)
        if skips:
            assert_same_bits(state, before)
        history.append(params)
    expected = oracle.larc(
        problem()[0],
        grads[:10],
        learning_rate=schedule,
        weight_decay=0.1,
        inner=inner,
        skip=skip,
    )
    history = [list(x) for x in zip(*history, strict=True)]
    assert_matches(history, expected, TOLERANCE.get(name, 2e-6))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_around_a_fused_one_half_leaves_are_computed_in_float32(dtype):
    params = [jnp.asarray(x).astype(dtype) for x in problem()[0]]
    grads = [jnp.asarray(x).astype(dtype) for x in problem()[1][0]]
    make, _ = INNERS["fused_sgd"]
    tx = make(RATE, 0.1)
    got, state = tx.update(grads, tx.init(params), params)
    wide = [[x.astype(jnp.float32) for x in tree] for tree in (params, grads)]
    expected, wide_state = tx.update(wide[1], tx.init(wide[0]), wide[0])
    assert_close(got, expected)
    assert_close(state, wide_state)


def test_around_a_chain_and_inside_one():
    params, grads = problem()
    inner = optax.chain(optax.trace(0.9), optax.scale_by_learning_rate(RATE))
    tx = optax.chain(optax.scale(2.0), jo.larc(inner, RATE), optax.scale(0.5))
    history, _ = run(tx, params, [[g * 0.5 for g in now] for now in grads])
    expected = oracle.larc(
        params,
        grads,
        learning_rate=RATE,
        inner=functools.partial(fused_sgd.fused_sgd, momentum=0.9),
    )
    # Half of every update: LARC sees the parameters that those lead to.
    first = next(iter(expected)).params
    for got, wanted, p in zip(history, first, params, strict=True):
        np.testing.assert_allclose(got[0] - p, (wanted - p) / 2, rtol=1e-3, atol=1e-6)


def test_extra_args_reach_the_inner_transformation():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = jo.larc(optax.chain(optax.sgd(1.0), plateau), 1.0)
    params = [jnp.ones(2)]
    state = tx.init(params)
    for _ in range(3):
        _, state = update(tx, params, state, params, value=jnp.float32(1))
    # The second and the third value are no better than the first.
    assert optax.tree.get(state, "scale") == 0.25
