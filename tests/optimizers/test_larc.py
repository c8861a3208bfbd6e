"""LARC around fused and other optimizers, against its oracle in float64."""

import functools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jamp import optimizers as jo
from tests.optimizers.fused import assert_close, first, update
from tests.optimizers.fused_steps import (
    SKIPPED,
    TOLERANCE,
    check,
    problem,
    update as run,
)
from tests.optimizers.mixed_leaves import KINDS
from tests.oracles import fused as oracles
from tests.support.bits import assert_same_bits

# optax's inner transformations promote as they like.
pytestmark = pytest.mark.standard_promotion

RATE = 0.05


def schedule(count):
    return RATE / (1 + count)


# Ours with weight decay `wd`, and the oracle of the inner one, without.
def fused_sgd(rate, wd=0.0, **options):
    inner = jo.fused_sgd(rate, 0.9, nesterov=True, weight_decay=wd)
    return jo.larc(inner, **options)


def optax_adam(rate, wd=0.0, **options):
    return jo.larc(optax.adam(rate, 0.8), rate, weight_decay=wd, **options)


SGD = functools.partial(oracles.fused_sgd, momentum=0.9, nesterov=True)
ADAM = functools.partial(oracles.fused_adam, b1=0.8)
INNERS = {fused_sgd: SGD, optax_adam: ADAM}
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
    # One leaf has no gradients, and one is of zeros.
    shapes = [(3, 4), (3,), (2,), (5,), (), (0,)]
    leaves = [(s, KINDS[3 if s == (5,) else 0]) for s in shapes]  # one in float16
    given = problem(leaves, **({"grad_scale": 256.0, "skips": SKIPPED} if wd else {}))
    how = {"learning_rate": rate, "weight_decay": wd, "inner": INNERS[make]}
    expected = functools.partial(oracles.larc, **how, **options)
    # optax corrects Adam's bias in float32: 1 - 0.999 is off by 1e-5 of itself there.
    tolerance = 2e-5 if make is optax_adam else TOLERANCE
    check(make(rate, wd, **options), expected, given, run, tolerance)


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
    params = jnp.arange(1.0, 4.0)
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


def test_extra_args_reach_the_inner_transformation():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = jo.larc(optax.chain(optax.sgd(1.0), plateau), 1.0)
    params = [jnp.ones(2)]
    state = tx.init(params)
    for _ in range(3):
        _, state = update(tx, params, state, params, value=jnp.float32(1))
    # The second and the third value are no better than the first.
    assert optax.tree.get(state, "scale") == 0.25
