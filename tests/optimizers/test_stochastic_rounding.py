"""Test stochastic rounding of half params without masters."""

import functools
import pickle
from zlib import crc32

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp import optimizers as jo
from tests.oracles import rounding
from tests.support.bits import assert_same_bits
from tests.support.programs import FAST
from tests.support.states import assert_skipped, dot, step_on

BF16, F32 = jnp.bfloat16, jnp.float32
BARE = {"master_weights": False, "stochastic_rounding": True, "verbosity": 0}


def weights(seed=0):
    rng = np.random.default_rng(seed)
    shapes = {"a": (3, 200), "b": (7,), "kept": (150,)}
    return {k: np.float32(rng.normal(size=s)) for k, s in shapes.items()}


step = jax.jit(step_on(dot), compiler_options=FAST)


def oracle(params, grads, steps, rate):
    """Steps SGD in float32, and rounds with NumPy. `kept` stays float32."""
    p = {k: x.astype(BF16).astype(np.float32) for k, x in params.items()}
    p["kept"] = params["kept"]
    for t in range(steps):
        for name in ("a", "b", "kept"):
            p[name] = p[name] - np.float32(rate) * grads[name]
            if name != "kept":
                elements = np.arange(p[name].size).reshape(p[name].shape)
                random = rounding.random_16(t, crc32(name.encode()), elements, 2)
                p[name] = np.float32(rounding.rounded(p[name], random))
    return p


def with_state(tx):
    """Returns a function that trains a state for three steps."""

    def train(params, grads):
        state = jamp.initialize(params, tx, "O5", keep_fp32="kept", **BARE)
        for _ in range(3):
            state = step(state, grads)
        return state.params

    return train


def by_hand(params, grads):
    """Trains with the wrapper in an Optax loop."""
    tx = jo.stochastic_rounding(optax.sgd(2.0**-9))
    p = {k: jnp.asarray(x, F32 if k == "kept" else BF16) for k, x in params.items()}
    state = tx.init(p)
    for _ in range(3):
        updates, state = jax.jit(tx.update)(grads, state, p)
        p = optax.apply_updates(p, updates)
    assert state.count == 3
    return p


WAYS = {
    "optax": with_state(optax.sgd(2.0**-9)),
    "fused": with_state(jo.fused_sgd(2.0**-9)),
    "kernels": with_state(jo.fused_sgd(2.0**-9, backend="interpret")),
    "by hand": by_hand,
}


@pytest.mark.slow
@pytest.mark.standard_promotion  # apply_updates promotes
@pytest.mark.parametrize("way", WAYS)
def test_params_are_rounded_by_a_hash_of_step_leaf_and_element(way):
    params = weights()
    # bfloat16 numbers times a power of two are exact in any order and fusion.
    grads = {k: np.float32(x.astype(BF16)) for k, x in weights(1).items()}
    wanted = oracle(params, grads, 3, 2.0**-9)
    for name, x in WAYS[way](params, grads).items():
        assert x.dtype == (F32 if name == "kept" else BF16)
        np.testing.assert_array_equal(x.astype(F32), wanted[name])


def test_equal_wrappers_are_values():
    sgd, fused = optax.sgd(0.1), jo.stochastic_rounding(jo.fused_adam(0.1))
    assert jo.stochastic_rounding(sgd) == jo.stochastic_rounding(sgd) != fused
    assert pickle.loads(pickle.dumps(fused)) == fused


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx, where",
    [
        (optax.sgd(1.0), "eager"),
        (jo.fused_sgd(1.0, 0.9, moment_dtype="bfloat16"), "jit"),
    ],
    ids=["optax", "fused"],
)
def test_equal_groups_and_equal_leaves_are_rounded_independently(tx, where):
    """A weight moves with probability p, so two leaves differ in 2 p (1 - p) places."""
    tree = {"a": jnp.ones(4096), "b": jnp.ones(4096)}
    one = functools.partial(jamp.initialize, loss_scale=1.0, opt_level="O5", **BARE)
    state = one({"x": tree, "y": tree}, {"x": tx, "y": tx})
    grads = jax.tree.map(lambda w: jnp.full(w.shape, 1e-3), state.params)

    def step(state):
        return state.apply_gradients(grads=grads)

    step = jax.jit(step, compiler_options=FAST) if where == "jit" else step
    first = step(state)
    flipped = [p != 1 for p in jax.tree.leaves(first.params)]
    rate = 1e-3 * 2**8  # bfloat16's spacing below 1 is 2**-8
    for k, one_leaf in enumerate(flipped):
        assert one_leaf.mean() == pytest.approx(rate, abs=0.03)
        for other in flipped[:k]:
            unequal = (one_leaf != other).mean()
            assert unequal == pytest.approx(2 * rate * (1 - rate), abs=0.04)
    # A resumed run rounds like the original one.
    again = jamp.from_checkpoint(state, jamp.to_checkpoint(first))
    assert_same_bits(step(again), step(first))
    moments = optax.tree.get_all_with_path(step(first).opt_state, "trace")
    if moments:
        mine, theirs = (np.float32(x["a"]) for _, x in moments[:2])
        assert (mine != theirs).any()


