"""BatchNorm over 8 CPU devices; run by test_sync_batchnorm.py in a process.

The number of devices is fixed when JAX starts, so this cannot be done inside pytest.
Prints one line of JSON. Inputs and weights have few bits: half holds them exactly.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn, nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jamp
import jamp.nnx
from tests.eight_levels import FAST

AXIS = "batch"
MOMENTUM, EPS, RATE = 0.75, 1e-3, 0.125
# Name, framework, level, and `check_vma`; None is plain jit of a batch that is sharded.
CASES = [
    ("linen", "O1", True),
    ("linen", "O2", True),
    ("linen", "O2", False),
    ("linen", "O5", True),
    ("linen", "O1", None),
    ("linen", "O2", None),
    ("nnx", "O1", True),
    ("nnx", "O2", True),
    ("nnx", "O2", None),
]


def name_of(case) -> str:
    return "/".join(map(str, case))


def numbers():
    """Weights, inputs and targets. Each device's rows have a mean of their own."""
    rng = np.random.default_rng(0)
    first = rng.integers(-4, 5, (4, 8)) / 4
    last = rng.integers(-4, 5, (8, 2)) / 4
    x = rng.integers(-2, 3, (32, 4)) / 2 + np.repeat(np.arange(8) / 2 - 2, 4)[:, None]
    y = rng.integers(-4, 5, (32, 2)) / 4
    return {k: np.float32(v) for k, v in dict(first=first, last=last, x=x, y=y).items()}


class Linen(nn.Module):
    """Dense, BatchNorm, Dense."""

    axis_name: str | None = None

    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, use_bias=False)(x)
        x = nn.BatchNorm(
            use_running_average=False,
            axis_name=self.axis_name,
            momentum=MOMENTUM,
            epsilon=EPS,
        )(x)
        return nn.Dense(2, use_bias=False)(x)


class Nnx(nnx.Module):
    """The same."""

    def __init__(self, axis_name, rngs):
        self.first = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(
            8, axis_name=axis_name, momentum=MOMENTUM, epsilon=EPS, rngs=rngs
        )
        self.last = nnx.Linear(8, 2, use_bias=False, rngs=rngs)

    def __call__(self, x):
        return self.last(self.norm(self.first(x)))


def mean_square(out, y):
    return ((out.astype(jnp.float32) - y) ** 2).mean()


def linen_start(level, axis_name):
    model, given = Linen(axis_name), numbers()
    variables = Linen().init(jax.random.key(0), given["x"][:1])
    params = {
        **variables["params"],
        "Dense_0": {"kernel": given["first"]},
        "Dense_1": {"kernel": given["last"]},
    }
    rule = jamp.DynamicLossScale(init_scale=2.0**8)
    return jamp.initialize(
        params,
        optax.sgd(RATE),
        level,
        apply_fn=model.apply,
        batch_stats=variables["batch_stats"],
        loss_scale=rule,
        verbosity=0,
    )


def linen_step(state, x, y, axis_name):
    def loss_fn(params, x, y):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
        return mean_square(out, y), new["batch_stats"]

    grad = jamp.scaled_grad(loss_fn, has_aux=True, axis_name=axis_name)
    grads, batch_stats = grad(state, x, y)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats)


def nnx_start(level, axis_name):
    model, given = Nnx(axis_name, nnx.Rngs(0)), numbers()
    model.first.kernel[...] = jnp.asarray(given["first"])
    model.last.kernel[...] = jnp.asarray(given["last"])
    rule = jamp.DynamicLossScale(init_scale=2.0**8)
    tx = optax.sgd(RATE)
    return jamp.nnx.initialize(model, tx, level, loss_scale=rule, verbosity=0)


def nnx_step(model, optimizer, x, y, axis_name):
    def loss_fn(model, x, y):
        return mean_square(model(x), y)

    grads = jamp.nnx.scaled_grad(loss_fn, axis_name=axis_name)(model, optimizer, x, y)
    optimizer.update(model, grads)


def mapped(shard_map, step, mesh, check_vma, states):
    """The step where each device has its rows; a plain one if `check_vma` is None."""
    if check_vma is None:
        return functools.partial(step, axis_name=None)
    return shard_map(
        functools.partial(step, axis_name=AXIS),
        mesh=mesh,
        in_specs=(*[P()] * states, P(AXIS), P(AXIS)),
        out_specs=P(),
        check_vma=check_vma,
    )


def arrays(tree):
    return jax.tree.map(lambda x: np.float64(x).tolist(), tree)


def report(params, norm, stats, skipped, scale):
    first, between, last = params
    return {
        "params": arrays({"first": first["kernel"], "last": last["kernel"], **between}),
        "stats": arrays(stats),
        "dtypes": sorted({str(x.dtype) for x in [*norm.values(), *stats.values()]}),
        "skipped": int(skipped),
        "scale": float(scale),
    }


def linen_report(state):
    names, stats = ("Dense_0", "BatchNorm_0", "Dense_1"), state.batch_stats
    masters = [jamp.master_params(state)[name] for name in names]
    norm = state.params[names[1]]
    counts = state.skipped_steps, state.loss_scale
    return report(masters, norm, stats[names[1]], *counts)


def nnx_report(model, optimizer):
    stats = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))["norm"]
    norm = nnx.to_pure_dict(nnx.state(model, nnx.Param))["norm"]
    masters = optimizer.master_params(model)
    masters = [masters[name] for name in ("first", "norm", "last")]
    counts = optimizer.skipped_steps.get_value(), optimizer.loss_scale
    return report(masters, norm, stats, *counts)


def run(framework, level, check_vma):
    """A step, and one in which one device's batch overflows."""
    mesh = Mesh(jax.devices(), (AXIS,), axis_types=(AxisType.Auto,))
    axis_name = None if check_vma is None else AXIS
    rows = NamedSharding(mesh, P(AXIS))
    given = numbers()
    bad = given["x"].copy()
    bad[13, 2] = np.inf
    out = {}
    if framework == "linen":
        state = linen_start(level, axis_name)
        step = mapped(jax.shard_map, linen_step, mesh, check_vma, 1)
        step = jax.jit(step, compiler_options=FAST)
        for name, x in (("clean", given["x"]), ("bad", bad)):
            state = step(state, *jax.device_put((x, given["y"]), rows))
            out[name] = linen_report(state)
    else:
        model, optimizer = nnx_start(level, axis_name)
        step = nnx.jit(mapped(nnx.shard_map, nnx_step, mesh, check_vma, 2))
        for name, x in (("clean", given["x"]), ("bad", bad)):
            step(model, optimizer, *jax.device_put((x, given["y"]), rows))
            out[name] = nnx_report(model, optimizer)
    return out


if __name__ == "__main__":
    print(json.dumps({name_of(case): run(*case) for case in CASES}))
