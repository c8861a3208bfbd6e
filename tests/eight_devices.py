"""Fused optimizers on 8 CPU devices; run by test_fused_sharding.py in a process.

The number of devices is fixed when JAX starts, so this cannot be done inside pytest.
Prints one line of JSON. No kernel is emulated here: the emulator keeps one clock for
all devices, and on JAX 0.11 ends the process. test_kernels_sharding.py compiles them.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jamp
from jamp import optimizers as jo
from pallas_kernels import BackendError
from tests.mixed_leaves import FAST

F32 = jnp.float32
AXES = ("data", "model")
# Of all but one, what each of 4 × 2 devices holds is enough for a kernel, 128 elements.
LEAVES = {
    "both": ((32, 40), P("data", "model")),
    "combined": ((128, 9), P(("data", "model"))),
    "few": ((8,), P("model")),
    "fsdp": ((64, 12), P("data")),
    "norm": ((520,), P("data")),  # stays float32
    "odd": ((37, 5), P()),  # does not divide: replicated
    "tensor": ((12, 64), P(None, "model")),
}
SOME = ("both", "few", "norm", "odd")
BAD = "both"

OPTIMIZERS = {
    "adam": functools.partial(jo.fused_adam, 1e-2, weight_decay=0.1, max_grad_norm=1.0),
    "sgd": functools.partial(jo.fused_sgd, 1e-2, 0.9),
    "lamb": functools.partial(jo.fused_lamb, 1e-2),
    "novograd": functools.partial(jo.fused_novograd, 1e-2),
    "adagrad": functools.partial(jo.fused_adagrad, 1e-2, weight_decay=0.1),
}


def mesh_of(kind, shape=(4, 2)):
    devices = jax.devices()[: shape[0] * shape[1]]
    return jax.make_mesh(shape, AXES, axis_types=(AxisType[kind],) * 2, devices=devices)


def tree(seed, names):
    rng = np.random.default_rng(seed)
    drawn = {k: np.float32(rng.normal(size=s)) for k, (s, _) in LEAVES.items()}
    return {k: drawn[k] for k in names}


def gradients(names):
    """Of two steps; in the second, one element on the last device overflows."""
    xs = [jax.tree.map(lambda x: x / 16, tree(seed, names)) for seed in (1, 2)]
    xs[1][BAD][-1, -1] = np.inf
    return xs


def loss_fn(p, x):
    """Its gradient is `x`."""
    products = jax.tree.map(lambda p, x: (p.astype(F32) * x).sum(), p, x)
    return sum(jax.tree.leaves(products))


@functools.partial(jax.jit, compiler_options=FAST)
def step(state, x):
    return state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state, x))


@functools.partial(jax.jit, compiler_options=FAST)
def plain_step(state, grads):
    return state.apply_gradients(grads=grads)


def start(tx, params, level="O2", **kwargs):
    return jamp.initialize(
        params,
        tx,
        level,
        loss_scale=jamp.DynamicLossScale(init_scale=2.0**8),
        keep_fp32="norm" if level != "O0" and "norm" in params else None,
        verbosity=0,
        **kwargs,
    )


def placed(tree, mesh):
    shardings = {k: NamedSharding(mesh, LEAVES[k][1]) for k in tree}
    return jax.device_put(tree, shardings)


def misplaced(tree, mesh):
    """The leaves that do not lie as their params; numbers belong on every device."""
    wrong = []
    for path, x in jax.tree.leaves_with_path(tree):
        names = [getattr(k, "key", None) for k in path]
        spec = next((LEAVES[n][1] for n in names if n in LEAVES), P())
        wanted = NamedSharding(mesh, spec if x.ndim else P())
        if not x.sharding.is_equivalent_to(wanted, x.ndim):
            wrong.append(f"{jax.tree_util.keystr(path)}: {x.sharding}")
    return wrong


def arrays(state):
    return jamp.master_params(state), state.opt_state


@functools.cache
def on_one_device(name, level, store_remainder, names):
    tx = OPTIMIZERS[name](backend="xla")
    init = functools.partial(start, tx, level=level, store_remainder=store_remainder)
    state = jax.jit(init, compiler_options=FAST)(tree(0, names))
    for x in gradients(names):
        state = step(state, x)
    return jax.tree.map(np.asarray, arrays(state))


def largest_difference(a, b) -> float:
    """Of floats: a remainder may differ in all bits where its master hardly does."""
    pairs = list(zip(*map(jax.tree.leaves, (a, b)), strict=True))
    floats = [(x, y) for x, y in pairs if jnp.issubdtype(x.dtype, jnp.floating)]
    return max(float(np.abs(np.float64(x) - np.float64(y)).max()) for x, y in floats)


def settled(state, mesh):
    """With its numbers where a step leaves them, so that two steps are one program."""
    whole = NamedSharding(mesh, P())
    return jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, whole), state)


def compare(kind, backend, name, level="O2", split=False, names=None, shape=(4, 2)):
    """Two steps on a mesh against the same on one device."""
    in_full = names is None
    names = tuple(LEAVES if in_full else names)
    mesh = mesh_of(kind, shape)
    wanted = on_one_device(name, level, split, names)
    tx = OPTIMIZERS[name](backend=backend)
    state = start(tx, placed(tree(0, names), mesh), level, store_remainder=split)
    if not in_full:
        state = settled(state, mesh)
    skips = []
    for x in gradients(names):
        state = step(state, placed(x, mesh))
        skips.append(int(state.skipped_steps))
    return {
        "difference": largest_difference(arrays(state), wanted),
        "skips": skips,
    }


SMALL = {"names": SOME, "shape": (2, 2)}
# One leaf that is split, and one that is not: splitting is many programs per leaf.
ADAGRAD = {"names": ("both", "norm"), "shape": (2, 2), "level": "O5", "split": True}
SGD = SMALL | {"level": "O0"}
# The emulator takes its time: one run is on eight devices, the others on four.
RUNS = [
    ("Explicit", "xla", "adam", {}),
    ("Auto", "xla", "adam", {}),
    ("Explicit", "xla", "lamb", SMALL),
    ("Auto", "xla", "novograd", SMALL),
    ("Auto", "xla", "sgd", SGD),
    ("Explicit", "xla", "adagrad", ADAGRAD),
]


def name_of(run) -> str:
    kind, backend, name, options = run
    return "/".join((kind, backend, name, options.get("level", "O2")))


def gradients_elsewhere(names=("both", "tensor")):
    """Plain gradients that every device has, of params that are spread."""
    mesh, x = mesh_of("Explicit", (2, 2)), gradients(names)[0]
    make = OPTIMIZERS["sgd"]
    whole = start(make(backend="xla"), tree(0, names), "O0")
    state = start(make(backend="xla"), placed(tree(0, names), mesh), "O0")
    after = plain_step(state, jax.device_put(x, NamedSharding(mesh, P())))
    return {
        "difference": largest_difference(arrays(after), arrays(plain_step(whole, x))),
        "misplaced": misplaced(after.params, mesh),
    }


def made_under_jit(backend, names=("both",)):
    """A state on a mesh of Auto axes that knows nothing of it."""
    mesh, x = mesh_of("Auto"), gradients(names)[0]
    tx = OPTIMIZERS["sgd"](backend=backend)
    init = jax.jit(lambda params: start(tx, params, "O0"))
    state = init(placed(tree(0, names), mesh))
    whole = step(start(OPTIMIZERS["sgd"](), tree(0, names), "O0"), x)

    def difference():
        return largest_difference(arrays(step(state, placed(x, mesh))), arrays(whole))

    return outcome(difference)


def under_shard_map(backend, check_vma):
    """Data parallel by hand: each device has an eighth of the batch, and all params."""
    mesh = jax.make_mesh((8,), ("batch",), axis_types=(AxisType.Auto,))
    params = {"v": np.ones(128, np.float32), "w": np.ones(2, np.float32)}
    state = start(OPTIMIZERS["sgd"](backend=backend), params)
    batch = np.arange(8, dtype=np.float32)  # no gradient is rounded

    def mean(p, x):
        leaves = (leaf.astype(F32) for leaf in jax.tree.leaves(p))
        return sum((leaf * x.mean()).mean() for leaf in leaves)

    def one_step(state, x, axis_name=None):
        grads = jamp.scaled_grad(mean, axis_name=axis_name)(state, x)
        return state.apply_gradients(grads=grads)

    mapped = jax.shard_map(
        functools.partial(one_step, axis_name="batch"),
        mesh=mesh,
        in_specs=(P(), P("batch")),
        out_specs=P(),
        check_vma=check_vma,
    )

    def difference():
        after, whole = jax.jit(mapped)(state, batch), jax.jit(one_step)(state, batch)
        return largest_difference(arrays(after), arrays(whole))

    return outcome(difference)


def outcome(run):
    try:
        return run()
    except BackendError as error:
        return str(error)


def main():
    out: dict[str, Any] = {}
    for run in RUNS:
        kind, backend, name, options = run
        out[name_of(run)] = compare(kind, backend, name, **options)
    out["gradients elsewhere"] = gradients_elsewhere()
    for backend in ("auto", "interpret"):
        out[f"made under jit/{backend}"] = made_under_jit(backend)
    for check_vma in (True, False):
        out[f"shard_map/auto/{check_vma}"] = under_shard_map("auto", check_vma)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
