"""The fused optimizers under master weights and at every level: they learn and skip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from tests.bits import assert_same_bits
from tests.fused import FIELDS, assert_close, each, make

LEVELS = ("O0", "O2", "O3", "O5")  # O1 and O4 step as O0 does
HALF = {"O2": jnp.float16, "O3": jnp.float16, "O5": jnp.bfloat16}
RATES = {"sgd": 0.05, "adagrad": 0.1, "novograd": 0.1, "lamb": 0.02, "larc_sgd": 0.2}

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(16, 4)), jnp.float32)
Y = X @ jnp.asarray(RNG.normal(size=(4, 2)), jnp.float32)


def params():
    rng = np.random.default_rng(1)
    return {
        "w": jnp.asarray(rng.normal(size=(4, 2)), jnp.float32),
        "norm": {"scale": jnp.ones(())},
    }


def loss_fn(p, x, y):
    out = (x.astype(p["w"].dtype) @ p["w"]).astype(jnp.float32)
    return jnp.square(out * p["norm"]["scale"] - y).mean()


def optimizer(name):
    return make(name, learning_rate=RATES.get(name, 0.05))


# Master weights, under nothing but optax.apply_updates


@pytest.mark.standard_promotion  # optax.apply_updates adds fp32 to half
@each
def test_params_are_their_rounded_masters_after_every_step(name):
    tx = jamp.master_weights(optimizer(name))
    dtypes = {"a": jnp.float16, "b": jnp.bfloat16, "norm": {"scale": jnp.float32}}
    start = {"a": params()["w"], "b": params()["w"][0], "norm": params()["norm"]}
    start = jax.tree.map(lambda p, d: p.astype(d), start, dtypes)
    rng = np.random.default_rng(2)
    grads = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=(12, *p.shape)), p.dtype), start
    )

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        carry = optax.apply_updates(params, updates), state
        return carry, (carry[0], state.masters)

    carry = start, tx.init(start)
    (_, state), (history, masters) = jax.jit(lambda c: lax.scan(step, c, grads))(carry)
    assert isinstance(masters["norm"]["scale"], optax.MaskedNode)
    for key in ("a", "b"):
        assert masters[key].dtype == jnp.float32
        assert_same_bits(history[key], masters[key].astype(dtypes[key]))
        assert (history[key][-1] != start[key]).all()
    for field in FIELDS[name]:
        for x in jax.tree.leaves(optax.tree.get(state, field)):
            assert x.dtype == jnp.float32


# Levels


@functools.partial(jax.jit, static_argnums=2)
def step(state, x, steps):
    """Some steps: the state, and the loss before each of them."""

    def one(state, _):
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x, Y)
        return state.apply_gradients(grads=grads), loss

    return lax.scan(one, state, length=steps)


@each
@pytest.mark.parametrize("level", LEVELS)
def test_every_level_learns_and_skips_as_one(name, level):
    state = jamp.initialize(
        params(),
        optimizer(name),
        level,
        loss_scale=jamp.DynamicLossScale(init_scale=2.0**8),
        keep_fp32="norm" if level in HALF else None,
        verbosity=0,
    )
    assert state.params["w"].dtype == HALF.get(level, jnp.float32)
    state, losses = step(state, X, 20)
    assert state.step == 20
    assert state.skipped_steps == 0
    assert losses[-1] < 0.9 * losses[0]
    skipped, _ = step(state, X.at[0, 0].set(jnp.inf), 20)
    assert skipped.skipped_steps == 20
    assert skipped.step == 20
    for field in ("params", "opt_state"):
        assert_same_bits(getattr(skipped, field), getattr(state, field))
    assert skipped.loss_scale < state.loss_scale
    if level in ("O2", "O5"):
        masters = jamp.master_params(state)
        assert_same_bits(masters["w"].astype(HALF[level]), state.params["w"])


@pytest.mark.standard_promotion
@each
def test_at_o2_a_step_is_that_of_the_plain_loop_of_optax(name):
    tx = optimizer(name)
    state = jamp.initialize(params(), tx, "O2", keep_fp32="norm", verbosity=0)
    plain = jamp.master_weights(tx)
    start = state.params, plain.init(params())
    rng = np.random.default_rng(3)
    grads = jax.tree.map(
        lambda p: jnp.asarray(rng.normal(size=(5, *p.shape)), p.dtype), state.params
    )

    @jax.jit
    def both(state, carry, grads):
        def amp(state, grads):
            return state.apply_gradients(grads=grads), None

        def optax_loop(carry, grads):
            params, inner = carry
            updates, inner = plain.update(grads, inner, params)
            return (optax.apply_updates(params, updates), inner), None

        return lax.scan(amp, state, grads)[0], lax.scan(optax_loop, carry, grads)[0]

    state, (looped, inner) = both(state, start, grads)
    masters = jamp.master_params(state)
    expected = inner.masters | {"norm": looped["norm"]}
    # Two programs of the same formula: XLA contracts their products differently.
    assert_close(masters, expected, rtol=1e-5, atol=1e-6)
    assert_close(state.params, looped, rtol=2.0**-9)
    for field in FIELDS[name]:
        a, b = (optax.tree.get(x, field) for x in (state.opt_state, inner))
        assert_close(a, b, rtol=1e-4, atol=1e-6)
