"""Meshes of 4 x 2 CPUs or absent H200s, and a model with its params on them."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jamp
from tests.support.programs import walk

F32 = jnp.float32
AXES = ("data", "model")
# The sharding of each param of `mlp`. Others are replicated.
FSDP = dict.fromkeys(("in", "bias", "norm", "out"), P("data"))
TENSOR = dict.fromkeys(("bias", "norm", "out"), P("model")) | {"in": P(None, "model")}
LAYOUTS = {"replicated": {}, "fsdp": FSDP, "tensor": TENSOR}
# Devices that share a layer share its rows.
ROWS = {"replicated": P(AXES), "fsdp": P(AXES), "tensor": P("data")}
# Each device holds enough elements of a leaf for a kernel, 128, except for `few`.
LEAVES = {
    "both": ((32, 40), P("data", "model")),
    "combined": ((128, 9), P(("data", "model"))),
    "few": ((8,), P("model")),
    "fsdp": ((64, 12), P("data")),
    "norm": ((520,), P("data")),  # stays float32
    "odd": ((37, 5), P()),  # does not divide: replicated
    "tensor": ((12, 64), P(None, "model")),
}
SPECS = {name: spec for name, (_, spec) in LEAVES.items()}
RULE = jamp.DynamicLossScale(init_scale=2.0**8, window=2)


def mesh_of(kind="Auto", shape=(4, 2), devices=None):
    devices = jax.devices() if devices is None else devices
    devices = np.reshape(devices[: math.prod(shape)], shape)
    return Mesh(devices, AXES[: len(shape)], axis_types=(AxisType[kind],) * len(shape))


def shardings(tree, mesh, specs):
    """Returns the sharding of each leaf: its param's, or replicated for a scalar."""

    def leaf(path, x):
        names = [getattr(key, "key", None) for key in path]
        spec = next((specs[name] for name in names if name in specs), P())
        return NamedSharding(mesh, spec if x.ndim else P())

    return jax.tree.map_with_path(leaf, tree)


def placed(tree, mesh, specs):
    return jax.device_put(tree, shardings(tree, mesh, specs))


def shapes(tree, mesh, specs):
    return jax.tree.map(
        lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where),
        tree,
        shardings(tree, mesh, specs),
    )


def misplaced(tree, wanted):
    """Describes the leaves whose sharding is not the wanted one."""
    pairs = zip(jax.tree.leaves_with_path(tree), jax.tree.leaves(wanted), strict=True)
    return [
        f"{jax.tree_util.keystr(path)}: {x.sharding}, not {sharding}"
        for (path, x), sharding in pairs
        if not x.sharding.is_equivalent_to(sharding, x.ndim)
    ]


def mlp(params, x):
    """Applies a model whose norm may keep a float32 scale."""
    hidden = jax.nn.relu(x @ params["in"] + params["bias"])
    wide = hidden.astype(F32)
    spread = jnp.sqrt(wide.var(-1, keepdims=True) + 1e-3)
    normal = (wide - wide.mean(-1, keepdims=True)) / spread
    scaled = normal * params["norm"].astype(F32)
    return scaled.astype(hidden.dtype) @ params["out"]


def mlp_params():
    rng = np.random.default_rng(0)
    sizes = {"in": (8, 16), "bias": (16,), "norm": (16,), "out": (16, 4)}
    return {k: np.float32(rng.normal(size=s)) / 2 for k, s in sizes.items()}


def loss_fn(params, state, x, y):
    return ((state.apply_fn(params, x).astype(F32) - y) ** 2).mean()


def start(params, tx, level, **fields):
    """Initializes a state. With master weights, the norm stays float32."""
    if level in ("O2", "O5") and "norm" in params:
        fields["keep_fp32"] = "norm"
    fields = {"apply_fn": mlp, "loss_scale": RULE, "verbosity": 0} | fields
    return jamp.initialize(params, tx, level, **fields)


def collectives(jaxpr):
    """Returns the operands of all collectives in a program."""
    names = ("psum", "pmin", "pmax", "all_", "reduce_sc")
    found = [e for e in walk(jaxpr.jaxpr) if e.primitive.name.startswith(names)]
    return [v.aval for eqn in found for v in eqn.invars]
