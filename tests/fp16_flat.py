"""Small states of the cut-down FP16_Optimizer, gradients for them, and how to step."""

import jax
import jax.numpy as jnp
import numpy as np

from jamp.optimizers import FP16_Optimizer, fused_adam
from tests.fp16 import F16, F32, dot


def group(seed=0, dtype=F16):
    rng = np.random.default_rng(seed)
    return {
        "kernel": jnp.asarray(rng.normal(size=(3, 2)), F32).astype(dtype),
        "layer": {"bias": jnp.asarray(rng.normal(size=4), F32).astype(dtype)},
        "gain": jnp.asarray(rng.normal(), F32).astype(dtype),
    }


def like(tree, value):
    return jax.tree.map(lambda p: jnp.full(p.shape, value, F32), tree)


def data(tree, steps, overflows=(), seed=1):
    """Gradients of about 2**-9; inf or NaN in the last leaf only at `overflows`."""
    rng = np.random.default_rng(seed)

    def one(i):
        x = jax.tree.map(lambda p: rng.normal(size=p.shape) * 2.0**-9, tree)
        leaves, structure = jax.tree.flatten(x)
        if i in overflows:
            leaves[-1] = leaves[-1] + (np.inf, np.nan, 1e6)[i % 3]
        return structure.unflatten([jnp.asarray(x, F32) for x in leaves])

    return [one(i) for i in range(steps)]


def make(tx=None, **kwargs):
    kwargs.setdefault("dynamic_loss_scale", True)
    kwargs.setdefault("verbose", False)
    tx = fused_adam(1e-2, legacy=True) if tx is None else tx
    return FP16_Optimizer(tx, **kwargs)


def step_of(optimizer):
    def step(state, x):
        loss, state = optimizer.backward(state, dot, x)
        return optimizer.zero_grad(optimizer.step(state)), loss

    return step


def run(optimizer, state, xs, where="jit"):
    """The state after each step."""
    step = step_of(optimizer)
    step = jax.jit(step) if where == "jit" else step
    states = []
    for x in xs:
        state, _ = step(state, x)
        states.append(state)
    return states


def host(x):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(x)]
