"""The fused optimizers under master weights, at every level, and in AmpState's ways.

Where gradients and rates are powers of two, what a step gives is known to the bit.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from jamp import optimizers as jo
from tests.bits import assert_same_bits
from tests.fused import OPTIMIZERS, STANDARD, fresh, make as make_tx
from tests.masters import BF16, F16, assert_it_holds
from tests.one_pass import (
    F32,
    HALF,
    dot,
    each_backend,
    each_kept,
    start,
    step,
)


@pytest.mark.standard_promotion  # optax.apply_updates adds fp32 to half
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_params_are_their_rounded_masters_after_every_step(name):
    halves = (F16 if name in ("adam", "larc_adam") else BF16, BF16)
    assert_it_holds(lambda rate: fresh(name, learning_rate=rate), halves=halves)


# Levels; O1 and O4 step as O0 does

LEVELS = ("O0", "O2", "O3", "O5")
RATES = {"sgd": 0.05, "adagrad": 0.1, "novograd": 0.1, "lamb": 0.02, "larc_sgd": 0.2}
# Each optimizer at two levels, and each level with four optimizers or three.
PAIRS = [
    pytest.param(name, LEVELS[(k + j) % 4], marks=STANDARD if "_adam" in name else ())
    for k, name in enumerate(OPTIMIZERS)
    for j in (0, 1)
]
RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.normal(size=(16, 4)), F32)
Y = X @ jnp.asarray(RNG.normal(size=(4, 2)), F32)
PARAMS = {"w": jnp.asarray(RNG.normal(size=(4, 2)), F32), "norm": {"s": jnp.ones(())}}


@functools.partial(jax.jit, static_argnums=2)
def train(state, x, steps):
    """Some steps: the state, and the loss before each of them."""

    def loss_fn(p):
        out = (x.astype(p["w"].dtype) @ p["w"]).astype(F32)
        return jnp.square(out * p["norm"]["s"] - Y).mean()

    def one(state, _):
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state)
        return state.apply_gradients(grads=grads), loss

    return lax.scan(one, state, length=steps)


@pytest.mark.parametrize("name, level", PAIRS)
def test_every_level_learns_and_skips_as_one(name, level):
    tx = make_tx(name, learning_rate=RATES.get(name, 0.05))
    keep = {"keep_fp32": "norm"} if level in HALF else {}
    state = start(tx, level, PARAMS, **keep)
    assert state.params["w"].dtype == HALF.get(level, F32)
    state, losses = train(state, X, 20)
    assert (state.step, state.skipped_steps) == (20, 0)
    assert losses[-1] < 0.9 * losses[0]
    skipped, _ = train(state, X.at[0, 0].set(jnp.inf), 20)
    assert (skipped.step, skipped.skipped_steps) == (20, 20)
    assert_skipped(skipped, state)
    assert skipped.loss_scale < state.loss_scale
    if level in ("O2", "O5"):
        masters = jamp.master_params(state)
        assert_same_bits(masters["w"].astype(HALF[level]), state.params["w"])


# What is checked

GOOD = 2.0**-6
AT = {"bare": "O0", "masters": "O2", "split": "O5"}


def small():
    """A leaf that kernels take, and one that they do not."""
    return {"v": jnp.full(130, 1.0), "w": jnp.full(2, 2.0)}


def like(value, place=None):
    """Gradients of one value; `value` at one place of the first leaf, else GOOD."""
    v = np.full(130, value if place is None else GOOD, np.float32)
    if place is not None:
        v[place] = value
    return {"v": v, "w": np.full(2, v[1], np.float32)}


def sgd(backend="xla", momentum=0.0):
    return jo.fused_sgd(1.0, momentum, backend=backend)


def make(tx=None, kept="masters", tree=None, **kwargs):
    kwargs["store_remainder"] = kept == "split"
    return start(tx or sgd(), AT[kept], tree or small(), **kwargs)


def assert_stepped_by(state, value):
    """One step down from the first params, by `value`."""
    for key, p in small().items():
        expected = np.asarray(p) - np.float32(value)
        np.testing.assert_array_equal(jamp.master_params(state)[key], expected)


def assert_skipped(after, before):
    assert_same_bits(after.params, before.params)
    assert_same_bits(after.opt_state, before.opt_state)
    assert after.step == before.step


@jax.jit
def plain_step(state, x):
    return state.apply_gradients(grads=x)


@each_backend
def test_what_is_checked(backend):
    # A static scale checks nothing,
    state = make(sgd(backend), loss_scale=4.0)
    after = step(state, like(np.nan, place=3))
    assert (after.step, after.skipped_steps, after.loss_scale) == (1, 0, 4.0)
    v = np.asarray(jamp.master_params(after)["v"])
    assert np.isnan(v[3]) and (np.delete(v, 3) == 1 - GOOD).all()
    # unless it is told to, and stays;
    state = make(sgd(backend), loss_scale=jamp.StaticLossScale(4.0, check=True))
    after = step(state, like(np.nan, place=129))
    assert_skipped(after, state)
    assert (after.skipped_steps, after.loss_scale) == (1, 4.0)
    # plain gradients are taken as unscaled, and checked.
    state = make(sgd(backend), "bare")
    assert_stepped_by(plain_step(state, like(GOOD)), GOOD)
    after = plain_step(state, like(np.inf, place=0))
    assert_skipped(after, state)
    assert after.loss_scale == state.loss_scale / 2


def test_update_args_are_ignored():
    args = {"value": F32(1), "grad": None, "grad_scale": F32(0), "found_inf": True}
    with_args = make().apply_gradients(grads=like(GOOD), update_args=args)
    assert_same_bits(with_args, make().apply_gradients(grads=like(GOOD)))


# Start, step, and the largest number.
EDGES = {"O2": (1.0, 1e6, 65504.0), "O5": (3.3e38, 1e37, 3.3895314e38)}
# Level, options, and what the masters are then.
BEYOND = {
    "float16": ("O2", {"master_weights": False}, 65504.0),
    "float16, master": ("O2", {}, 1000001.0),
    "bfloat16": ("O5", {"master_weights": False}, 3.3895314e38),
    "bfloat16, master": ("O5", {}, 3.4e38),
    "split": ("O5", {"store_remainder": True}, 3.3961775e38),
}


@each_backend
@pytest.mark.parametrize("row", BEYOND)
def test_params_beyond_half_are_clamped(row, backend):
    level, options, master = BEYOND[row]
    begin, up, largest = EDGES[level]
    tree = {"v": jnp.full(130, begin), "w": jnp.full(2, -begin)}
    state = start(sgd(backend), level, tree, loss_scale=1.0, **options)
    grads = jax.tree.map(lambda p: -up * jnp.sign(p), tree)
    after = plain_step(state, grads | {"v": grads["v"].at[7].set(jnp.nan)})
    for tree, at in ((after.params, largest), (jamp.master_params(after), master)):
        v, w = (np.float32(tree[key]) for key in "vw")
        assert np.isnan(v[7])
        np.testing.assert_allclose(np.delete(v, 7), np.float32(at), 1e-6)
        np.testing.assert_allclose(w, -np.float32(at), 1e-6)


# Groups


@functools.cache
def three():
    """Two fused optimizers, of two backends, and one of optax's."""
    txs = {"d": sgd(momentum=0.5), "g": sgd("interpret"), "o": optax.sgd(1.0)}
    trees = {key: small() for key in txs}
    return jamp.initialize(trees, txs, "O2", num_losses=2, verbosity=0)


