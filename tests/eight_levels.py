"""Every level and optimizer on 8 CPU devices; run by test_many_devices.py.

The number of devices is fixed when JAX starts, so this cannot be done inside pytest.
Prints one line of JSON. One step serves one device and all meshes: nothing in it is
about devices.
"""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jamp
from jamp import optimizers as jo

F32 = jnp.float32
FAST = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
AXES = ("data", "model")
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
# How each param lies on 4 x 2 devices, whole where it is not named.
FSDP = dict.fromkeys(("in", "bias", "norm", "out"), P("data"))
TENSOR = dict.fromkeys(("bias", "norm", "out"), P("model")) | {"in": P(None, "model")}
LAYOUTS = {"replicated": {}, "fsdp": FSDP, "tensor": TENSOR}
MIXED = {"in": P(None, "model"), "bias": P("data"), "out": P("data", "model")}
# Every device has rows of its own, but those that share a layer share its rows.
ROWS = {"replicated": P(AXES), "fsdp": P(AXES), "tensor": P("data"), "mixed": P(AXES)}
STEPS, BAD, BAD_STEP = 4, (-1, 3), 1
RULE = jamp.DynamicLossScale(init_scale=2.0**8, window=2)
SCALES, SKIPS = [2.0**8, 2.0**7, 2.0**7, 2.0**8], [0, 1, 1, 1]  # after each step
# Levels that also run data parallel by hand: `check_vma` and `predivide`.
BY_HAND = {"O1": (True, 8.0), "O2": (False, None), "O5": (True, 3.0)}
PREDIVIDE = (None, 8.0, 3.0)
# Per device the gradient of two params. The large ones are finite, their sum is not.
SIXTEENTHS = np.float32([[k / 16, (k - 3) * 0.5] for k in range(8)])
ONE_INF = np.where(np.arange(8)[:, None] == 5, np.inf, SIXTEENTHS)
LARGE = np.full((8, 2), 3e38, np.float32)
GRADIENTS = {
    "clean": ("O2", SIXTEENTHS),
    "one overflows": ("O2", ONE_INF),
    "large at O0": ("O0", LARGE),
    "large at O5": ("O5", LARGE),
}
# At O2, each leaf another way; adam, lamb and novograd are in eight_devices.py.
OPTIMIZERS = {
    "sgd": functools.partial(jo.fused_sgd, 1e-2, 0.9),
    "adagrad": functools.partial(jo.fused_adagrad, 1e-2, eps=1e-2),
    "larc": lambda: jo.larc(jo.fused_sgd(1.0, 0.9), trust_coefficient=1e-2),
}


def mlp(params, x):
    """Its norm's scale stays in float32 where the level keeps it."""
    hidden = jax.nn.relu(x @ params["in"] + params["bias"])
    wide = hidden.astype(F32)
    spread = jnp.sqrt(wide.var(-1, keepdims=True) + 1e-3)
    normal = (wide - wide.mean(-1, keepdims=True)) / spread
    scaled = normal * params["norm"].astype(F32)
    return scaled.astype(hidden.dtype) @ params["out"]


class WithStatistics(nn.Module):
    """Dense, BatchNorm, Dense."""

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(16, use_bias=False)(x)  # a bias before a norm has no gradient
        x = nn.BatchNorm(use_running_average=False, momentum=0.5)(x)
        return nn.Dense(4)(nn.relu(x))


def loss_fn(params, state, x, y):
    out = state.apply_fn(params, x)
    return ((out.astype(F32) - y) ** 2).mean()


def statistics_loss_fn(params, state, x, y):
    variables = {"params": params, "batch_stats": state.batch_stats}
    out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
    return ((out.astype(F32) - y) ** 2).mean(), new["batch_stats"]


@functools.partial(jax.jit, compiler_options=FAST)
def step(state, x, y):
    grads = jamp.scaled_grad(loss_fn)(state, state, x, y)
    return state.apply_gradients(grads=grads)


