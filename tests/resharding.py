"""Checkpoints between shardings on two CPU devices; run by test_checkpoint_levels.py.

The number of devices is fixed when JAX starts, so this cannot be done inside pytest.
Prints one line of JSON.
"""

import functools
import json
import pathlib
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import serialization
from jax.sharding import (
    AxisType,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)

import jamp
from tests.mixed_leaves import FAST

MESH = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
TX = optax.adam(1e-2)


def by_rows(x):
    return NamedSharding(MESH, P("x") if x.ndim else P())


def by_columns(x):
    return NamedSharding(MESH, P(None, "x") if x.ndim == 2 else P())


def on_one(x):
    return SingleDeviceSharding(jax.devices()[0])


FORMS = ("raw orbax", "orbax", "numpy", "orbax into shapes", "numpy into shapes")
WAYS = {
    "to a mesh": (on_one, by_rows),
    "across the mesh": (by_rows, by_columns),
    "to one device": (by_columns, on_one),
}


def make(level, seed, where):
    """A state with other numbers in each array, placed."""
    rng = np.random.default_rng(seed)
    params = {"w": np.float32(rng.normal(size=(4, 6))), "b": np.zeros(4, np.float32)}
    state = jamp.initialize(params, TX, level, verbosity=0)

    def draw(x):
        if x.dtype != jnp.float32:
            return x + seed
        return jnp.asarray(rng.uniform(size=x.shape), x.dtype)

    inner = jax.tree.map(draw, state.opt_state.inner_state)
    opt_state = state.opt_state._replace(inner_state=inner)
    state = state.replace(opt_state=opt_state, step=jnp.int32(seed))
    return jax.device_put(state, jax.tree.map(where, state))


def values(state):
    inner = state.opt_state.inner_state
    arrays = jamp.master_params(state), inner, state.loss_scales[0][1:], state.step
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(arrays)]


def misplaced(state, target):
    pairs = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(target), strict=True)
    return [
        f"{jax.tree_util.keystr(path)}: {x.sharding}"
        for (path, x), y in pairs
        if not x.sharding.is_equivalent_to(y.sharding, x.ndim)
    ]


def shapes(tree):
    """Without the arrays, but where they would lie."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )


@functools.partial(jax.jit, compiler_options=FAST)
def step(state):
    grads = jax.tree.map(lambda p: jnp.ones(p.shape, jnp.float32), state.params)
    return state.apply_gradients(grads=grads)


def through_orbax(tree, target):
    with tempfile.TemporaryDirectory() as folder, ocp.StandardCheckpointer() as c:
        c.save(pathlib.Path(folder) / "tree", tree)
        c.wait_until_finished()
        return c.restore(pathlib.Path(folder) / "tree", target)


def restored(form, state, target):
    if form == "raw orbax":
        return through_orbax(state, shapes(target))
    checkpoint = jamp.to_checkpoint(state)
    if form == "orbax":
        checkpoint = through_orbax(checkpoint, jamp.to_checkpoint(target))
    elif form == "orbax into shapes":
        # Placed as it was saved, for these shapes do not say how.
        wanted = jax.eval_shape(jamp.to_checkpoint, shapes(target))
        checkpoint = through_orbax(checkpoint, wanted)
    else:
        data = serialization.msgpack_serialize(checkpoint)
        checkpoint = serialization.msgpack_restore(data)
    target = shapes(target) if "shapes" in form else target
    return jamp.from_checkpoint(target, checkpoint)


def main():
    out = {}
    for form in FORMS:
        for way, (before, after) in WAYS.items():
            state = make("O2", 7, before)
            target = make("O2" if "raw" in form else "O5", 1, after)
            new = restored(form, state, target)
            result = {
                "same": values(new) == values(state),
                "misplaced": misplaced(new, target),
            }
            if way == "across the mesh":
                result["step"] = int(step(new).step)
            out[f"{form}, {way}"] = result
    print(json.dumps(out))


if __name__ == "__main__":
    main()