@jax.jit
def losses_of_groups(state, x, y):
    """Loss 0 is of the groups d and o, loss 1 of g."""

    def first(p):
        return dot(p["d"], x) + dot(p["o"], x)

    grads = [
        jamp.scaled_grad(first, wrt=("d", "o"), loss_id=0)(state),
        jamp.scaled_grad(lambda p: dot(p["g"], y), wrt="g", loss_id=1)(state),
    ]
    return state.apply_gradients(grads=grads)


@pytest.mark.parametrize("bad", ["", "do", "g"])
def test_an_overflow_in_one_loss_skips_its_groups_alone(bad):
    state = three()
    x, y = (like(np.inf if key in bad else GOOD, place=64) for key in "dg")
    after = losses_of_groups(state, x, y)
    masters = jamp.master_params(after)
    for key in "dgo":
        assert after.skipped_steps[key] == int(key in bad)
        if key in bad:
            assert_same_bits(after.params[key], state.params[key])
            assert_same_bits(after.opt_state[key], state.opt_state[key])
        else:
            np.testing.assert_array_equal(masters[key]["v"], np.float32(1 - GOOD))
            np.testing.assert_array_equal(masters[key]["w"], np.float32(2 - GOOD))
    halves = [2.0**16 / (1 + (key in bad)) for key in "dg"]
    assert list(map(float, after.loss_scale)) == halves
    assert after.step == 1


# Leaves that no optimizer steps


@each_kept
def test_fp8_scales_are_written_and_integers_stay(kept):
    params = {"v": jnp.full(130, 1.0), "ids": jnp.arange(3), "gain": jnp.ones(())}
    tree = {"params": params, "_overwrite_with_gradient": {"amax": jnp.float32(3)}}
    state = make(kept=kept, tree=tree)
    assert_same_bits(state.params["params"]["ids"], params["ids"])

    def grads(v, amax):
        stepped = {"v": jnp.full(130, v), "ids": None, "gain": jnp.float32(GOOD)}
        amax = {"amax": jnp.float32(amax)}
        return {"params": stepped, "_overwrite_with_gradient": amax}

    # Not unscaled, not stepped, not checked: written.
    for new in (7.0, np.inf):
        after = plain_step(state, grads(GOOD, new))
        amax = after.params["_overwrite_with_gradient"]["amax"]
        assert (amax.dtype, amax) == (F32, new)
        assert_same_bits(after.params["params"]["ids"], params["ids"])
        masters = jamp.master_params(after)["params"]
        assert (masters["v"] == 1 - GOOD).all() and masters["gain"] == 1 - GOOD
        assert after.params["params"]["v"].dtype == HALF.get(AT[kept], F32)
    assert_skipped(plain_step(state, grads(np.inf, 7.0)), state)
