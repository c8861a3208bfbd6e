"""redo_on_overflow across two CPU devices; run by test_redo.py in a process.

Prints one line of JSON.
"""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P

import jamp
from tests.two_devices import MESH, lists, loss_fn, make, mapped, report

# The second device's half of the batch fits at 2^13, the first's at once.
X = np.float32([[0.5, 0.5], [4.0, 4.0]])


def step(state, x, times, axis_name=None):
    grads = jamp.scaled_grad(loss_fn, redo_on_overflow=times, axis_name=axis_name)
    grads = grads(state, x)
    return state.apply_gradients(grads=grads), grads


def sharded(check_vma, times=5):
    """(state, x) -> the state, and each device's gradients, scale and flag."""

    @jax.jit
    @mapped(check_vma, (P(), P("batch")), (P(), P("batch")))
    def f(state, x):
        state, grads = step(state, x, times, axis_name="batch")
        found = grads.tree["w"], grads.scale, grads.finite
        return state, jax.tree.map(lambda x: jnp.asarray(x)[None], found)

    return f


def lowered(scale):
    state = make()
    (only,) = state.loss_scales
    return state.replace(loss_scales=(only._replace(scale=jnp.float32(scale)),))


def full(state):
    return report(state) | {"loss_scale": float(state.loss_scale)}


def main():
    out = {}
    for check_vma in (True, False):
        redo, plain = sharded(check_vma), sharded(check_vma, times=0)
        state, (w, scale, finite) = redo(make(), X)
        out[f"redo/{check_vma}"] = {
            "grads": lists(w),
            "scales": lists(scale),
            "finite": np.asarray(finite).tolist(),
        }
        lower, _ = plain(lowered(2.0**13), X)
        out[f"step/{check_vma}"] = {"redone": full(state), "lower": full(lower)}
        state, _ = redo(make(), np.float32([[0.5, 0.5], [0.5, np.inf]]))
        out[f"bad/{check_vma}"] = full(state)
    place = functools.partial(jax.device_put, device=NamedSharding(MESH, P("batch")))
    steps = jax.jit(step, static_argnums=2)
    state, _ = steps(make(), place(2 * X), 5)  # the mean halves each half's gradient
    lower, _ = steps(lowered(2.0**13), place(2 * X), 0)
    out["jit"] = {"redone": full(state), "lower": full(lower)}
    print(json.dumps(out))


if __name__ == "__main__":
    main()
