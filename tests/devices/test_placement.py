"""Test the placement of a restored state, and arrays on different devices."""

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
from tests.support.states import SGD, make

pytestmark = pytest.mark.standard_promotion  # for optax.adam

ADAM = optax.adam(0.1)


def on_mesh(kind, devices, spec):
    return NamedSharding(mesh_of(kind, (devices,)), spec)


FOUR = "devices [0, 1, 2, 3]"
TWO = "devices [0, 1]"
ONE = "devices [3]"


@pytest.mark.eight_devices
def test_arrays_on_different_devices_are_named():
    rows = np.ones((4, 4), np.float32)
    here, there = (jax.device_put(rows, on_mesh("Auto", n, P("data"))) for n in (4, 2))
    one = jax.device_put(rows, jax.devices()[3])

    def loss_fn(params, x):
        return (params["w"].astype(jnp.float32) * x).sum()

    begin = functools.partial(make, "O1", tx=SGD)
    state = begin({"w": here}, stats=here)
    grad, step, grads = jamp.scaled_grad(loss_fn), state.apply_gradients, {"w": here}
    for call, first, other, where in (
        (lambda: begin({"a": here, "b": there}), "params['a']", "params['b']", TWO),
        (lambda: begin({"a": here}, stats=[one]), "params['a']", "stats[0]", ONE),
        (lambda: grad(state, there), "state.step", "args[0]", TWO),
        (lambda: step(grads={"w": there}), "state.step", "grads['w']", TWO),
        (lambda: step(grads=grads, stats=there), "state.step", "stats", TWO),
    ):
        with pytest.raises(ValueError) as error:
            call()
        lie = f"{first} on {FOUR}, and {other} on {where}. Put "
        assert str(error.value).startswith(f"Arrays are on different devices: {lie}")


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
