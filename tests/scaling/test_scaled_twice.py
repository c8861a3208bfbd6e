"""Test the errors for a loss that is scaled twice, or gradients unscaled twice."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp import fp16_utils
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
RETURN, ONE = "Delete the call of jamp.scale_loss", "Delete one of the two calls"
UNSCALE = "Delete the call of jamp.unscale"


def in_the_loss(wrap, **options):
    """Differentiates a wrapped loss that calls `scale_loss`."""
    return lambda s: grads_of(wrap(lambda p: scaled(s, p)), **options)(s)


OLDER = fp16_utils.FP16_Optimizer(optax.sgd(1.0), verbose=False)
HALF = {"w": np.float16(W)}
# A mistake, and the call to delete.
WRONG = {
    "in the loss": (in_the_loss(lambda f: f), RETURN),
    "beside a penalty": (in_the_loss(lambda f: lambda p: f(p) + 1), RETURN),
    "with aux": (in_the_loss(lambda f: lambda p: (f(p), 1), has_aux=True), RETURN),
    "in a jit of the loss": (in_the_loss(jax.jit), RETURN),
    "in a checkpoint": (in_the_loss(jax.checkpoint), RETURN),
    "in a closure": (
        lambda s: jax.grad(jamp.closure(lambda p: scaled(s, p))(s))({"w": X}),
        RETURN,
    ),
    "in another's loss": (
        lambda s: grads_of(lambda p: scaled(begin("O2"), p))(s),
        RETURN,
    ),
    "in FP16_Optimizer": (
        lambda s: OLDER.backward(OLDER.init(HALF), lambda p: scaled(s, p)),
        RETURN,
    ),
    "scaled twice": (lambda s: own(s, lambda p: jamp.scale_loss(scaled(s, p), s)), ONE),
    "unscale of scaled_grad": (
        lambda s: jamp.unscale(grads_of(loss_fn)(s), s),
        UNSCALE,
    ),
    "unscale twice": (
        lambda s: jamp.unscale(jamp.unscale(own(s, lambda p: scaled(s, p)), s), s),
        UNSCALE,
    ),
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("level", LEVELS)
def test_it_raises_while_tracing_and_says_what_to_delete(level, name):
    call, says = WRONG[name]
    state = begin(level)
    for run in (call, jax.jit(call)):
        with pytest.raises(ValueError, match=says):
            run(state)
    assert not np.isnan(grads_of(loss_fn)(state)["w"]).any()  # the error left no trace


def summed(grads, more):
    return jax.tree.map(lambda a, b: (a + b) / 2, grads, more)


def test_unscale_of_a_mean_of_unscaled_gradients_raises_under_jit():
    def step(s):
        return jamp.unscale(summed(grads_of(loss_fn)(s), grads_of(loss_fn)(s)), s)

    with pytest.raises(ValueError, match=UNSCALE):
        jax.jit(step)(begin("O2"))


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


def penalized(state, params, x):
    """Adds a gradient penalty, whose inner gradient is scaled and unscaled."""
    inner = jax.grad(lambda x: jamp.scale_loss(loss_fn(params, x), state))(x)
    return loss_fn(params, x) + (jamp.unscale(inner, state) ** 2).sum()


def limited(state, params, x):
    """Scales a number other than the loss."""
    limit = jamp.scale_loss(jnp.asarray(0.25), state) + jamp.scale_loss(x.sum(), state)
    return loss_fn(params, x) + 0 * limit


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("right", [penalized, limited])
def test_correct_uses_of_scale_loss_raise_nothing(right, level):
    state = begin(level)

    def run(state, x):
        return jamp.scaled_grad(lambda p, x: right(state, p, x))(state, x)["w"]

    expected = jax.grad(lambda w: loss_fn({"w": w}))(jnp.asarray(W))
    if right is penalized:  # (w . x)^2 has the slope 2 (w . x) w in x
        penalty = lambda w: 4 * (w * X).sum() ** 2 * (w**2).sum()  # noqa: E731
        expected = expected + jax.grad(penalty)(jnp.asarray(W))
    for each in (run, jax.jit(run)):
        np.testing.assert_allclose(each(state, X), expected, rtol=2e-2)
