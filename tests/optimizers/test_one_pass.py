"""AmpState with fused optimizers: a step is theirs, and a skip touches nothing."""

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
from tests.bits import assert_same_bits, bits
from tests.optimizers.fused import assert_close
from tests.optimizers.one_pass import (
    BAD,
    CASES,
    F32,
    STEPS,
    gradients,
    inner,
    run,
    start,
)
from tests.states import HALF

RUNS = [
    *((name, "masters", "xla") for name in CASES),
    *((name, "bare", "xla") for name in ("sgd", "lamb")),
    ("adam", "split", "xla"),
    # The emulator takes its time, and the formulas have tests of their own.
    ("adam", "masters", "interpret"),
    ("lamb", "split", "interpret"),
]
every_run = pytest.mark.parametrize("name, kept, backend", RUNS)


@functools.partial(jax.jit, static_argnums=0)
def optax_step(tx, grads, state, params, grad_scale, found_inf):
    updates, state = tx.update(
        grads, state, params, grad_scale=grad_scale, found_inf=found_inf
    )
    return optax.apply_updates(params, updates), state


@every_run
def test_a_step_is_the_same_optimizers_in_optaxs_way(name, kept, backend):
    """On float32 params by XLA, which has been compared with oracles in float64."""
    tx, level = CASES[name].make(backend="xla"), CASES[name].level(kept)
    states, _ = run(name, kept, backend)
    for k, (before, after) in enumerate(itertools.pairwise(states)):
        scale, x = before.loss_scale, gradients(k)
        # As they leave the backward pass, rounded where a param is half.
        grads = {
            k: (x[k] * np.float32(scale)).astype(p.dtype)
            for k, p in before.params.items()
        }
        args = jamp.master_params(before), scale, jnp.asarray(k in BAD)
        weights, state = optax_step(tx, grads, inner(before), *args)
        # Two programs of the same formula: XLA contracts their products differently,
        # which may round to another half.
        tolerance = (2e-3, 1e-5) if level == "O3" else (2e-6, 1e-7)
        assert_close(jamp.master_params(after), weights, *tolerance)
        assert_close(inner(after), state, 1e-5, 1e-9)


@every_run
def test_a_bad_step_moves_the_scale_and_counters_and_nothing_else(name, kept, backend):
    states, traces = run(name, kept, backend)
    assert traces == 1 or backend == "interpret"  # its first run changes JAX's cache
    for k, (before, after) in enumerate(itertools.pairwise(states)):
        assert after.last_step_skipped == (k in BAD)
        assert after.skipped_steps == before.skipped_steps + int(k in BAD)
        if k in BAD:
            for field in ("step", "params", "opt_state", "seen"):
                assert_same_bits(getattr(after, field), getattr(before, field))
            assert (after.tx, after.properties) == (before.tx, before.properties)
            assert after.loss_scale == before.loss_scale / 2
            continue
        # Or a skip that leaves all alone would show nothing.
        assert (after.step, after.seen) == (before.step + 1, before.seen + 1)
        assert inner(after).count == inner(before).count + 1
        assert after.loss_scale == before.loss_scale
        for tree in (jamp.master_params, lambda s: inner(s)[1:]):
            moved = jax.tree.map(lambda x, y: (x != y).any(), tree(after), tree(before))
            assert all(jax.tree.leaves(moved))
    assert (states[-1].step, states[-1].skipped_steps) == (STEPS - len(BAD), len(BAD))


@every_run
def test_params_are_their_rounded_masters(name, kept, backend):
    half = HALF.get(CASES[name].level(kept))
    for state in run(name, kept, backend)[0]:
        masters = jamp.master_params(state)
        for key, p in state.params.items():
            master = np.asarray(masters[key])
            assert master.dtype == np.float32
            stays = key == "n" or half is None
            assert p.dtype == (F32 if stays else half)
            if kept == "split" and not stays:
                low = np.asarray(state.opt_state.masters[key])
                assert_same_bits(join(p, low), jnp.asarray(master))
            else:
                assert bits(p) == master.astype(p.dtype).tobytes()


@jax.jit
def plain_step(state, x):
    return state.apply_gradients(grads=x)


# Start, step, and the largest number.
EDGES = {"O2": (1.0, 1e6, 65504.0), "O5": (3.3e38, 1e37, 3.3895314e38)}
# Level, options, and what the masters are then.
BEYOND = {
    "float16": ("O2", {"master_weights": False}, 65504.0),
    "float16, master": ("O2", {}, 1000001.0),
    "bfloat16": ("O5", {"master_weights": False}, 3.3895314e38),
    "bfloat16, master": ("O5", {}, 3.4e38),
    "split": ("O5", {"store_remainder": True}, 3.3961775e38),
}


@pytest.mark.parametrize(
    "row, backend", [*((row, "xla") for row in BEYOND), ("split", "interpret")]
)
def test_params_beyond_half_are_clamped(row, backend):
    level, options, master = BEYOND[row]
    options = {"loss_scale": 1.0, **options}
    begin, up, largest = EDGES[level]
    tree = {"v": jnp.full(130, begin), "w": jnp.full(2, -begin)}
    state = start(jo.fused_sgd(1.0, backend=backend), level, tree, **options)
    grads = jax.tree.map(lambda p: -up * jnp.sign(p), tree)
    after = plain_step(state, grads | {"v": grads["v"].at[7].set(jnp.nan)})
    for tree, at in ((after.params, largest), (jamp.master_params(after), master)):
        v, w = (np.float32(tree[key]) for key in "vw")
        assert np.isnan(v[7])
        np.testing.assert_allclose(np.delete(v, 7), np.float32(at), 1e-6)
        np.testing.assert_allclose(w, -np.float32(at), 1e-6)
