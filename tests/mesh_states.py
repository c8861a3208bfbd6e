"""States made from params on a mesh of four CPU devices; run by test_placement.py.

Prints one line of JSON: per case how often a step was compiled, and where leaves lie.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jamp

SPECS = {"w": P("data", "model"), "v": P(None, "model"), "b": P("model")}
CASES = {
    "O0 adam": ("O0", optax.adam(0.1), {}),
    "O1 adam": ("O1", optax.chain(optax.clip(1.0), optax.adam(0.1)), {}),
    "O2 adam": ("O2", optax.adam(0.1), {}),
    "O2 lamb": ("O2", jamp.optimizers.fused_lamb(0.1), {}),
    "O3 adam": ("O3", optax.adam(0.1), {}),
    "O5 remainder": ("O5", jamp.optimizers.fused_adam(0.1), {"store_remainder": True}),
    "O2 adagrad": ("O2", optax.adagrad(0.1), {}),  # whose sums do not begin at zero
}


@functools.cache
def on_mesh(spec):
    axes = (AxisType.Auto, AxisType.Auto)
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=axes)
    return NamedSharding(mesh, spec)


def params():
    shapes = {"w": (4, 8), "v": (8, 6), "b": (6,)}
    return {
        name: jax.device_put(
            np.linspace(-1, 1, np.prod(shape), dtype=np.float32).reshape(shape),
            on_mesh(SPECS[name]),
        )
        for name, shape in shapes.items()
    }


def loss_fn(params, x):
    hidden = jnp.tanh(jnp.dot(x.astype(params["w"].dtype), params["w"]))
    out = jnp.dot(hidden, params["v"]) + params["b"].astype(params["v"].dtype)
    return out.astype(jnp.float32).mean()


def lies(state):
    """Per leaf the spec that it has, and that of the param whose path it ends in."""
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        name = jax.tree_util.keystr(path[-1:], simple=True) if path else ""
        where = on_mesh(SPECS.get(name, P()) if leaf.ndim else P())
        right = leaf.sharding.is_equivalent_to(where, leaf.ndim)
        rows.append([jax.tree_util.keystr(path), right])
    return rows


def run(level, tx, options):
    def make(params):
        return jamp.initialize(params, tx, level, verbosity=0, **options)

    @jax.jit
    def step(state, x):
        grads = jamp.scaled_grad(loss_fn)(state, x)
        return state.apply_gradients(grads=grads)

    x = jax.device_put(np.ones((8, 4), np.float32), on_mesh(P("data")))
    eager, jitted = make(params()), jax.jit(make)(params())
    pairs = zip(jax.tree.leaves(eager), jax.tree.leaves(jitted), strict=True)
    same = all(bool((a == b).all()) and a.dtype == b.dtype for a, b in pairs)
    begun = lies(eager), lies(jitted)
    for _ in range(3):
        eager = step(eager, x)
    return {
        "compiled": step._cache_size(),
        "misplaced": [path for rows in begun for path, right in rows if not right],
        "after": [path for path, right in lies(eager) if not right],
        "same": same,
        "leaves": len(begun[1]),
    }


if __name__ == "__main__":
    print(json.dumps({name: run(*case) for name, case in CASES.items()}))