@functools.partial(jax.jit, compiler_options=FAST)
def statistics_step(state, x, y):
    grads, new = jamp.scaled_grad(statistics_loss_fn, has_aux=True)(state, state, x, y)
    return state.apply_gradients(grads=grads, batch_stats=new)


def on_each_device(check_vma, in_specs, out_specs):
    return functools.partial(
        jax.shard_map,
        mesh=mesh_of("Auto"),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
    )


def mapped_step(check_vma, predivide):
    """Data parallel by hand: each device has an eighth of the batch, and all params."""

    @functools.partial(jax.jit, compiler_options=FAST)
    @on_each_device(check_vma, (P(), P(AXES), P(AXES)), P())
    def step(state, x, y):
        differentiate = jamp.scaled_grad(loss_fn, axis_name=AXES, predivide=predivide)
        return state.apply_gradients(grads=differentiate(state, state, x, y))

    return step


def mlp_params():
    rng = np.random.default_rng(0)
    shapes = {"in": (8, 16), "bias": (16,), "norm": (16,), "out": (16, 4)}
    return {k: np.float32(rng.normal(size=s)) / 2 for k, s in shapes.items()}


def batches():
    """Four; in the second, one number on the last device overflows."""
    rng = np.random.default_rng(1)
    xs = np.float32(rng.normal(size=(STEPS, 16, 8)))
    xs[BAD_STEP][BAD] = np.inf
    return xs, np.float32(rng.normal(size=(STEPS, 16, 4)))


def start(params, tx, level, **fields):
    if level in ("O2", "O5") and "norm" in params:
        fields["keep_fp32"] = "norm"
    fields = {"apply_fn": mlp, "loss_scale": RULE, "verbosity": 0} | fields
    return jamp.initialize(params, tx, level, **fields)


def mesh_of(kind):
    return jax.make_mesh((4, 2), AXES, axis_types=(AxisType[kind],) * 2)


def run(step, state, place=lambda x: x):
    """Four steps: what is left, and the scale and the skips after each."""
    scales, skips, programs = [], [], step._cache_size()
    for x, y in zip(*batches(), strict=True):
        state = step(state, place(x), place(y))
        scales.append(float(state.loss_scale))
        skips.append(int(state.skipped_steps))
    counts = {"scales": scales, "skips": skips}
    return state, counts | {"compiled": step._cache_size() - programs}


def moved(state, begun):
    """What the steps changed, and what they summed up, in float64."""
    params = jax.tree.map(
        lambda a, b: np.float64(a) - np.float64(b), jamp.master_params(state), begun
    )
    moments = jax.tree.map(np.float64, state.opt_state)
    return params, moments, np.float64(state.step)


def difference(a, b):
    """The largest of a leaf, relative to its largest number."""
    pairs = zip(*map(jax.tree.leaves, (a, b)), strict=True)
    return max(np.abs(x - y).max() / max(np.abs(y).max(), 1e-30) for x, y in pairs)


def misplaced(state, mesh, specs):
    """The leaves that do not lie as their params; numbers belong on every device."""
    wrong = []
    for path, x in jax.tree.leaves_with_path(state):
        names = [getattr(k, "key", None) for k in path]
        spec = next((specs[n] for n in names if n in specs), P())
        wanted = NamedSharding(mesh, spec if x.ndim else P())
        if not x.sharding.is_equivalent_to(wanted, x.ndim):
            wrong.append(f"{jax.tree_util.keystr(path)}: {x.sharding}")
    return wrong


def compare(tx, level, layouts=LAYOUTS, kind="Auto", by_hand=()):
    """Four steps on a mesh, for each layout, against the same on one device."""
    begun, mesh = mlp_params(), mesh_of(kind)
    whole, alone = run(step, start(begun, tx, level))

    def on_mesh(step, layout):
        specs = LAYOUTS.get(layout, MIXED)
        rows = NamedSharding(mesh, ROWS[layout])
        shardings = {k: NamedSharding(mesh, specs.get(k, P())) for k in begun}
        state = start(jax.device_put(begun, shardings), tx, level)
        state, counts = run(step, state, lambda x: jax.device_put(x, rows))
        return counts | {
            "difference": difference(moved(state, begun), moved(whole, begun)),
            "misplaced": misplaced(state, mesh, specs),
        }

    found = {layout: on_mesh(step, layout) for layout in layouts}
    if by_hand:
        found["shard_map"] = on_mesh(mapped_step(*by_hand), "replicated")
    return {"one device": alone} | found


