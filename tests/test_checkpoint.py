"""Checkpoints: every state that we define, through Flax and Orbax, bit for bit.

test_resume.py saves a run at each level, and goes on in a new process.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

import jamp
from tests.bits import assert_same_bits

pytestmark = pytest.mark.standard_promotion  # for optax.adam

TX = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))
HALF = {"w": jnp.asarray([1.5, 1 + 2.0**-8], jnp.float16), "n": jnp.full(2, 1.1)}


class Declared(jamp.AmpState):
    stats: Any


def trained(level="O2", **kwargs):
    """After a step and a skip, which is pending."""
    params = {"dense": {"kernel": jnp.asarray([[0.1, 1 + 2.0**-8, -0.3]])}}
    stats, bn = {"mean": jnp.ones(2)}, {"bn": {"scale": jnp.full(2, 1.1)}}
    params |= bn
    state = jamp.initialize(params, TX, level, stats=stats, verbosity=0, **kwargs)
    for x in (0.5, np.inf):
        grads = jax.tree.map(lambda p, x=x: jnp.full(p.shape, x), params)
        state = state.apply_gradients(grads=grads, stats={"mean": stats["mean"] + x})
    return state


def groups(pack):
    trees = pack([{"w": jnp.full(2, 1.1 * i)} for i in (1, 2)])
    state = jamp.initialize(trees, pack([TX, TX]), "O2", num_losses=2, verbosity=0)
    return state.apply_gradients(grads=jax.tree.map(jnp.ones_like, trees))


def scaled_grads():
    state = jamp.initialize({"w": jnp.ones(2)}, TX, "O2", verbosity=0)
    return jamp.scaled_grad(lambda p: jnp.float32(p["w"]).sum())(state)


STATES = {
    "O2": trained,
    "a declared class": lambda: trained(state_class=Declared),
    "remainders": lambda: trained("O5", store_remainder=True),
    "groups in a tuple": lambda: groups(tuple),
    "groups in a dict": lambda: groups(lambda x: dict(zip("gd", x, strict=True))),
    "LossScaleState": lambda: jamp.DynamicLossScale(init_scale=8.0).init(),
    "MasterWeightsState": lambda: jamp.master_weights(TX).init(HALF),
    "ScaledGrads": scaled_grads,
}
EXPORTED = ("LossScaleState", "MasterWeightsState", "ScaledGrads")


@functools.cache
def made(name):
    return STATES[name]()


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_through_flax(name):
    state = made(name)
    target = jax.tree.map(jnp.zeros_like, state)
    again = serialization.from_bytes(target, serialization.to_bytes(state))
    assert type(again) is type(state)
    assert_same_bits(again, state)


def test_all_states_come_back_through_orbax_and_typed_keys_too(tmp_path):
    def with_keys(seed):
        keys = jax.random.key(seed), jax.random.key(seed, impl="rbg")
        return jamp.initialize(HALF["n"], TX, "O2", keys=keys, verbosity=0)

    states = {name: made(name) for name in STATES}
    target = jax.tree.map(jnp.zeros_like, states) | {"keys": with_keys(6)}
    states |= {"keys": with_keys(5)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "states", states)
        checkpointer.wait_until_finished()
        for like in (target, jax.eval_shape(lambda: target)):
            assert_same_bits(checkpointer.restore(tmp_path / "states", like), states)


def test_the_state_dict_holds_masters_scale_and_counters_by_name():
    # apex_semantics 6.8: apex's checkpoints have no masters.
    state = made("O2")
    d = serialization.to_state_dict(state)
    names = "step params opt_state loss_scales skipped_steps last_step_skipped stats"
    assert set(d) == set(names.split())
    scale = {"scale": 2.0**15, "unskipped": 0, "hysteresis": 0, "consecutive_skips": 1}
    assert d["loss_scales"]["0"] == scale
    assert (d["step"], d["skipped_steps"], d["last_step_skipped"]) == (1, 1, True)
    kernel = d["opt_state"]["masters"]["dense"]["kernel"]
    assert kernel.dtype == jnp.float32
    assert not np.array_equal(kernel, np.float32(state.params["dense"]["kernel"]))
    # So has every pytree class of ours: Flax passes unregistered ones through.
    registered = {
        name
        for name, x in vars(jamp).items()
        if hasattr(x, "_fields")
        or isinstance(x, type)
        and x in serialization._STATE_DICT_REGISTRY
    }
    assert registered == {"AmpState", *EXPORTED}
    for name in EXPORTED:
        d = serialization.to_state_dict(made(name))
        assert type(made(name)).__name__ == name
        assert all(isinstance(key, str) and not key.isdigit() for key in d)
