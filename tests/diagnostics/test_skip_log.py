"""Test that `SkipLog` records skipped steps and the gradients that overflowed."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jamp
import jamp.nnx
from benchmarks import h200
from jamp.diagnostics import SkipLog
from tests.support.states import make

N = 40  # more leaves than a word has bits
NAMES = [f"w{i:02}" for i in range(N)]


def begin():
    params = {name: jnp.ones(2) for name in NAMES}
    rule = jamp.DynamicLossScale(2.0**10)
    return make("O2", params, optax.sgd(0.0), loss_scale=rule)


def loss_fn(params, x):
    """Returns a loss whose gradients are `x`, one number per leaf."""
    pairs = zip(jax.tree.leaves(params), x, strict=True)
    return sum((p.astype(jnp.float32).sum() * g for p, g in pairs), jnp.float32(0))


@functools.partial(jax.jit, donate_argnums=(0, 1))
def step(state, log, x):
    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
    log = log.add(state, loss, grads)
    return state.apply_gradients(grads=grads), log, loss


def run(*bad, size=16):
    """Runs one step per tuple of indices, in which these leaves overflow."""
    state = begin()
    log = SkipLog.of(state, size)
    for places in bad:
        x = np.ones(N, np.float32)
        x[list(places)] = 1e4
        state, log, _ = step(state, log, x)
    return log


def test_the_last_skips_are_kept_with_their_leaves():
    skips = [(), (0,), (31, 32), (), (39,), tuple(range(N))]
    log = run(*skips)
    found = log.skips()
    expected = [(1, 2.0**10, (0,)), (1, 2.0**9, (31, 32)), (2, 2.0**8, (39,))]
    expected.append((2, 2.0**7, tuple(range(N))))
    assert [(s["step"], s["scale"], s["params"]) for s in found] == [
        (step, scale, [NAMES[i] for i in places]) for step, scale, places in expected
    ]
    assert found[0]["loss"] == 2 * (N - 1) + 2e4
    log = run(*skips, size=3)
    assert int(log.count) == 4 and log.skips() == found[1:]
    assert run((), ()).skips() == []


@pytest.mark.h200
@pytest.mark.standard_promotion
def test_a_log_reads_the_gradients_once_more():
    model = nn.Sequential([nn.Dense(1024) for _ in range(4)])
    x = jax.ShapeDtypeStruct((256, 1024), jnp.float32)
    params = jax.eval_shape(model.init, jax.random.key(0), x)["params"]
    options = {"apply_fn": model.apply, "verbosity": 0}
    start = functools.partial(jamp.initialize, tx=optax.adam(1e-3), **options)
    state = jax.eval_shape(lambda p: start(p, opt_level="O2"), params)
    log = jax.eval_shape(SkipLog.of, state)

    def step(state, log, x):
        def loss_fn(params, x):
            return (state.apply_fn({"params": params}, x) ** 2).mean()

        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
        log = None if log is None else log.add(state, loss, grads)
        return state.apply_gradients(grads=grads), log, loss

    off, on = (
        h200.compile_step(step, state, this, x, donate=(0, 1)) for this in (None, log)
    )
    halves = 2 * sum(x.size for x in jax.tree.leaves(params))
    assert off.traffic <= on.traffic <= 1.001 * off.traffic + halves
    assert on.temp <= 1.01 * off.temp


def test_a_log_of_nnx():
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    model, optimizer = jamp.nnx.initialize(model, optax.sgd(0.0), "O2", verbosity=0)
    log = SkipLog.of(optimizer.amp_state(model))

    @nnx.jit
    def step(model, optimizer, log, x):
        loss_fn = lambda model: model.bias[...].sum() * x  # noqa: E731
        loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer)
        log = log.add(optimizer, loss, grads)
        optimizer.update(model, grads)
        return log

    for x in (0.5, 2.0, 1.0):
        log = step(model, optimizer, log, x)
    expected = {"step": 1, "loss": 0.0, "scale": 2.0**16, "params": ["bias"]}
    assert log.skips() == [expected] and int(log.count) == 1


def test_bad_sizes_and_other_states_are_refused():
    state = begin()
    one = make("O2", {"w00": jnp.ones(2)})
    _, grads = jamp.scaled_value_and_grad(loss_fn)(state, np.ones(N, np.float32))
    with pytest.raises(ValueError, match="`size` must be at least 1, got 0"):
        SkipLog.of(state, 0)
    with pytest.raises(ValueError, match="w01, w02, w03 differ"):
        SkipLog.of(one).add(state, jnp.float32(0), grads)


def test_a_loss_that_is_not_finite_names_no_leaf():
    state = begin()
    hidden = lambda p, x: jnp.abs(loss_fn(p, jnp.ones(N)) + x)  # noqa: E731

    @jax.jit
    def hidden_step(state, log, x):
        loss, grads = jamp.scaled_value_and_grad(hidden)(state, x)
        return log.add(state, loss, grads)

    log = hidden_step(state, SkipLog.of(state), jnp.float32(np.nan))
    (skip,) = log.skips()
    assert np.isnan(skip["loss"]) and skip["params"] == []