def compare_statistics(level="O2"):
    """A Linen model whose Dense kernels are split; no axis_name is needed under jit."""
    model, tx = WithStatistics(), optax.sgd(0.1, 0.9)
    begun = model.init(jax.random.key(0), np.zeros((2, 8), np.float32))
    begun = jax.tree.map(np.asarray, begun)
    make = functools.partial(start, tx=tx, level=level, apply_fn=model.apply)
    whole, alone = run(statistics_step, make(**begun))
    mesh = mesh_of("Auto")
    specs = {"kernel": P("data")}

    def placed(path, x):
        return jax.device_put(x, NamedSharding(mesh, specs.get(path[-1].key, P())))

    rows = NamedSharding(mesh, P(AXES))
    state = make(**jax.tree.map_with_path(placed, begun))
    state, counts = run(statistics_step, state, lambda x: jax.device_put(x, rows))
    fields = [jax.tree.map(np.float64, s.batch_stats) for s in (state, whole)]
    pair = [moved(s, begun["params"]) for s in (state, whole)]
    return {
        "one device": alone,
        "fsdp": counts
        | {
            "difference": max(difference(*pair), difference(*fields)),
            "misplaced": misplaced(state, mesh, specs),
        },
        "dtypes": sorted({str(x.dtype) for x in jax.tree.leaves(state.batch_stats)}),
    }


def collectives(jaxpr):
    """What crosses devices in a program, and in those within it."""
    found = []
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        if eqn.primitive.name.startswith(("psum", "pmin", "pmax", "all_", "reduce_sc")):
            found += [v.aval for v in eqn.invars]
        inside = jax.tree.leaves(list(eqn.params.values()))
        found += [x for p in inside if hasattr(p, "eqns") for x in collectives(p)]
    return found


def gradients(level, check_vma, predivide, rows):
    """Of eight devices, each with a row: what they have, and what a step does."""
    params, rule = {"w": np.zeros(2, np.float32)}, jamp.DynamicLossScale(init_scale=1.0)
    tx = optax.sgd(1.0)
    state = jamp.initialize(params, tx, level, loss_scale=rule, verbosity=0)

    @on_each_device(check_vma, (P(), P(AXES)), (P(AXES), P(AXES), P()))
    def f(state, x):
        def linear(p, x):  # its gradient is `x`
            return (p["w"].astype(F32) * x[0]).sum()

        differentiate = jamp.scaled_grad(linear, axis_name=AXES, predivide=predivide)
        grads = differentiate(state, x)
        skipped = state.apply_gradients(grads=grads).skipped_steps
        return grads.tree["w"][None], grads.finite[None], skipped

    mean, finite, skipped = f(state, rows)
    return {"mean": mean, "finite": finite, "skipped": skipped}


def all_gradients(level, rows):
    """Of both kinds of `shard_map` and every `predivide`: JAX traces them as one."""

    @functools.partial(jax.jit, compiler_options=FAST)
    def f(rows):
        return {
            f"{check_vma}/{predivide}": gradients(level, check_vma, predivide, rows)
            for check_vma in (True, False)
            for predivide in PREDIVIDE
        }

    return jax.tree.map(lambda x: np.float64(x).tolist(), f(rows))


def main():
    adam = optax.adam(1e-2, eps=1e-2)
    out: dict[str, Any] = {
        level: compare(adam, level, by_hand=BY_HAND.get(level, ())) for level in LEVELS
    }
    out["Explicit"] = compare(adam, "O1", ["replicated"], "Explicit")
    for name, make in OPTIMIZERS.items():
        out[name] = compare(make(), "O2", ["mixed"])
    out["BatchNorm"] = compare_statistics()
    out["gradients"] = {name: all_gradients(*case) for name, case in GRADIENTS.items()}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
