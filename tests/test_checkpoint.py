"""Checkpoints: every state that we define, through Flax and Orbax, bit for bit."""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import jamp
from tests.bits import assert_same_bits

RUNNING = ("O0", "O2", "O3", "O5")
pytestmark = pytest.mark.standard_promotion  # for optax.adam and Flax's layers

X = np.float32(np.random.default_rng(0).normal(size=(8, 3)))


class Model(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.BatchNorm(use_running_average=False)(nn.Dense(2)(x))


MODEL = Model()
TX = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10)),
)


class Declared(jamp.AmpState):
    batch_stats: Any
    epoch: Any


def fresh(level, seed=0, **kwargs):
    variables = jax.jit(MODEL.init)(jax.random.key(seed), X)
    return jamp.initialize(
        variables["params"],
        TX,
        level,
        apply_fn=MODEL.apply,
        batch_stats=variables["batch_stats"],
        epoch=jnp.asarray(seed, jnp.int32),
        verbosity=0,
        **kwargs,
    )


@jax.jit
def step(state, x):
    def loss_fn(params):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
        return jnp.square(out - 1.0).mean() * 2.0**-10, new["batch_stats"]

    grads, stats = jamp.scaled_grad(loss_fn, has_aux=True)(state)
    return state.apply_gradients(grads=grads, batch_stats=stats, epoch=state.epoch + 1)


@pytest.fixture(scope="module")
def trained():
    """By level: after a clean step, a skip (where scales are checked) and a step."""
    states = {}
    with jax.numpy_dtype_promotion("standard"):
        for level in RUNNING:
            state = step(fresh(level), X)
            if state.loss_scale_rules[0].checks:
                state = step(state, X * np.inf)
                assert state.skipped_steps == 1
            states[level] = step(state, X)
            assert states[level].step == 2
    return states


def through_bytes(state, target):
    return serialization.from_bytes(target, serialization.to_bytes(state))


def through_state_dict(state, target):
    return serialization.from_state_dict(target, serialization.to_state_dict(state))


@pytest.mark.parametrize("level", RUNNING)
@pytest.mark.parametrize("trip", [through_bytes, through_state_dict])
def test_a_state_comes_back_through_flax(trained, level, trip):
    state = trained[level]
    again = trip(state, fresh(level, seed=1))
    assert_same_bits(again, state)
    assert_same_bits(step(again, X), step(state, X))


@pytest.mark.parametrize("level", RUNNING)
def test_a_state_comes_back_through_orbax(trained, level, tmp_path):
    state = trained[level]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "state", fresh(level, seed=1))
    assert_same_bits(again, state)
    assert_same_bits(step(again, X), step(state, X))


def test_orbax_restores_into_shapes_alone(trained, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", trained["O2"])
        checkpointer.wait_until_finished()
        shapes = jax.eval_shape(lambda: fresh("O2", seed=1))
        again = checkpointer.restore(tmp_path / "state", shapes)
    assert_same_bits(again, trained["O2"])


def test_the_state_dict_holds_masters_scale_and_counters_by_name(trained):
    # apex_semantics 6.8: apex's checkpoints have no masters.
    state = trained["O2"]
    d = serialization.to_state_dict(state)
    assert set(d) >= {"step", "params", "opt_state", "loss_scales", "skipped_steps"}
    assert set(d) >= {"batch_stats", "epoch", "last_step_skipped"}
    scale = d["loss_scales"]["0"]
    assert set(scale) == {"scale", "unskipped", "hysteresis", "consecutive_skips"}
    assert scale["scale"] == 2.0**15
    kernel = d["opt_state"]["masters"]["Dense_0"]["kernel"]
    assert kernel.dtype == jnp.float32
    assert not np.array_equal(kernel, np.float32(state.params["Dense_0"]["kernel"]))


def test_a_skip_that_is_pending_survives():
    state = step(fresh("O2"), X * np.inf)
    again = through_bytes(state, fresh("O2", seed=1))
    assert_same_bits(again, state)
    assert again.last_step_skipped
    assert again.loss_scales[0].consecutive_skips == 1


def test_a_declared_state_class_comes_back():
    state = step(fresh("O2", state_class=Declared), X)
    again = through_bytes(state, fresh("O2", seed=1, state_class=Declared))
    assert type(again) is Declared
    assert_same_bits(again, state)


@pytest.mark.parametrize(
    "pack",
    [list, tuple, lambda x: dict(zip("gd", x, strict=True))],
    ids=["list", "tuple", "dict"],
)
def test_groups_and_losses_come_back(pack):
    def make(value):
        trees = pack([{"w": jnp.full(2, value * i, jnp.float32)} for i in (1, 2)])
        txs = pack([TX, TX])
        return jamp.initialize(trees, txs, "O2", num_losses=2, verbosity=0)

    state = make(1.0)
    state = state.apply_gradients(grads=jax.tree.map(jnp.ones_like, make(1.0).params))
    again = through_bytes(state, make(3.0))
    assert_same_bits(again, state)


def test_a_prng_key_in_the_state_survives_as_its_bits():
    def make(seed):
        params = {"w": jnp.ones(2, jnp.float32)}
        rng = jax.random.key_data(jax.random.key(seed))
        return jamp.initialize(params, TX, "O2", rng=rng, verbosity=0)

    assert_same_bits(through_bytes(make(5), make(6)), make(5))


def test_typed_prng_keys_come_back_through_orbax(tmp_path):
    def make(seed):
        params = {"w": jnp.ones(2, jnp.float32)}
        keys = jax.random.key(seed), jax.random.key(seed, impl="rbg")
        return jamp.initialize(params, TX, "O2", keys=keys, verbosity=0)

    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", make(5))
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "state", make(6))
    assert_same_bits(again, make(5))


