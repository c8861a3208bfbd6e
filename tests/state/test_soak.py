"""Test a long run with random overflows: memory, compilations and counters."""

import collections
import dataclasses
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
import jamp.nnx
from tests.oracles import loss_scale as oracle
from tests.support.states import State, wide

pytestmark = pytest.mark.slow

STEPS = int(os.environ.get("JAMP_SOAK", 40))
EVERY = STEPS // 20
WARM = STEPS // 10  # steps until the allocator's buffers have their size

# At these scales only the bad batches overflow.
SETTINGS = {"init_scale": 2.0**10, "window": 25, "min_scale": 2.0**4}
SETTINGS |= {"max_scale": 2.0**12, "hysteresis": 2}
RULE = oracle.Rule(**SETTINGS)
OPTIONS = {"loss_scale": jamp.DynamicLossScale(**SETTINGS), "verbosity": 0}
OPTIONS["opt_level"] = "O2"
RNG = np.random.default_rng(0)
X = RNG.normal(size=(8, 8, 16)).astype(np.float32)  # eight batches
BAD = RNG.random(STEPS) < 0.1
ADAM = optax.adam(1e-3)


@jax.jit
def step(state, x):
    loss_fn = lambda p: (wide(x.astype(p["w"].dtype) @ p["w"]) ** 2).mean()  # noqa: E731
    ema = jamp.incremental_update(state, state.ema, 0.1)
    return state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state), ema=ema)


def megabytes():
    pages = pathlib.Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20


def counters(state):
    return tuple(map(float, (*state.loss_scales[0], state.step, state.skipped_steps)))


@pytest.mark.standard_promotion
def test_nothing_grows_and_counters_are_exact():
    compiled = collections.Counter()

    def listen(event, _, **__):
        compiled[event.endswith("backend_compile_duration")] += 1

    params = {"w": jnp.full((16, 1), 0.1)}
    state = jamp.initialize(params, ADAM, state_class=State, ema=params, **OPTIONS)
    model, taken, memory, arrays = oracle.init(RULE), 0, [], []
    begun = time.monotonic()
    for i, bad in enumerate(BAD):
        state = step(state, X[i % 8] * np.float32(np.inf if bad else 1))
        model = oracle.update(RULE, model, not bad)
        taken += not bad
        if i % EVERY == 0:
            model = dataclasses.replace(model, hysteresis=max(model.hysteresis, 0))
            expected = (*dataclasses.astuple(model), taken, i + 1 - taken)
            assert counters(state) == expected
            if i >= WARM:
                memory.append(megabytes())
                arrays.append(len(jax.live_arrays()))
            if i == 0:
                jax.monitoring.register_event_duration_secs_listener(listen)
    jax.monitoring.unregister_event_duration_listener(listen)
    print(
        f"\n{STEPS} steps, {BAD.sum()} skipped, scales exact, "
        f"{compiled[True]} compilations after the first step, live arrays "
        f"{arrays[0]} to {arrays[-1]}, memory {memory[0]:.1f} to {memory[-1]:.1f} MiB "
        f"(largest {max(memory):.1f}), {time.monotonic() - begun:.0f} s"
    )
    assert compiled[True] == 0
    assert len(set(arrays)) == 1
    assert memory[-1] - memory[0] < 4
