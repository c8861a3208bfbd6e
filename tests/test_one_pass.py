"""AmpState with fused optimizers: a step is the oracle's, and a skip touches nothing.

Per optimizer, way to keep the weights, and backend, one program runs clean and bad
steps; the tests look at that run.
"""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jamp
from pallas_kernels import join
from tests.bits import assert_same_bits, bits
from tests.mixed_leaves import BACKENDS
from tests.one_pass import (
    BAD,
    CASES,
    EMULATED,
    F32,
    HALF,
    STEPS,
    every_run,
    gradients,
    inner,
    level_of,
    params,
    run,
    step,
)


def flat64(tree):
    return [np.asarray(x).astype(np.float64) for x in jax.tree.leaves(tree)]


def assert_close(a, b, rtol=1e-5, atol=1e-6):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        np.testing.assert_allclose(np.float64(x), np.float64(y), rtol, atol)


def scaled_gradients(state, x):
    """The gradients as they leave the backward pass, rounded where a param is half."""
    return {
        k: (x[k] * np.float32(state.loss_scale)).astype(p.dtype)
        for k, p in state.params.items()
    }


# What a step computes


@every_run
def test_every_step_is_the_oracles(name, kept, backend):
    case, (states, _) = CASES[name], run(name, kept, backend)
    with np.errstate(invalid="ignore"):
        grads = [
            [g / float(s.loss_scale) for g in flat64(scaled_gradients(s, gradients(k)))]
            for k, s in enumerate(states[:-1])
        ]
    expected = case.oracle(
        flat64(jamp.master_params(states[0])),
        grads,
        **case.options,
        skip=[k in BAD for k in range(STEPS)],
    )
    for state, (weights, moments) in zip(states[1:], expected, strict=True):
        rounded = level_of(name, kept) == "O3"
        for x, wanted, p in zip(
            flat64(jamp.master_params(state)),
            weights,
            jax.tree.leaves(state.params),
            strict=True,
        ):
            half = rounded and p.dtype != F32
            # Within a unit of a half; within half a unit where sums are not rounded.
            np.testing.assert_allclose(
                x, wanted, *((2e-3, 1e-5) if half else (1e-5, 1e-6))
            )
            if half:
                wanted[...] = x  # where the oracle goes on from
        assert inner(state)._fields == tuple(moments)
        for field, wanted in moments.items():
            got = flat64(getattr(inner(state), field))
            wanted = wanted if isinstance(wanted, list) else [wanted]
            for x, y in zip(got, wanted, strict=True):
                np.testing.assert_allclose(x, y, 1e-4 if rounded else 1e-5, 1e-9)


@every_run
def test_a_bad_step_moves_the_scale_and_counters_and_nothing_else(name, kept, backend):
    states = run(name, kept, backend).states
    for k in BAD:
        before, after = states[k], states[k + 1]
        for field in ("step", "params", "opt_state", "seen"):
            assert_same_bits(getattr(after, field), getattr(before, field))
        assert (after.tx, after.properties) == (before.tx, before.properties)
        assert after.skipped_steps == before.skipped_steps + 1
        assert after.last_step_skipped
        assert after.loss_scale == before.loss_scale / 2


@every_run
def test_a_clean_step_moves_everything_else(name, kept, backend):
    # Or a skip that leaves all alone would show nothing.
    states = run(name, kept, backend).states
    for k in run(name, kept, backend).clean():
        before, after = states[k], states[k + 1]
        assert (after.step, after.seen) == (before.step + 1, before.seen + 1)
        assert inner(after).count == inner(before).count + 1
        assert not after.last_step_skipped
        assert after.loss_scale == before.loss_scale
        for tree in (jamp.master_params, lambda s: inner(s)[1:]):
            leaves = zip(
                *(jax.tree.leaves(tree(s)) for s in (after, before)), strict=True
            )
            for x, y in leaves:
                assert (np.asarray(x) != np.asarray(y)).any()
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
    half = HALF.get(level_of(name, kept))
    for state in run(name, kept, backend).states:
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


@functools.partial(jax.jit, static_argnums=0)
def optax_step(tx, grads, state, params, grad_scale, found_inf):
    updates, state = tx.update(
        grads, state, params, grad_scale=grad_scale, found_inf=found_inf
    )
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_the_same_optimizers_in_optaxs_way(name):
    case, states = CASES[name], run(name, "masters", "xla").states
    tx = case.make(**case.options, backend="xla")
    weights = params()
    state = tx.init(weights)
    for k, (before, after) in enumerate(zip(states, states[1:], strict=False)):
        grads = scaled_gradients(before, gradients(k))
        scale, bad = before.loss_scale, jnp.asarray(k in BAD)
        weights, state = optax_step(tx, grads, state, weights, scale, bad)
        # Two programs of the same formula: XLA contracts their products differently.
        assert_close(jamp.master_params(after), weights)
        assert_close(inner(after), state, atol=1e-9)


@pytest.mark.parametrize("name, kept", EMULATED)
def test_backends_agree(name, kept):
    for a, b in zip(*(run(name, kept, x).states for x in BACKENDS), strict=True):
        assert_close(jamp.master_params(a), jamp.master_params(b))
        assert_close(inner(a), inner(b), atol=1e-9)


@pytest.mark.parametrize("name, kept", [("adam", "masters"), ("lamb", "bare")])
def test_norms_are_clipped_unscaled_whatever_the_scale(name, kept):
    case = CASES[name]
    after = []
    for scale in (2.0**2, 2.0**8):
        state = run(name, kept, "xla").states[0].replace(seen=None)
        (old,) = state.loss_scales
        state = state.replace(loss_scales=(old._replace(scale=F32(scale)),))
        # Multiples of 2^-6 below 1: neither scale makes a half round them.
        x = {k: np.round(g * 64) / 64 for k, g in gradients(0).items()}
        after.append(step(state, x))
    assert_same_bits(after[0].params, after[1].params)
    assert_same_bits(after[0].opt_state, after[1].opt_state)
    norm = np.sqrt(sum(np.square(g).sum() for g in flat64(x)))
    mu = jax.tree.leaves(inner(after[0]).mu)
    clip = case.options.get("max_grad_norm", 1.0)
    np.testing.assert_allclose(
        np.float64(mu[0]), flat64(x)[0] * (0.1 * clip / norm), 1e-5
    )