@pytest.mark.parametrize("trip", [through_bytes, through_state_dict])
def test_remainders_come_back(trip):
    def make(value):
        params = {"w": jnp.asarray([value, 1 + 2.0**-8, -0.1], jnp.float32)}
        return jamp.initialize(params, TX, "O5", store_remainder=True, verbosity=0)

    state = make(0.3)
    assert state.opt_state.masters["w"].dtype == jnp.uint16
    again = trip(state, make(0.7))
    assert_same_bits(again, state)
    masters = jamp.master_params(again)["w"]
    np.testing.assert_array_equal(masters, np.float32([0.3, 1 + 2.0**-8, -0.1]))


# Every pytree class that the package exports; flax passes unregistered ones through.


def exported_states():
    half = {"w": jnp.asarray([1.5, 2.5], jnp.float16), "n": jnp.ones(2, jnp.float32)}
    state = jamp.initialize(
        jax.tree.map(lambda x: x.astype(jnp.float32), half), TX, "O2", verbosity=0
    )
    grads = jamp.scaled_grad(lambda p: (p["w"].astype(jnp.float32) * 2).sum())(state)
    return {
        "AmpState": state,
        "LossScaleState": jamp.DynamicLossScale(init_scale=8.0).init(),
        "MasterWeightsState": jamp.master_weights(TX).init(half),
        "ScaledGrads": grads,
    }


def test_no_state_is_missing_from_the_list():
    def is_state(x):
        return isinstance(x, type) and (
            hasattr(x, "_fields") or hasattr(x, "_flax_dataclass")
        )

    names = {name for name in vars(jamp) if is_state(getattr(jamp, name))}
    assert names == set(exported_states())


@pytest.mark.parametrize(
    "name", ["LossScaleState", "MasterWeightsState", "ScaledGrads"]
)
@pytest.mark.parametrize("trip", [through_bytes, through_state_dict])
def test_every_exported_state_comes_back(name, trip):
    state = exported_states()[name]
    target = jax.tree.map(jnp.zeros_like, state)
    assert_same_bits(trip(state, target), state)


def test_every_exported_state_comes_back_through_orbax(tmp_path):
    states = exported_states()
    del states["AmpState"]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "states", states)
        checkpointer.wait_until_finished()
        target = jax.tree.map(jnp.zeros_like, states)
        again = checkpointer.restore(tmp_path / "states", target)
    assert_same_bits(again, states)


@pytest.mark.parametrize(
    "name", ["LossScaleState", "MasterWeightsState", "ScaledGrads"]
)
def test_every_exported_state_has_a_state_dict_of_names(name):
    # An unregistered class would be returned unchanged.
    d = serialization.to_state_dict(exported_states()[name])
    assert isinstance(d, dict)
    assert all(isinstance(key, str) and not key.isdigit() for key in d)
