"""AmpState with fused optimizers: a step is theirs, and a skip touches nothing.

Per optimizer, way to keep the weights, and backend, one program runs clean and bad
steps; the tests look at that run.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jamp
from pallas_kernels import join
from tests.bits import assert_same_bits, bits
from tests.fused import assert_close
from tests.one_pass import (
    BAD,
    CASES,
    F32,
    HALF,
    STEPS,
    gradients,
    inner,
    run,
)

RUNS = [
    *((name, kept, "xla") for name in CASES for kept in ("bare", "masters")),
    *((name, "split", "xla") for name in ("adam", "sgd", "lamb")),
    # The emulator takes its time, and the formulas have tests of their own.
    ("adam", "masters", "interpret"),
    ("lamb", "split", "interpret"),
    ("novograd", "bare", "interpret"),
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
    states, _ = run(name, kept, backend)
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
def test_nothing_retraces_and_no_schema_changes(name, kept, backend):
    states, traces = run(name, kept, backend)
    if backend == "xla":  # the emulator's first run changes what JAX's cache looks at
        assert traces == 1
    first, last = (jax.eval_shape(lambda s=s: s) for s in (states[0], states[-1]))
    assert jax.tree.structure(first) == jax.tree.structure(last)
    for x, y in zip(*map(jax.tree.leaves, (first, last)), strict=True):
        assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)


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
                # But for exact ties, which go away from zero and not to even.
                tie = master.view(np.uint32) & 0xFFFF == 0x8000
                same = np.asarray(p) == master.astype(ml_dtypes.bfloat16)
                assert (same | tie).all()
            else:
                assert bits(p) == master.astype(p.dtype).tobytes()
            if kept != "bare":
                hole = isinstance(state.opt_state.masters[key], optax.MaskedNode)
                assert hole == stays
