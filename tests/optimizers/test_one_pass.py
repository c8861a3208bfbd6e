"""Test that AmpState steps like its fused optimizer, and skips without a change."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp import optimizers as jo
from pallas_kernels import join
from tests.optimizers.fused import larc_sgd
from tests.support.bits import assert_rounded_alike, assert_same_bits, bits
from tests.support.programs import FAST
from tests.support.states import HALF, State, assert_skipped, dot

pytestmark = pytest.mark.slow

F32 = jnp.float32
STEPS = 6
# The steps that overflow, each with a leaf, an index and a value. Two of them are
# consecutive.
BAD = {1: ("a", -1, np.inf), 3: ("z", 0, np.nan), 4: ("n", 64, -np.inf)}


def decreasing(count):
    return 0.05 / (1 + count.astype(F32))


ADAM = functools.partial(jo.fused_adam, 0.05, weight_decay=0.1, max_grad_norm=0.5)
SGD = functools.partial(jo.fused_sgd, decreasing, 0.9, dampening=0.3, weight_decay=0.1)
LAMB = functools.partial(jo.fused_lamb, 0.05, weight_decay=0.1)
SPLIT = {"store_remainder": True}
# An optimizer, its backend, a level and options.
RUNS = {
    "larc": (lambda backend: larc_sgd(0.05, weight_decay=0.1), "xla", "O2", {}),
    "sgd, float32": (SGD, "xla", "O1", {}),
    "lamb, bare": (LAMB, "xla", "O3", {}),
    "adam, split": (ADAM, "xla", "O5", SPLIT),
    "adam, kernels": (ADAM, "interpret", "O2", {}),
}


def normal(shape, seed):
    return np.float32(np.random.default_rng(seed).normal(size=shape))


def params():
    """Draws leaves for kernels, one that is too small, and one that stays float32."""
    shapes = {"a": (14, 10), "b": (3,), "n": (129,), "z": (131,)}
    return {k: normal(s, 10 + i) for i, (k, s) in enumerate(shapes.items())}


def gradients(step):
    """Draws small gradients for a step, with an overflow if the step is bad."""
    tree = {k: normal(p.shape, 100 * step + p.size) / 16 for k, p in params().items()}
    if step in BAD:
        leaf, place, value = BAD[step]
        tree[leaf].flat[place] = value
    return tree


def start(tx, level, tree, **kwargs):
    kwargs |= {"keep_fp32": "n"} if level in HALF and "n" in tree else {}
    kwargs.setdefault("loss_scale", jamp.DynamicLossScale(init_scale=2.0**8))
    return jamp.initialize(tree, tx, level, verbosity=0, state_class=State, **kwargs)


@functools.partial(jax.jit, compiler_options=FAST)
def step(state, x):
    fields = {} if state.seen is None else {"seen": state.seen + 1}
    return state.apply_gradients(grads=jamp.scaled_grad(dot)(state, x), **fields)


@functools.cache
def run(name):
    """Returns the states before and after each step."""
    make, backend, level, options = RUNS[name]
    seen = jnp.zeros((), F32)
    states = [start(make(backend=backend), level, params(), seen=seen, **options)]
    for k in range(STEPS):
        states.append(step(states[-1], gradients(k)))
    return states


def inner(state):
    """Returns the optimizer's own state."""
    return getattr(state.opt_state, "inner_state", state.opt_state)


@functools.partial(jax.jit, static_argnums=0)
def optax_step(tx, grads, state, params, grad_scale):
    updates, state = tx.update(grads, state, params, grad_scale=grad_scale)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("name", RUNS)
def test_a_step_is_the_same_optimizers_in_optaxs_way(name):
    """Compares with float32 params under XLA, which other tests check in float64."""
    make, _, level, options = RUNS[name]
    states = run(name)
    for k, (before, after) in enumerate(itertools.pairwise(states)):
        if k in BAD:
            assert_skipped(after, before)
            assert after.loss_scale == before.loss_scale / 2
            continue
        assert (after.step, after.seen) == (before.step + 1, before.seen + 1)
        scale, x = before.loss_scale, gradients(k)
        # The backward pass rounds the gradient of a half param.
        grads = {
            k: (x[k] * np.float32(scale)).astype(p.dtype)
            for k, p in before.params.items()
        }
        args = grads, inner(before), jamp.master_params(before), scale
        weights, state = optax_step(make(backend="xla"), *args)
        masters = jamp.master_params(after)
        # XLA fuses the two programs differently, so a result may round to another half.
        tolerance = (2e-3, 1e-5) if level == "O3" else (2e-6, 1e-7)
        assert_rounded_alike(masters, weights, *tolerance)
        assert_rounded_alike(inner(after), state, 1e-5, 1e-9)
        for key, p in after.params.items():
            assert p.dtype == (F32 if key == "n" else HALF.get(level, F32))
            if options and key != "n":
                low = after.opt_state.masters[key]
                assert_same_bits(join(p, low), masters[key])
            else:
                assert bits(p) == np.asarray(masters[key]).astype(p.dtype).tobytes()
    assert (states[-1].step, states[-1].skipped_steps) == (STEPS - len(BAD), len(BAD))


@jax.jit
def plain_step(state, x):
    return state.apply_gradients(grads=x)


# Level, options, backend, start, step, the largest half, and the master there.
BEYOND = [
    ("O2", {"master_weights": False}, "xla", 1.0, 1e6, 65504.0, 65504.0),
    ("O5", {}, "xla", 3.3e38, 1e37, 3.3895314e38, 3.4e38),
    ("O5", SPLIT, "xla", 3.3e38, 1e37, 3.3895314e38, 3.3961775e38),
    ("O5", SPLIT, "interpret", 3.3e38, 1e37, 3.3895314e38, 3.3961775e38),
]


@pytest.mark.parametrize("level, options, backend, begin, up, largest, master", BEYOND)
def test_params_beyond_half_are_clamped(
    level, options, backend, begin, up, largest, master
):
    tree = {"v": jnp.full(130, begin), "w": jnp.full(2, -begin)}
    tx = jo.fused_sgd(1.0, backend=backend)
    state = start(tx, level, tree, loss_scale=1.0, **options)
    grads = jax.tree.map(lambda p: -up * jnp.sign(p), tree)
    after = plain_step(state, grads | {"v": grads["v"].at[7].set(jnp.nan)})
    for tree, at in ((after.params, largest), (jamp.master_params(after), master)):
        v, w = (np.float32(tree[key]) for key in "vw")
        assert np.isnan(v[7])
        np.testing.assert_allclose(np.delete(v, 7), np.float32(at), 1e-6)
        np.testing.assert_allclose(w, -np.float32(at), 1e-6)


def test_both_halves_of_a_master_are_of_one_value():
    # Without optimizations, XLA on CPU may round `a * b + c` once in one fusion, and
    # twice in another. Halves of the two values could differ by a whole bfloat16.
    weights, grads = ({"w": normal(2**21, seed)} for seed in range(2))
    scale = jamp.StaticLossScale(1.0, check=True)
    state = start(jo.fused_sgd(0.05), "O5", weights, loss_scale=scale, **SPLIT)
    after = step(state, grads)
    expected = weights["w"] - 0.05 * grads["w"].astype("bfloat16").astype(np.float64)
    np.testing.assert_allclose(jamp.master_params(after)["w"], expected, 3e-7, 3e-8)