def test_small_steps_add_up_in_the_mean():
    start = functools.partial(jamp.initialize, {"w": jnp.ones(4096)}, tx=optax.sgd(1.0))
    state = start(opt_level="O5", **BARE)
    nearest = start(opt_level="O5", master_weights=False, verbosity=0)
    x = {"w": jnp.full(4096, 1e-3)}
    for _ in range(100):
        state = step(state, x)
    moved = 1 - float(state.params["w"].astype(F32).mean())
    assert moved == pytest.approx(0.1, rel=8e-3)
    assert (step(nearest, x).params["w"] == 1).all()


@pytest.mark.parametrize("tx", [optax.sgd(1.0), jo.fused_sgd(1.0)])
def test_a_skip_keeps_every_bit_and_no_param_becomes_infinite(tx):
    rule = jamp.DynamicLossScale(init_scale=4.0)
    params = {"a": np.float32([1.0, 3.38e38])}
    state = jamp.initialize(params, tx, "O5", loss_scale=rule, **BARE)
    assert_skipped(step(state, {"a": np.float32([1.0, np.nan])}), state)
    grown = jamp.initialize(params, tx, "O5", loss_scale=1.0, **BARE)
    grown = step(grown, {"a": np.float32([0.0, -3e38])})
    assert np.isfinite(np.float32(grown.params["a"])).all()


@pytest.mark.slow
def test_checkpoints_pass_between_levels_with_masters_and_without():
    tx = jo.fused_adam(1e-2, moment_dtype="bfloat16")
    start = functools.partial(jamp.initialize, weights(), tx, "O5")
    whole = step(start(store_remainder=True, verbosity=0), weights(1))
    bare = jamp.from_checkpoint(start(**BARE), jamp.to_checkpoint(whole))
    rounded = jax.tree.map(lambda x: x.astype(BF16), jamp.master_params(whole))
    assert_same_bits(bare.params, rounded)
    assert_same_bits(bare.opt_state, whole.opt_state.inner_state)
    back = jamp.from_checkpoint(start(verbosity=0), jamp.to_checkpoint(bare))
    assert_same_bits(back.params, bare.params)
    wide = jax.tree.map(lambda x: x.astype(F32), bare.params)
    assert_same_bits(back.opt_state.masters, wide)
    split = jamp.from_checkpoint(whole, jamp.to_checkpoint(bare))
    assert_same_bits(split.params, bare.params)


@pytest.mark.parametrize(
    "level, options",
    [
        ("O5", {"master_weights": None}),
        ("O2", {}),
        ("O3", {"master_weights": None}),
        ("O4", {"master_weights": None}),
        ("O5", {"cast_model_type": False}),
    ],
)
def test_stochastic_rounding_needs_bfloat16_params_without_masters(level, options):
    with pytest.raises(jamp.OptLevelError, match="stochastic_rounding.*'O5', master"):
        jamp.initialize(weights(), optax.sgd(0.1), level, **(BARE | options))


def test_initialize_takes_the_bare_transformation():
    tx = optax.chain(optax.trace(0.9), jo.stochastic_rounding(optax.sgd(0.1)))
    with pytest.raises(ValueError, match="stochastic_rounding=True"):
        jamp.initialize(weights(), tx, "O5", master_weights=False, verbosity=0)
    with pytest.raises(TypeError, match="optax transformation"):
        jo.stochastic_rounding(0.1)
    with pytest.raises(ValueError, match=r"update\(grads, state, params\)"):
        jo.stochastic_rounding(optax.sgd(0.1)).update(jnp.ones(2), None)
