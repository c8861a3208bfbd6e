"""Time of an optimizer step at O5: jamp's fused Adam, the optax chain, torch's AdamW.

On a GPU the trees are those of real models; on a CPU they are small. Steps are chained
on the device, 32 to a program: to hand JAX a thousand arrays takes the host longer than
a GPU takes for the step, and a training step hands them over once, with the model. The
host waits once per round. Gradients are finite, so every step is taken; the check for
that is in the time of each. Compiling is not: all programs are compiled first, side by
side.
"""

import functools
import itertools
import math
import os
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.optimizer_steps import (
    HALF,
    PARAM_SIZE,
    chained,
    jamp_fused,
    names,
    optax_chain,
    run_jitted,
    run_torch,
)
from benchmarks.specs import full_specs, rehearsal_specs, small_specs, tiny_leaves
from pallas_kernels._run import BackendError, check_device

ON_GPU = jax.default_backend() == "gpu"
REHEARSES = os.environ.get("JAMP_GPU") == "rehearse"
SECONDS = 1.5 if ON_GPU else 0.5  # of timing, for each
IN_A_PROGRAM = 32 if ON_GPU else 1  # steps
LONGEST_CHAIN, SHORTEST_ROUND = 32, 0.05
COPIED = 2**30  # bytes

# XLA takes minutes to compile the chain on 2,000 leaves, and more than in proportion;
# tracing hundreds of leaves once more for a variant takes its time too.
MOST_LEAVES, MOST_LEAVES_OF_VARIANT = 1000, 300
VARIANT = "16-bit remainder"
SPECS = (*full_specs(), tiny_leaves(500)) if ON_GPU else small_specs()
SPECS = rehearsal_specs() if REHEARSES else SPECS

pytestmark = pytest.mark.filterwarnings("default")  # torch's are not ours to mend


def backends():
    """Those that run here, but for the interpreter, which is for finding errors.

    In a rehearsal it stands in for Mosaic.
    """
    if REHEARSES:
        return ["xla", "mosaic"]
    try:
        check_device("mosaic")
        return ["xla", "mosaic"]
    except BackendError:
        return ["xla"]


def contestants():
    jitted = {"optax chain": optax_chain}
    for backend in backends():
        runs = "interpret" if REHEARSES and backend == "mosaic" else backend
        fused = functools.partial(jamp_fused, backend=runs)
        jitted[f"jamp fused, {backend}"] = fused
        low = functools.partial(fused, store_remainder=True)
        jitted[f"jamp fused, {backend}, {VARIANT}"] = low
    return jitted


JITTED = contestants()
TORCH = "torch fused AdamW"


@pytest.mark.skipif(not ON_GPU, reason="on a CPU fresh pages take most of the time")
def test_copy(benchmark):
    """The bandwidth that others are measured against, bytes read plus bytes written."""
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
    """A spec, and params and raw gradients of it; params are float32."""
    spec = request.param
    params, grads = {}, {}
    for name, shape in zip(names(spec), spec.shapes, strict=True):
        params[name] = jax.device_put(_noise(shape, PARAM_SIZE))
        dtype = jnp.float32 if "fp32" in name else HALF
        grads[name] = jax.device_put(_noise(shape, dtype=dtype))
    return spec, params, grads


@pytest.mark.parametrize("contestant", [*JITTED, TORCH])
def test_optimizer_step(benchmark, inputs, contestant, programs, time_left, request):
    spec, params, grads = inputs
    if _is_slow(spec, contestant) and not request.config.getoption("--all-specs"):
        pytest.skip("slow to trace or to compile: --all-specs")
    if time_left() == 0:
        pytest.skip("after the deadline")
    if contestant == TORCH:
        running = _start_torch(spec)
    else:
        compiled = programs.get((spec, contestant))
        if compiled is None or not all(program.done() for program in compiled):
            pytest.skip("not compiled by the deadline")
        functions = [program.result() for program in compiled]
        running = run_jitted(
            JITTED[contestant](spec), *functions, params, grads, IN_A_PROGRAM
        )

    running.call()
    first = {"rtol": 2**-8, "atol": 1e-7}  # rounded to bfloat16
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


def _start_torch(spec):
    torch = pytest.importorskip("torch", exc_type=ImportError)
    if ON_GPU and not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    if ON_GPU:
        torch.cuda.empty_cache()
    return run_torch(spec, "cuda" if ON_GPU else "cpu")


def _is_slow(spec, contestant):
    most = MOST_LEAVES_OF_VARIANT if VARIANT in contestant else MOST_LEAVES
    return len(spec.shapes) > most


@pytest.fixture(scope="session")
def programs(request, time_left):
    """Per cell, the compiled `init` and `step`, as futures.

    A step on hundreds of leaves compiles for half a minute on one core. Compiled one
    after another they would take longer than all the timing.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    compiling = {}
    for spec, contestant in _cells(request):
        if time_left() == 0:
            break
        try:
            lowered = _lower(spec, JITTED[contestant](spec))
            programs = [pool.submit(program.compile) for program in lowered]
        except Exception as error:
            programs = [Future()]
            programs[0].set_exception(error)
        compiling[spec, contestant] = programs
    wait([p for pair in compiling.values() for p in pair], timeout=time_left())
    pool.shutdown(wait=False, cancel_futures=True)
    return compiling


def _cells(request):
    """The pairs of spec and jitted contestant that this session is to time."""
    every = request.config.getoption("--all-specs")
    for item in request.session.items:
        if item.originalname == test_optimizer_step.__name__:
            spec, contestant = (
                item.callspec.params[k] for k in ("inputs", "contestant")
            )
            if contestant in JITTED and (every or not _is_slow(spec, contestant)):
                yield spec, contestant


def _lower(spec, contestant):
    leaves = list(zip(names(spec), spec.shapes, strict=True))
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in leaves}
    grads = {
        name: jax.ShapeDtypeStruct(s, jnp.float32 if "fp32" in name else HALF)
        for name, s in leaves
    }
    init = jax.jit(contestant.init).lower(params)
    state = jax.eval_shape(contestant.init, params)
    steps = chained(contestant.step, IN_A_PROGRAM)
    return init, jax.jit(steps, donate_argnums=0).lower(state, grads)


def _time(benchmark, call, wait, steps=1):
    """Times rounds of several calls, each with the wait for the device at its end.

    A call is of several steps. What is timed is a step.
    """
    _seconds(call, wait, 2)
    one = _seconds(call, wait, 3)[1] / 3
    calls = min(max(math.ceil(SHORTEST_ROUND / one), 1), LONGEST_CHAIN)
    rounds = min(max(int(SECONDS / (one * calls)), 5), 50)
    # Where the host takes as long as both, it holds the device up.
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
    """Of so many calls: until the host has issued them, and until they are done."""
    start = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter() - start
    wait()
    return host, time.perf_counter() - start


def _noise(shape, size=1.0, dtype=jnp.float32):
    """Normal numbers that come round every 2**20: made anew they would take minutes."""
    return np.resize(_block(size, dtype), shape)


@functools.cache
def _block(size, dtype):
    noise = np.random.default_rng(0).standard_normal(2**20, np.float32)
    return (size * noise).astype(dtype)
