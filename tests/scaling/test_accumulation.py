"""Accumulated gradients, exactly: all numbers here are dyadic."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests import states
from tests.bits import assert_same_bits
from tests.states import assert_skipped, wide

# So that there are a half and a float32 leaf, where the level casts.
KEEP = {level: {"keep_fp32": "b"} for level in ("O2", "O3", "O5")}
LR, MOMENTUM = 0.5, 0.5
SGD = optax.sgd(LR, MOMENTUM)
START = {"w": [2.0, -1.0], "b": [1.0, 0.5]}


def make(level, tx=SGD, **kwargs):
    weights = {k: jnp.asarray(x, jnp.float32) for k, x in START.items()}
    kwargs = KEEP.get(level, {}) | {"loss_scale": jamp.DynamicLossScale(16.0)} | kwargs
    return states.make(level, weights, tx, **kwargs)


def loss_fn(p, x):
    """A loss whose gradient is `x`: for "w" its first entry, for "b" its second."""
    return wide(jnp.dot(wide(p["w"]), x[0]) + jnp.dot(wide(p["b"]), x[1]))


def gradients(*rows):
    """One gradient for all four weights, per micro-batch."""
    return np.float32(rows)[:, None, None] * np.ones((2, 2), np.float32)


def assert_held(after, before, scale, skipped):
    assert_skipped(after, before)
    assert (after.loss_scale, after.skipped_steps) == (scale, skipped)


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
        wanted, param = np.float64(start) - by, np.asarray(state.params[name])
        np.testing.assert_array_equal(np.float64(masters[name]), wanted)
        np.testing.assert_array_equal(param, wanted.astype(param.dtype))


@jax.jit
def mean_step(state, xs):
    """A step on the mean of micro-batches, summed by a loop and by a scan."""
    grad, add = jamp.scaled_grad(loss_fn), functools.partial(jax.tree.map, jnp.add)
    zeros = jax.tree.map(jnp.zeros_like, jamp.master_params(state))
    scanned, _ = jax.lax.scan(lambda g, x: (add(g, grad(state, x)), None), zeros, xs)
    sums = functools.reduce(add, (grad(state, x) for x in xs)), scanned
    means = (jax.tree.map(lambda g: g / len(xs), total) for total in sums)
    return [state.apply_gradients(grads=mean) for mean in means]


def mean_of(state, xs):
    after, scanned = mean_step(state, xs)
    assert_same_bits(scanned, after)
    return after


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_micro_batches_step_once_by_their_mean_or_not_at_all(level):
    state = make(level)
    first, second = gradients(1.0, 0.5, -0.25, 0.75), gradients(2.0, 1.0, 0.5, 0.5)
    after = mean_of(state, first)
    assert_moved(after, momentum(0.5))
    assert (after.step, after.loss_scales[0].unskipped) == (1, 1)
    for place in range(4):
        xs = first.copy()
        xs[place, place % 2, 0] = (np.inf, -np.inf, np.nan, np.inf)[place]
        bad = mean_of(after, xs)
        # One overflow, however many micro-batches.
        assert_held(bad, after, 8.0, 1)
        assert bad.loss_scales[0].unskipped == 0
    worse = mean_of(bad, np.full_like(first, np.nan))
    assert_held(worse, bad, 4.0, 2)
    # And what follows is the plain run without the skipped steps.
    again = mean_of(worse, second)
    assert_moved(again, momentum(0.5, 1.0))
    assert (again.step, again.skipped_steps) == (2, 2)
    # Beyond the largest half is no overflow: 16 * 4000 fits float16, the sum does not.
    after = mean_of(state, gradients(4000, 4000, 4000, -4000.0))
    assert (after.step, after.skipped_steps) == (1, 0)
    if level != "O4":  # 4000 is no bfloat16
        assert_moved(after, momentum(2000.0))
