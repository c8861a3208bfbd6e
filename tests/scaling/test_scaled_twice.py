"""Test that `unscale` refuses unscaled gradients, and only those."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from tests.support.states import make, wide

LEVELS = ("O0", "O1", "O2")
W, X = np.float32([0.5, -0.25, 1.0]), jnp.float32([0.5, 1.0, 0.25])
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
