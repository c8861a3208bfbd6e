"""Scaled gradients across two CPU devices; run by test_scaled_grad.py in a process.

The number of devices is fixed when JAX starts, so this cannot be done inside pytest.
Prints one line of JSON.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jamp

MESH = jax.make_mesh((2,), ("batch",), axis_types=(AxisType.Auto,))


def make(**kwargs):
    params = {"w": jnp.ones(2, jnp.float32)}
    return jamp.initialize(params, optax.sgd(0.125), "O2", verbosity=0, **kwargs)


def loss_fn(p, x):
    """Its gradient is the mean over the rows of `x`."""
    return (p["w"].astype(jnp.float32) * x).sum(-1).mean()


def mapped(check_vma, in_specs, out_specs):
    return functools.partial(
        jax.shard_map,
        mesh=MESH,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=check_vma,
    )


def lists(x):
    return np.asarray(x).astype(np.float32).tolist()


def gradients(check_vma, state, x):
    """The gradients and flags as each of the devices has them."""

    @jax.jit
    @mapped(check_vma, (P(), P("batch")), (P("batch"), P("batch")))
    def f(state, x):
        grads = jamp.scaled_grad(loss_fn, axis_name="batch")(state, x)
        return grads.tree["w"][None], grads.finite[None]

    w, finite = f(state, x)
    return {"grads": lists(w), "finite": np.asarray(finite).tolist()}


def step(check_vma, state, x):
    @jax.jit
    @mapped(check_vma, (P(), P("batch")), P())
    def f(state, x):
        grads = jamp.scaled_grad(loss_fn, axis_name="batch")(state, x)
        return state.apply_gradients(grads=grads)

    return f(state, x)


@jax.jit
def whole_step(state, x):
    return state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state, x))


def report(state):
    return {
        "step": int(state.step),
        "skipped_steps": int(state.skipped_steps),
        "params": lists(state.params["w"]),
        "masters": lists(jamp.master_params(state)["w"]),
    }


def varying(check_vma, rates):
    """An ensemble: every device has its own params."""

    @jax.jit
    @mapped(check_vma, (P("batch"), P("batch")), (P("batch"), P("batch")))
    def f(w, x):
        state = jamp.initialize(
            {"w": w[0]}, optax.sgd(0.1), "O2", verbosity=0, loss_scale=1.0
        )
        grads = jamp.scaled_grad(loss_fn, axis_name="batch")(state, x)
        finite = jnp.broadcast_to(grads.finite, (1,))
        return grads.tree["w"][None], finite

    w, finite = f(jnp.ones((2, 1), jnp.float32), rates)
    return {"grads": lists(w), "finite": np.asarray(finite).tolist()}


def pmapped(state, x):
    def f(state, x):
        grads = jamp.scaled_grad(loss_fn, axis_name="batch")(state, x)
        return grads.tree["w"], grads.finite

    w, finite = jax.pmap(f, "batch", in_axes=(None, 0))(state, x)
    return {"grads": lists(w), "finite": np.asarray(finite).tolist()}


def main():
    out = {}
    halves = np.float32([[1.0, 1.0], [1.0, 1.0]])
    for check_vma in (True, False):
        static = make(loss_scale=1.0)
        out[f"reduce/{check_vma}"] = gradients(check_vma, static, 60000 * halves)
        small = np.float32([[0.25, 0.5], [0.5, -0.25]])
        after, whole = step(check_vma, make(), small), whole_step(make(), small)
        out[f"step/{check_vma}"] = report(after) | {
            "whole": lists(whole.params["w"]),
            "whole_masters": lists(jamp.master_params(whole)["w"]),
        }
        one_inf = np.float32([[0.25, 0.5], [0.5, np.inf]])
        out[f"overflow/{check_vma}"] = report(step(check_vma, make(), one_inf))
        out[f"overflow/{check_vma}"] |= gradients(check_vma, make(), one_inf)
        rates = np.float32([[1.0], [3.0]])
        out[f"varying/{check_vma}"] = varying(check_vma, rates)
    sharded = functools.partial(jax.device_put, device=NamedSharding(MESH, P("batch")))
    state = jax.device_put(make(), NamedSharding(MESH, P()))
    state = whole_step(whole_step(state, sharded(small)), sharded(one_inf))
    out["jit"] = report(state) | {"whole": lists(whole_step(make(), small).params["w"])}
    out["pmap"] = pmapped(make(loss_scale=1.0), 60000 * halves[:, None])
    print(json.dumps(out))


if __name__ == "__main__":
    main()
