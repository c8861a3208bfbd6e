"""Test LARC around fused and other optimizers against its float64 oracle."""

import functools

import jax.numpy as jnp
import optax
import pytest

from jamp import optimizers as jo
from tests.optimizers.fused import first, update
from tests.optimizers.fused_steps import (
    KINDS,
    SKIPPED,
    TOLERANCE,
    check,
    problem,
    update as run,
)
from tests.oracles import fused as oracles
from tests.support.bits import assert_rounded_alike, assert_same_bits

# optax's inner transformations promote.
pytestmark = pytest.mark.standard_promotion

RATE = 0.05


def schedule(count):
    """Warms up from a rate of zero."""
    return RATE * count / (1 + count)


# jamp's LARC with weight decay `wd`. INNERS has the inner oracles without decay.
def fused_sgd(rate, wd=0.0, **options):
    inner = jo.fused_sgd(rate, 0.9, nesterov=True, weight_decay=wd)
    return jo.larc(inner, **options)


def optax_adam(rate, wd=0.0, **options):
    return jo.larc(optax.adam(rate, 0.8), rate, weight_decay=wd, **options)


INNERS = {
    fused_sgd: functools.partial(oracles.fused_sgd, momentum=0.9, nesterov=True),
    optax_adam: functools.partial(oracles.fused_adam, b1=0.8),
}
UNCLIPPED = {"clip": False, "trust_coefficient": 0.3, "eps": 1e-3}


@pytest.mark.parametrize("make", INNERS)
@pytest.mark.parametrize(
    "rate, wd, options",
    [(RATE, 0.1, {}), (schedule, 0.0, {}), (RATE, 0.1, UNCLIPPED)],
    ids=["clipped", "schedule", "unclipped"],
)
def test_twenty_steps_match_float64(make, rate, wd, options):
    # LARC adapts neither the leaf without gradients nor the one that starts at zero.
    shapes = [(3, 4), (3,), (2,), (5,), (), (0,)]
    leaves = [(s, KINDS[3 if s == (5,) else 0]) for s in shapes]  # one in float16
    given = problem(leaves, **({"grad_scale": 256.0, "skips": SKIPPED} if wd else {}))
    how = {"learning_rate": rate, "weight_decay": wd, "inner": INNERS[make]}
    expected = functools.partial(oracles.larc, **how, **options)
    # optax computes 1 - 0.999 in float32, which has a relative error of 1e-5.
    tolerance = 2e-5 if make is optax_adam else TOLERANCE
    check(make(rate, wd, **options), expected, given, run, tolerance)


def test_larcs_arguments_override_the_inner_optimizers():
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
    got, wanted = (first(tx, params)[0] for tx in (jo.larc(inner, 1e-3), theirs))
    assert_rounded_alike(got, wanted)


def test_extra_args_reach_the_inner_transformation():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = jo.larc(optax.chain(optax.sgd(1.0), plateau), 1.0)
    params = [jnp.ones(2)]
    state = tx.init(params)
    for _ in range(3):
        _, state = update(tx, params, state, params, value=jnp.float32(1))
    # The second and third values do not improve on the first.
    assert optax.tree.get(state, "scale") == 0.25
