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


def sharding(kind, devices, spec):
    some = jax.devices()[:devices]
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=some)
    return NamedSharding(mesh, spec)


# Where all params lie at first.
PLACES = {
    "Explicit, whole": (AxisType.Explicit, 4, P()),
    "Explicit, rows": (AxisType.Explicit, 4, P("data")),
    "Explicit, columns": (AxisType.Explicit, 4, P(None, "data")),
    "Auto, rows": (AxisType.Auto, 4, P("data")),
    "Auto, one device": (AxisType.Auto, 1, P()),
}


def compiled(place, level):
    """How often a step is compiled that is called three times."""
    params = {name: np.ones((4, 4), np.float32) for name in ("half", "kept")}
    params = jax.device_put(params, sharding(*PLACES[place]))
    keep = None if level == "O0" else "kept"
    tx, key = optax.adam(0.1), jax.random.key(0)
    fields = {"key": key, "stats": {"mean": np.zeros(3, np.float32)}}
    state = jamp.initialize(params, tx, level, keep_fp32=keep, verbosity=0, **fields)

    @jax.jit
    def step(state):
        def loss_fn(params):
            return sum((p.astype(jnp.float32) ** 2).sum() for p in params.values())

        return state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state))

    for _ in range(3):
        state = step(state)
    return step._cache_size()


def refused():
    """What is said where arrays lie on different devices."""
    four, two = (sharding(AxisType.Auto, n, P("data")) for n in (4, 2))
    rows = np.ones((4, 4), np.float32)
    here, there = jax.device_put(rows, four), jax.device_put(rows, two)
    one = jax.device_put(rows, jax.devices()[3])
    tx = optax.sgd(0.1)
    state = jamp.initialize({"w": here}, tx, "O2", stats=here, verbosity=0)
    grads = {"w": there}

    def loss_fn(params, x):
        return (params["w"].astype(jnp.float32) * x).sum()

    calls = {
        "params": lambda: jamp.initialize({"a": here, "b": there}, tx, verbosity=0),
        "one device": lambda: jamp.initialize({"a": here, "b": one}, tx, verbosity=0),
        "field": lambda: jamp.initialize(
            {"a": here}, tx, batch_stats={"mean": there}, verbosity=0
        ),
        "batch": lambda: jamp.scaled_grad(loss_fn)(state, there),
        "gradients": lambda: state.apply_gradients(grads=grads),
        "new field": lambda: state.apply_gradients(grads={"w": here}, stats=there),
    }
    messages = {}
    for name, call in calls.items():
        try:
            call()
        except ValueError as error:
            messages[name] = str(error)
    return messages


if __name__ == "__main__":
    out = {name: run(*case) for name, case in CASES.items()}
    out["compiled"] = {
        p: [compiled(p, level) for level in ("O0", "O2")] for p in PLACES
    }
    out["refused"] = refused()
    print(json.dumps(out))
