"""Test the placement of a restored state."""

import functools
import pathlib
import tempfile

import jax
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
