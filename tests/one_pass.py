"""Fused optimizers in AmpState, as the tests of one pass take them: runs and trees."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from jamp import optimizers as jo
from tests.mixed_leaves import BACKENDS, FAST
from tests.oracles.fused_adagrad import fused_adagrad
from tests.oracles.fused_adam import fused_adam
from tests.oracles.fused_lamb import fused_lamb
from tests.oracles.fused_novograd import fused_novograd
from tests.oracles.fused_sgd import fused_sgd

F32 = jnp.float32
HALF = {"O2": jnp.float16, "O3": jnp.float16, "O5": jnp.bfloat16}
STEPS = 6
# Where a step overflows: in the first and the last leaf, which are half, and in one
# that stays float32. Two such steps follow each other.
BAD = {1: ("a", -1, np.inf), 3: ("z", 0, np.nan), 4: ("n", 64, -np.inf)}


def decreasing(count):
    return 0.05 / (1 + count if isinstance(count, int) else 1 + count.astype(F32))


class Case(NamedTuple):
    """An optimizer, its oracle, and options for both; the level without masters."""

    make: Callable[..., Any]
    oracle: Callable[..., Any]
    options: dict[str, Any]
    bare: str
    masters: str


DECAY = {"weight_decay": 0.1}
CASES = {
    "adam": Case(
        jo.fused_adam,
        fused_adam,
        DECAY | {"learning_rate": decreasing, "max_grad_norm": 0.5},
        "O0",
        "O2",
    ),
    "sgd": Case(
        jo.fused_sgd,
        fused_sgd,
        DECAY | {"learning_rate": decreasing, "momentum": 0.9, "dampening": 0.3},
        "O1",
        "O5",
    ),
    "lamb": Case(jo.fused_lamb, fused_lamb, {"learning_rate": 0.05}, "O3", "O2"),
    "novograd": Case(
        jo.fused_novograd, fused_novograd, DECAY | {"learning_rate": 0.05}, "O4", "O5"
    ),
    "adagrad": Case(
        jo.fused_adagrad, fused_adagrad, DECAY | {"learning_rate": 0.1}, "O3", "O2"
    ),
}
KEPT = ("bare", "masters", "split")
RUNS = [(name, kept, "xla") for name in CASES for kept in KEPT]
# The emulator takes its time, and the formulas have tests of their own.
EMULATED = [("adam", "masters"), ("adam", "split"), ("lamb", "split")]
EMULATED += [("sgd", "masters"), ("novograd", "bare"), ("adagrad", "bare")]
RUNS += [(*pair, "interpret") for pair in EMULATED]

every_run = pytest.mark.parametrize("name, kept, backend", RUNS)
each_backend = pytest.mark.parametrize("backend", BACKENDS)


def normal(shape, seed):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


def params():
    """Leaves that kernels take, one that they do not, and one that stays float32."""
    shapes = {"a": (14, 10), "b": (3,), "n": (129,), "z": (131,)}
    return {
        k: jnp.asarray(normal(s, 10 + i)) for i, (k, s) in enumerate(shapes.items())
    }


def gradients(step):
    """What step number `step` differentiates: small, with an overflow in bad ones."""
    tree = {k: normal(p.shape, 100 * step + p.size) / 16 for k, p in params().items()}
    if step in BAD:
        leaf, place, value = BAD[step]
        tree[leaf].flat[place] = value
    return tree


def dot(p, x):
    """A loss whose gradient is `x`, in the dtypes of the params."""
    products = jax.tree.map(lambda p, x: (p.astype(F32) * x).sum(), p, x)
    return sum(jax.tree.leaves(products))


def start(tx, level, tree=None, **kwargs):
    tree = params() if tree is None else tree
    if level in HALF and "n" in tree:
        kwargs.setdefault("keep_fp32", "n")
    kwargs.setdefault("loss_scale", jamp.DynamicLossScale(init_scale=2.0**8))
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def one_step(state, x):
    return state.apply_gradients(grads=jamp.scaled_grad(dot)(state, x))


step = jax.jit(one_step, compiler_options=FAST)


class Run(NamedTuple):
    """The states before and after each step, and how often the step was traced."""

    states: list[Any]
    traces: int

    def clean(self):
        return [k for k in range(STEPS) if k not in BAD]


def level_of(name, kept):
    return "O5" if kept == "split" else getattr(CASES[name], kept)


@functools.cache
def run(name, kept, backend) -> Run:
    case, traces = CASES[name], []

    @functools.partial(jax.jit, compiler_options=FAST)
    def counted(state, x):
        traces.append(1)
        grads = jamp.scaled_grad(dot)(state, x)
        return state.apply_gradients(grads=grads, seen=state.seen + 1)

    state = start(
        case.make(**case.options, backend=backend),
        level_of(name, kept),
        store_remainder=kept == "split",
        seen=jnp.zeros((), F32),
    )
    states = [state]
    for k in range(STEPS):
        states.append(counted(states[-1], gradients(k)))
    return Run(states, len(traces))


def inner(state):
    """The optimizer's own state."""
    return getattr(state.opt_state, "inner_state", state.opt_state)
