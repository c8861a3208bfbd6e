"""Gradients over mapped axes of 8 CPU devices; run by test_mapped_axis.py in a process.

Prints one line of JSON.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jamp
import jamp.nnx

F32 = jnp.float32


def mesh_of(*shape):
    names = ("data", "model")[: len(shape)]
    devices = jax.devices()[: np.prod(shape)]
    kinds = (AxisType.Auto,) * len(shape)
    return jax.make_mesh(shape, names, axis_types=kinds, devices=devices)


def on_devices(f, mesh, in_specs, out_specs, check_vma=True):
    specs = {"in_specs": in_specs, "out_specs": out_specs}
    return jax.jit(jax.shard_map(f, mesh=mesh, check_vma=check_vma, **specs))


def two_axes(check_vma):
    """Params in parts over "model"; one part of one device overflows."""
    mesh = mesh_of(2, 4)
    params = {"parts": np.ones(4, np.float32), "whole": np.ones((), np.float32)}
    specs = {"parts": P("model"), "whole": P()}
    rule = jamp.StaticLossScale(8.0, check=True)
    state = jamp.initialize(params, optax.sgd(0.5), "O2", loss_scale=rule, verbosity=0)
    where = jax.tree.map(lambda _: P(), state).replace(params=specs)
    where = where.replace(opt_state=where.opt_state._replace(masters=specs))

    def loss_fn(params, x):
        # x differs by device; the mean over "data" of its mean is 0.5.
        return (params["parts"].astype(F32) * x).sum()

    def step(state, x):
        grads = jamp.scaled_grad(loss_fn, axis_name="data")(state, x)
        state = state.apply_gradients(grads=grads)
        skipped = jnp.broadcast_to(state.skipped_steps, (1, 1))
        return state.params["parts"], skipped

    out = (P("model"), P("data", "model"))
    run = on_devices(step, mesh, (where, P("data", "model")), out, check_vma)
    clean = np.array([[0, 1, 2, 3], [1, 2, 3, 4]], np.float32)
    broken = clean.copy()
    broken[1, 2] = np.inf
    return [
        [np.asarray(x, np.float32).tolist() for x in run(state, batch)]
        for batch in (clean, broken)
    ]


def split(x):
    """The last axis over all devices; numbers lie on all."""
    spec = P(*[None] * (x.ndim - 1), "data") if x.ndim else P()
    return NamedSharding(mesh_of(8), spec)


def nnx_step(level, wrap):
    """A model with BatchNorm and a step on its batch, whole or in eighths."""

    class Model(nnx.Module):
        def __init__(self, axis_name=None):
            self.inner = nnx.Linear(2, 8, rngs=nnx.Rngs(0))
            self.bn = nnx.BatchNorm(8, axis_name=axis_name, rngs=nnx.Rngs(0))

        def __call__(self, x):
            return self.bn(self.inner(x))

    def train_step(model, optimizer, x, axis_name=None):
        def loss_fn(model, x):
            # BatchNorm takes the bias out again, and Adam would step by what is left.
            bias = model.inner.bias.sum(dtype=F32)
            return (jnp.tanh(model(x)) ** 2).mean() + 0.1 * bias

        both = jamp.nnx.scaled_value_and_grad(loss_fn, axis_name=axis_name)
        loss, grads = both(model, optimizer, x)
        optimizer.update(model, grads)
        return loss

    axis_name = "data" if wrap == "shard_map" else None
    model, mesh = Model(axis_name), mesh_of(8)
    if wrap == "FSDP":
        params = nnx.state(model, nnx.Param)
        nnx.update(model, jax.tree.map(lambda x: jax.device_put(x, split(x)), params))
    model, optimizer = jamp.nnx.initialize(
        model,
        optax.adam(0.1),
        level,
        loss_scale=jamp.DynamicLossScale(init_scale=2.0**8),
        verbosity=0,
    )
    if wrap == "FSDP":  # masters and moments, of which no part is whole
        arrays = jax.tree.leaves(nnx.as_pure((optimizer, nnx.state(model, nnx.Param))))
        assert all(x.sharding.is_equivalent_to(split(x), x.ndim) for x in arrays)
    x = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
    xs = [x, np.where(np.arange(16)[:, None] == 13, np.inf, x), x[::-1].copy()]
    if wrap == "shard_map":
        graphdef, arrays = nnx.split((model, optimizer))

        def step(arrays, x):
            model, optimizer = nnx.merge(graphdef, arrays)
            loss = train_step(model, optimizer, x, axis_name="data")
            return nnx.state((model, optimizer)), loss

        run = on_devices(step, mesh, (P(), P("data")), P())
        losses = []
        for x in xs:
            arrays, loss = run(arrays, x)
            losses.append(float(loss))
        nnx.update((model, optimizer), arrays)
    else:
        if wrap in ("replicated", "FSDP"):
            xs = [jax.device_put(x, NamedSharding(mesh, P("data"))) for x in xs]
        if wrap == "replicated":
            whole = NamedSharding(mesh, P())
            nnx.update(
                (model, optimizer), jax.device_put(nnx.state((model, optimizer)), whole)
            )
        step = nnx.jit(train_step)
        losses = [float(step(model, optimizer, x)) for x in xs]
    trees = nnx.as_pure(nnx.state(model, nnx.BatchStat)), optimizer.master_params(model)
    return {
        "losses": losses,
        "skips": int(optimizer.skipped_steps.get_value()),
        "scale": float(optimizer.loss_scale),
        "arrays": [np.asarray(x, np.float64).tolist() for x in jax.tree.leaves(trees)],
    }


def main():
    out = {}
    for check_vma in (True, False):
        out[f"two axes/{check_vma}"] = two_axes(check_vma)
    for level in ("O0", "O1", "O2", "O5"):
        for wrap in ("one device", "replicated", "FSDP", "shard_map"):
            out[f"nnx/{level}/{wrap}"] = nnx_step(level, wrap)
    print(json.dumps(out))


if __name__ == "__main__":
    main()
