"""Test the placement of a restored state."""

import functools
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jamp
from tests.devices.eight_devices import mesh_of, misplaced

pytestmark = [pytest.mark.slow, pytest.mark.standard_promotion]  # for optax.adam

ADAM = optax.adam(0.1)


def on_mesh(kind, devices, spec):
    return NamedSharding(mesh_of(kind, (devices,)), spec)


def on_one(x):
    return jax.sharding.SingleDeviceSharding(jax.devices()[0])


def by_rows(x):
    return on_mesh("Auto", 2, P("data") if x.ndim else P())


def by_columns(x):
    return on_mesh("Auto", 2, P(None, "data") if x.ndim == 2 else P())


WAYS = {
    "to a mesh": (on_one, by_rows),
    "across the mesh": (by_rows, by_columns),
    "to one device": (by_columns, on_one),
}
step = jax.jit(lambda state, grads: state.apply_gradients(grads=grads))


@functools.cache
def stepped(level, steps, where):
    """Returns a placed state with different numbers in each array."""
    rng = np.random.default_rng(steps)
    params, grads = (
        {"w": np.float32(rng.normal(size=(4, 6))), "b": np.float32(rng.normal(size=4))}
        for _ in range(2)
    )
    state = jamp.initialize(params, ADAM, level, loss_scale="dynamic", verbosity=0)
    for _ in range(steps):
        state = step(state, grads)
    return jax.device_put(state, jax.tree.map(where, state)), grads


def through_orbax(tree, target):
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as c:
        c.save(pathlib.Path(folder) / "tree", tree)
        c.wait_until_finished()
        return c.restore(pathlib.Path(folder) / "tree", target)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("into", ["a state", "shapes"])
@pytest.mark.eight_devices
def test_a_checkpoint_goes_to_another_sharding(into, way):
    before, after = WAYS[way]
    state, grads = stepped("O2", 7, before)
    target, _ = stepped("O5", 1, after)
    wanted = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), target
    )
    checkpoint, like = map(jamp.to_checkpoint, (state, target))
    if into == "shapes":  # Orbax restores the saved placement, because shapes have none
        target, like = wanted, jax.eval_shape(jamp.to_checkpoint, wanted)
    new = jamp.from_checkpoint(target, through_orbax(checkpoint, like))

    def bits(state):
        inner, scale = state.opt_state.inner_state, state.loss_scales
        arrays = jamp.master_params(state), inner, scale, state.step
        return [np.asarray(x).tobytes() for x in jax.tree.leaves(arrays)]

    assert bits(new) == bits(state)
    assert misplaced(new, jax.tree.map(lambda x: x.sharding, wanted)) == []
    assert step(new, grads).step == 8


def with_stats(tx):
    """Adds statistics that are not kept per param, under the path of one."""

    def init(params):
        return {"stats": {"w": jnp.zeros_like(params["w"])}, "inner": tx.init(params)}

    def update(updates, state, params=None):
        updates, inner = tx.update(updates, state["inner"], params)
        return updates, {**state, "inner": inner}

    return optax.GradientTransformation(init, update)


LABELS = {"w": "adam", "inner": {"w": "adam", "v": "none"}}
KEPT = {
    "adam": (ADAM, 4),
    "fused": (jamp.optimizers.fused_adam(0.1), 4),
    "masked": (optax.masked(ADAM, {"w": True, "inner": False}), 2),
    "labels": (
        optax.multi_transform({"adam": ADAM, "none": optax.set_to_zero()}, LABELS),
        4,
    ),
    "chain": (optax.chain(optax.clip_by_global_norm(1.0), optax.trace(0.9)), 2),
    "stats": (with_stats(ADAM), 4),
}


@pytest.mark.parametrize("name", KEPT)
@pytest.mark.eight_devices
def test_moments_under_jit_are_sharded_like_their_params(name):
    """Only subtrees with the structure of the params belong to them."""
    tx, count = KEPT[name]
    rows = jax.device_put(np.ones((8, 4), np.float32), on_mesh("Auto", 8, P("data")))
    params = {"w": rows, "inner": {"w": rows, "v": np.ones(3, np.float32)}}
    init = jax.jit(lambda p: jamp.initialize(p, tx, "O1", verbosity=0))
    state = init(params)
    kept = [x for x in jax.tree.leaves(state.opt_state) if x.shape == rows.shape]
    sharded = [x.sharding.is_equivalent_to(rows.sharding, 2) for x in kept]
    assert sum(sharded) == count
    assert len(kept) - count == (name == "stats")
