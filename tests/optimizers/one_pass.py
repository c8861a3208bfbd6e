"""Fused optimizers in AmpState, as the tests of one pass take them: runs and trees."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jamp
from jamp import optimizers as jo
from tests.optimizers.fused import larc_sgd
from tests.optimizers.mixed_leaves import FAST
from tests.states import HALF, dot

F32 = jnp.float32
STEPS = 6
# Where a step overflows: in the first and the last leaf, which are half, and in one
# that stays float32. Two such steps follow each other.
BAD = {1: ("a", -1, np.inf), 3: ("z", 0, np.nan), 4: ("n", 64, -np.inf)}


def decreasing(count):
    return 0.05 / (1 + count.astype(F32))


class Case(NamedTuple):
    """An optimizer; a level without masters, and one with them."""

    make: Any
    bare: str
    masters: str

    def level(self, kept: str) -> str:
        return {"bare": self.bare, "masters": self.masters, "split": "O5"}[kept]


def case(name: str, bare: str, masters: str, **options: Any) -> Case:
    options = {"learning_rate": 0.05, "weight_decay": 0.1} | options
    return Case(functools.partial(getattr(jo, name), **options), bare, masters)


MORE = {"momentum": 0.9, "dampening": 0.3}
CASES = {
    "adam": case("fused_adam", "O0", "O2", max_grad_norm=0.5),
    "sgd": case("fused_sgd", "O1", "O5", learning_rate=decreasing, **MORE),
    "lamb": case("fused_lamb", "O3", "O2"),
    "novograd": case("fused_novograd", "O4", "O5"),
    "adagrad": case("fused_adagrad", "O3", "O2", learning_rate=decreasing),
    "larc": Case(lambda backend: larc_sgd(0.05, weight_decay=0.1), "O0", "O2"),
}


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


def start(tx, level, tree=None, **kwargs):
    tree = params() if tree is None else tree
    if level in HALF and "n" in tree:
        kwargs.setdefault("keep_fp32", "n")
    kwargs.setdefault("loss_scale", jamp.DynamicLossScale(init_scale=2.0**8))
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def one_step(state, x):
    return state.apply_gradients(grads=jamp.scaled_grad(dot)(state, x))


step = jax.jit(one_step, compiler_options=FAST)


@functools.cache
def run(name: str, kept: str, backend: str) -> tuple[list[Any], int]:
    """The states before and after each step, and how often the step was traced."""
    traces = []

    @functools.partial(jax.jit, compiler_options=FAST)
    def counted(state, x):
        traces.append(1)
        grads = jamp.scaled_grad(dot)(state, x)
        return state.apply_gradients(grads=grads, seen=state.seen + 1)

    tx, level = CASES[name].make(backend=backend), CASES[name].level(kept)
    seen = jnp.zeros((), F32)
    states = [start(tx, level, store_remainder=kept == "split", seen=seen)]
    for k in range(STEPS):
        states.append(counted(states[-1], gradients(k)))
    return states, len(traces)


def inner(state):
    """The optimizer's own state."""
    return getattr(state.opt_state, "inner_state", state.opt_state)
