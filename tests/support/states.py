"""A small state to train, and checks of any state."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

import jamp
from tests.support.bits import assert_same_bits

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
RUNNING = ("O0", "O2", "O3", "O5")  # the levels without autocast
HALF = {"O2": jnp.float16, "O3": jnp.float16, "O5": jnp.bfloat16}
SGD = optax.sgd(0.5, momentum=0.5)  # one object, so that jit traces once


class State(jamp.AmpState):
    """Declares the fields that tests use; all are None by default."""

    cache: Any = None
    debiased: Any = None
    ema: Any = None
    epoch: Any = None
    extra: Any = None
    key: Any = None
    own: Any = None
    rate: Any = None
    rng: Any = None
    seen: Any = None
    shared: Any = None
    slow: Any = None
    stats: Any = None
    version: Any = None


def params() -> Any:
    return {
        "w": jnp.asarray([1.0, -2.0, 0.5], jnp.float32),
        "b": jnp.asarray([0.1, 0.2], jnp.float32),
        "norm": {"scale": jnp.asarray(3.0, jnp.float32)},
    }


def make(level: str = "O2", tree: Any = None, tx: Any = SGD, **kwargs) -> Any:
    """Returns a state of `params()`, with a float32 norm, or of another tree."""
    tree = params() if tree is None else tree
    if level in HALF and isinstance(tree, dict) and "norm" in tree:
        kwargs.setdefault("keep_fp32", "norm")
    kwargs.setdefault("state_class", State)
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def wide(x: Any) -> jax.Array:
    return x.astype(jnp.float32)


def dot(p: Any, x: Any) -> Any:
    """Returns a loss whose gradient is `x`, in the dtypes of the params."""
    products = jax.tree.map(lambda p, x: (wide(p) * x).sum(), p, x)
    return sum(jax.tree.leaves(products))


def step_on(loss_fn: Callable, **options: Any) -> Callable:
    """Returns a training step: a function of a state and the inputs of a loss."""

    def step(state, *inputs):
        grads = jamp.scaled_grad(loss_fn, **options)(state, *inputs)
        return state.apply_gradients(grads=grads)

    return step


def like(tree: Any, value: float) -> Any:
    return jax.tree.map(lambda x: jnp.full(x.shape, value, jnp.float32), tree)


def with_scales(state: Any, *scales: float) -> Any:
    """Returns the state with these loss scales, one per loss."""
    pairs = zip(state.loss_scales, scales, strict=True)
    moved = (old._replace(scale=jnp.float32(new)) for old, new in pairs)
    return state.replace(loss_scales=tuple(moved))


def all_nan(tree: Any) -> bool:
    return all(jnp.isnan(x).all() for x in jax.tree.leaves(tree))


def assert_skipped(after: Any, before: Any) -> None:
    """Checks that all fields keep their bits, except the counts of skips."""
    counters = ("loss_scales", "skipped_steps", "last_step_skipped")
    kept = {name: getattr(before, name) for name in counters}
    assert_same_bits(after.replace(**kept), before)
