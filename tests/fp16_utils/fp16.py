"""Make small states of both FP16_Optimizers and gradients, and step them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from jamp import fp16_utils, optimizers
from tests.support.states import dot

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def params(dtype=F16):
    return {
        "dense": {
            "kernel": jnp.asarray([[1.0, -2.0], [0.5, 0.25], [3.0, -1.5]], dtype),
            "bias": jnp.asarray([0.125, 0.25], dtype),
        },
        "norm": jnp.asarray(3.0, F32),
    }


def group(seed=0, dtype=F16):
    """Returns 11 half numbers in a tree, for the cut-down optimizer."""
    rng = np.random.default_rng(seed)
    x = jnp.asarray(rng.normal(size=11), F32).astype(dtype)
    return {"kernel": x[:6].reshape(3, 2), "layer": {"bias": x[6:10]}, "scale": x[10]}


def like(value, tree=None):
    tree = params() if tree is None else tree
    return jax.tree.map(lambda p: jnp.full(p.shape, value, F32), tree)


def data(steps, overflows=(), seed=0, tree=None):
    """Draws gradients that fit half at a scale of 2**18, except at `overflows`."""
    rng = np.random.default_rng(seed)
    zeros, structure = jax.tree.flatten(like(0.0, tree))
    only_last = structure.unflatten([*zeros[:-1], zeros[-1] + np.nan])
    bad = (only_last, like(np.inf, tree), like(1e38, tree))

    def one(i):
        if i in overflows:
            return bad[sorted(overflows).index(i) % len(bad)]
        leaves = [rng.normal(size=x.shape) * 2.0**-9 for x in zeros]
        return structure.unflatten([jnp.asarray(x, F32) for x in leaves])

    return [one(i) for i in range(steps)]


def make(tx=None, *, window=4, dynamic=True, **kwargs):
    args = {"dynamic_loss_args": {"scale_window": window}} if dynamic else {}
    return fp16_utils.FP16_Optimizer(
        tx or optax.sgd(0.5, momentum=0.5),
        dynamic_loss_scale=dynamic,
        **{"verbose": False} | args | kwargs,
    )


def cut_down(tx=None, **kwargs):
    kwargs = {"dynamic_loss_scale": True, "verbose": False} | kwargs
    tx = tx or optimizers.fused_adam(1e-2, legacy=True)
    return fp16_utils.FlatFP16_Optimizer(tx, **kwargs)


def run(step, state, xs, where="jit"):
    """Returns the list of the states that `step(state, x)` returns."""
    if where == "scan":
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *xs)
        _, seen = jax.jit(lambda s, x: lax.scan(step, s, x))(state, stacked)
        return [jax.tree.map(lambda x, i=i: x[i], seen) for i in range(len(xs))]
    step, seen = (jax.jit(step) if where == "jit" else step), []
    for x in xs:
        state, now = step(state, x)
        seen.append(now)
    return seen


def steps(optimizer, state, xs, where="jit", passes=1):
    """Returns the states after each step, with their gradients."""

    def step(state, xs):
        for x in xs:
            _, state = optimizer.backward(state, dot, x)
        state = optimizer.step(state)
        return optimizer.zero_grad(state), state

    return run(step, state, in_groups(xs, passes), where)


def in_groups(xs, size):
    return [xs[i : i + size] for i in range(0, len(xs), size)]


def host(x):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(x)]
