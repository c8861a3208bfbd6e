"""Test gradients inside a scaled loss against float64, and gradients unscaled twice."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.support.states import make, wide

RATE = 0.125
W, X = np.float32([0.5, -0.25, 1.0]), np.float32([0.5, 1.0, 0.25])
TOLERANCE = {"O0": 1e-6, "O2": 2e-3, "O4": 2e-2}
SGD = optax.sgd(RATE)


def error(params, size=1.0):
    return size * ((wide(params["w"]) * X).sum() - 1) ** 2


INNER = ("scaled_grad", "a step", "scale_loss")


def outer(params, state, how, size=1.0):
    """Returns the error after a step."""
    at = state.replace(params=params)
    loss_fn = functools.partial(error, size=size)
    grads = jamp.scaled_grad(loss_fn)(at)
    if how == "a step":
        return error(at.apply_gradients(grads=grads).params)
    if how == "scale_loss":  # as in a gradient penalty
        scaled = jax.grad(lambda p: jamp.scale_loss(loss_fn(p), state))
        grads = jamp.unscale(scaled(params), state)
    fast = wide(params["w"]) - RATE * grads["w"]
    return error({"w": fast.astype(params["w"].dtype)})


def exact(size=1.0):
    """Returns the gradient of the error after one gradient step, in float64."""
    w, x = W.astype(np.float64), X.astype(np.float64)
    fast = w - RATE * size * 2 * (w @ x - 1) * x
    hessian = size * 2 * np.outer(x, x)
    return (np.eye(3) - RATE * hessian) @ (2 * (fast @ x - 1) * x)


@pytest.mark.slow
@pytest.mark.parametrize("how", INNER)
@pytest.mark.parametrize("level", TOLERANCE)
def test_the_second_derivative_is_right_at_every_level(level, how):
    scale = 1024.0 if level == "O2" else None
    state = make(level, {"w": W}, SGD, loss_scale=scale)
    loss, grads = jamp.scaled_value_and_grad(outer)(state, state, how)
    np.testing.assert_allclose(grads["w"], exact(), TOLERANCE[level], TOLERANCE[level])
    assert loss > 0


@pytest.mark.parametrize("how", INNER)
def test_an_inner_overflow_skips_the_outer_step(how):
    state = make("O2", {"w": W}, SGD)
    size = 8.0  # the inner gradient is inf at scales above 2^13

    @jax.jit
    def step(state):
        grads = jamp.scaled_grad(outer)(state, state, how, size)
        return state.apply_gradients(grads=grads), grads["w"]

    while not state.step and state.skipped_steps < 8:
        before = state
        state, grads = step(state)
        assert np.isnan(grads).all() or state.step
        assert state.loss_scale == before.loss_scale / (1 if state.step else 2)
    assert state.step == 1 and 2 <= state.skipped_steps < 8
    np.testing.assert_allclose(grads, exact(size), rtol=1e-2, atol=1e-2)


LEVELS = ("O0", "O1", "O2")
RULE = jamp.DynamicLossScale(64.0)


def begin(level, rule=RULE):
    return make(level, {"w": W}, optax.sgd(1.0), loss_scale=rule)


def loss_fn(params, x=X):
    return (wide(params["w"]) * x).sum() ** 2


def scaled(state, params):
    return jamp.scale_loss(loss_fn(params), state)


grads_of = jamp.scaled_grad
own = lambda s, f: jax.grad(f)(s.params)  # noqa: E731
TWICE = {
    "scaled_grad": lambda s: grads_of(loss_fn)(s),
    "unscale": lambda s: jamp.unscale(own(s, lambda p: scaled(s, p)), s),
}


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("level", LEVELS)
def test_unscale_of_unscaled_gradients_raises(level, name):
    state, call = begin(level), lambda s: jamp.unscale(TWICE[name](s), s)
    for run in (call, jax.jit(call)):
        with pytest.raises(ValueError, match="Delete the call of jamp.unscale"):
            run(state)


@pytest.mark.parametrize("changed", ["a", "b", "c"])
@pytest.mark.parametrize("keeps", [True, False])
def test_unscale_notices_each_unscaled_gradient(changed, keeps):
    params = {name: W for name in "abc"}
    state = make("O2", params, optax.sgd(1.0), loss_scale=RULE)

    def call(state):
        grads = grads_of(lambda p: sum(wide(x) @ X for x in p.values()))(state)
        kept = grads if keeps else None
        grads = {**grads, changed: grads[changed] * 2}
        return kept, jamp.unscale(grads, state)

    for run in (call, jax.jit(call)):
        with pytest.raises(ValueError, match="Delete the call of jamp.unscale"):
            run(state)


def summed(grads, more):
    return jax.tree.map(lambda a, b: (a + b) / 2, grads, more)


def sharpness_aware(s):
    """Scales a loss at params that unscaled gradients moved."""
    move = lambda p, g: p + (g / 64).astype(p.dtype)  # noqa: E731
    moved = jax.tree.map(move, s.params, grads_of(loss_fn)(s))
    return jamp.unscale(jax.grad(lambda p: scaled(s, p))(moved), s)


def two_steps(s):
    after = s.apply_gradients(grads=grads_of(loss_fn)(s))
    return jamp.unscale(own(after, lambda p: scaled(after, p)), after)


def closed_over(s):
    """The scale is a constant from an outer trace in a loop."""
    body = lambda total, _: (summed(total, sharpness_aware(s)), None)  # noqa: E731
    return jax.lax.scan(body, {"w": jnp.zeros(3)}, length=2)[0]


@pytest.mark.parametrize("rule", [RULE, 64.0])
@pytest.mark.parametrize("fn", [sharpness_aware, two_steps, closed_over])
def test_unscale_takes_scaled_gradients_that_depend_on_unscaled_ones(fn, rule):
    state = begin("O2", rule)
    grads, again = jax.jit(fn)(state), fn(state)
    np.testing.assert_allclose(grads["w"], again["w"], rtol=2e-2)
