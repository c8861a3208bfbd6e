"""Time of an optimizer step at O5: jamp's fused Adam and the optax chain.

A GPU runs the trees of real models, and a CPU runs small ones. On a GPU, a program runs
32 steps, because passing a thousand arrays to JAX takes longer than one step. A
training step passes them only once. The host waits once per round. The gradients are
finite, so no step is skipped. Each step includes the check.
"""

import functools
import itertools
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.optimizer_steps import (
    HALF,
    LEARNING_RATE,
    PARAM_SIZE,
    chained,
    jamp_fused,
    names,
    optax_chain,
    run_jitted,
)
from benchmarks.specs import gpu_specs, small_specs
from pallas_kernels._run import BackendError, check_device

ON_GPU = jax.default_backend() == "gpu"
SECONDS = 1.5 if ON_GPU else 0.5  # per contestant
IN_A_PROGRAM = 32 if ON_GPU else 1  # steps
LONGEST_CHAIN, SHORTEST_ROUND = 32, 0.05
COPIED = 2**30  # bytes

SPECS = gpu_specs() if ON_GPU else small_specs()


def backends():
    """Returns the backends of this device, without the interpreter."""
    try:
        check_device("mosaic")
        return ["xla", "mosaic"]
    except BackendError:
        return ["xla"]


def contestants():
    narrow = {"backend": "xla", "moment_dtype": "8bit"}
    jitted = {
        "optax chain": optax_chain,
        "jamp fused, 8 bits": functools.partial(jamp_fused, **narrow),
    }
    for backend in backends():
        jitted[f"jamp fused, {backend}"] = functools.partial(
            jamp_fused, backend=backend
        )
    return jitted


JITTED = contestants()


@pytest.mark.skipif(not ON_GPU, reason="on a CPU fresh pages take most of the time")
def test_copy(benchmark):
    """Measures the bandwidth of a copy: bytes read plus bytes written."""
    source = jax.device_put(_noise((COPIED // 4,)))
    copy = jax.jit(jnp.copy)
    target = copy(source)
    assert target.unsafe_buffer_pointer() != source.unsafe_buffer_pointer()

    def step():
        nonlocal target
        target = copy(target)

    benchmark.group = "copy"
    benchmark.extra_info |= {"contestant": "copy", "bytes": 2 * source.nbytes}
    _time(benchmark, step, lambda: target.block_until_ready())


@pytest.fixture(scope="module", params=SPECS, ids=lambda spec: spec.name)
def inputs(request):
    """Returns a spec, its float32 params and raw gradients."""
    spec = request.param
    params, grads = {}, {}
    for name, shape in zip(names(spec), spec.shapes, strict=True):
        params[name] = jax.device_put(_noise(shape, PARAM_SIZE))
        dtype = jnp.float32 if "fp32" in name else HALF
        grads[name] = jax.device_put(_noise(shape, dtype=dtype))
    return spec, params, grads


@pytest.mark.parametrize("contestant", JITTED)
def test_optimizer_step(benchmark, inputs, contestant):
    spec, params, grads = inputs
    made = JITTED[contestant](spec)
    step = jax.jit(chained(made.step, IN_A_PROGRAM), donate_argnums=0)
    running = run_jitted(made, jax.jit(made.init), step, params, grads, IN_A_PROGRAM)

    running.call()
    drift = made.error * LEARNING_RATE * IN_A_PROGRAM
    first = {"rtol": 2**-8, "atol": 1e-7 + drift}  # rounded to bfloat16
    np.testing.assert_allclose(running.row(), running.first_row, **first)

    benchmark.group = spec.name
    benchmark.extra_info |= {
        "contestant": contestant,
        "spec": spec.name,
        "leaves": len(spec.shapes),
        "parameters": spec.total,
        "bytes": running.bytes_moved,
    }
    _time(benchmark, running.call, running.wait, running.steps)
    assert running.is_clean()
    assert np.isfinite(running.row()).all()


def _time(benchmark, call, wait, steps=1):
    """Times rounds of several calls, which end by waiting for the device.

    A call runs several steps. The time is per step.
    """
    _seconds(call, wait, 2)
    one = _seconds(call, wait, 3)[1] / 3
    calls = min(max(math.ceil(SHORTEST_ROUND / one), 1), LONGEST_CHAIN)
    rounds = min(max(int(SECONDS / (one * calls)), 5), 50)
    # If the host takes as long as the device, the device waits for the host.
    host, both = _seconds(call, wait, calls)
    benchmark.extra_info |= {"steps": calls * steps, "host_share": host / both}
    count = itertools.count(1)

    def step_and_wait():
        done = next(count)
        if done % steps == 0:
            call()
        if done % (calls * steps) == 0:
            wait()

    benchmark.pedantic(
        step_and_wait, rounds=rounds, iterations=calls * steps, warmup_rounds=1
    )


def _seconds(call, wait, calls):
    """Times `calls` calls, until the host has issued them and until they are done."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter() - start
    wait()
    return host, time.perf_counter() - start


def _noise(shape, size=1.0, dtype=jnp.float32):
    """Repeats 2**20 normal numbers, because fresh ones would take minutes."""
    return np.resize(_block(size, dtype), shape)


@functools.cache
def _block(size, dtype):
    noise = np.random.default_rng(0).standard_normal(2**20, np.float32)
    return (size * noise).astype(dtype)
