"""Gradients that no loss scale, or no level, had part in, seen in one trace."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jamp

pytestmark = pytest.mark.standard_promotion

MODEL = nn.Dense(2)
X, Y = jnp.ones((4, 3)), jnp.zeros((4, 2))
PARAMS = {"kernel": jnp.ones((3, 2)), "bias": jnp.zeros(2)}
SGD = optax.sgd(0.1)


def make(level, **kwargs):
    options = {"apply_fn": MODEL.apply, "verbosity": 0} | kwargs
    return jamp.initialize(PARAMS, SGD, level, **options)


def by(apply_fn, x=X):
    return lambda params: ((apply_fn({"params": params}, x) - Y) ** 2).mean()


def plain(state):
    return jax.grad(by(state.apply_fn))(state.params)


def plain_model(state):
    return jax.grad(by(MODEL.apply))(state.params)


def by_hand(state, apply_fn=None):
    loss = by(apply_fn or state.apply_fn)
    grads = jax.grad(lambda p: jamp.scale_loss(loss(p), state))(state.params)
    return jamp.unscale(grads, state)


def by_hand_model(state):
    return by_hand(state, MODEL.apply)


def clipped(grads):
    return optax.clip_by_global_norm(0.5).update(grads, None)[0]


def summed(grads_of):
    def scanned(state):
        zeros = jax.tree.map(jnp.zeros_like, jamp.master_params(state))
        add = lambda total, _: (jax.tree.map(jnp.add, total, grads_of(state)), None)  # noqa: E731
        return jax.lax.scan(add, zeros, None, 2)[0]

    return scanned


def jitted(state):
    return jax.jit(lambda p: jax.grad(by(MODEL.apply))(p))(state.params)


SCALED = "loss scale, which is dynamic, has no part.*jamp.scaled_value_and_grad"
HALF = "float32 alone, and the level is O.*`state.apply_fn` in place of `model.apply`"
# Gradients, level, options, what is said.
PLAIN = {
    "O1": (plain, "O1", {}, SCALED),
    "O1, model.apply": (plain_model, "O1", {}, SCALED),
    "O1, summed": (summed(plain), "O1", {}, SCALED),
    "O1, jitted": (jitted, "O1", {}, SCALED),
    "O1, model.apply, scaled": (by_hand_model, "O1", {}, HALF),
    "O4, model.apply": (plain_model, "O4", {}, HALF),
    "O1, static, summed": (summed(plain_model), "O1", {"loss_scale": 1}, HALF),
}


@pytest.mark.parametrize("name", PLAIN)
def test_what_was_left_in_warns(name):
    grads_of, level, options, says = PLAIN[name]
    step = jax.jit(lambda state: state.apply_gradients(grads=grads_of(state)))
    with pytest.warns(jamp.PrecisionWarning, match=says):
        step(make(level, **options))


def scaled(state):
    return jamp.scaled_grad(by(state.apply_fn))(state)


def all_by_hand(state):
    loss = lambda p: by(state.apply_fn)(p) * state.loss_scale  # noqa: E731
    grads = jax.grad(loss)(state.params)
    return jax.tree.map(lambda g: g / state.loss_scale, grads)


def frozen(state):
    return scaled(state) | {"bias": jnp.zeros(2)}


RIGHT = {
    "scaled": scaled,
    "scaled, model.apply": lambda s: jamp.scaled_grad(by(MODEL.apply))(s),
    "summed, clipped": lambda s: clipped(summed(scaled)(s)),
    "by hand": by_hand,
    "all by hand": lambda s: clipped(all_by_hand(s)),
    "frozen": frozen,
    "of nothing": lambda s: jax.tree.map(jnp.ones_like, jamp.master_params(s)),
}


@pytest.mark.parametrize("level", ["O1", "O4"])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right_does_not(name, level):
    """Nor where a step of the same program has moved the scale since."""

    @jax.jit
    def step(state):
        grads = RIGHT[name](state)
        later = state.apply_gradients(grads=scaled(state))
        return state.apply_gradients(grads=grads), later.apply_gradients(grads=grads)

    step(make(level))


@pytest.mark.parametrize("level", ["O0", "O4"])
def test_nor_do_plain_gradients_where_they_are_right(level):
    jax.jit(lambda s: s.apply_gradients(grads=plain(s)))(make(level))


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_nor_does_the_model_itself_where_it_is_right(level):
    jax.jit(lambda s: s.apply_gradients(grads=by_hand_model(s)))(make(level))
