"""Time of an optimizer step at O5: jamp's fused Adam, the optax chain, torch's AdamW.

On a GPU the trees are those of real models; on a CPU they are small. Steps are chained
on the device, and the host waits once per round. Gradients are finite, so every step is
taken; the check for that is in the time of each. Compiling is not: all programs are
compiled first, side by side.
"""

import functools
import math
import os
import statistics
import time
from concurrent.futures import Future, ThreadPoolExecutor, wait

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import optimizer_steps
from benchmarks.optimizer_steps import HALF, names
from benchmarks.specs import full_specs, small_specs, tiny_leaves
from pallas_kernels._backend import BackendError, resolve

ON_GPU = jax.default_backend() == "gpu"
SECONDS = 1.5 if ON_GPU else 0.5  # of timing, for each
LONGEST_CHAIN, SHORTEST_ROUND = 32, 0.05
COPIED = 2**30 if ON_GPU else 2**26

# XLA takes minutes to compile the chain on 2,000 leaves, and more than in proportion.
SLOW_TO_COMPILE = 1000
SPECS = (*full_specs(), tiny_leaves(1000)) if ON_GPU else small_specs()

pytestmark = pytest.mark.filterwarnings("default")  # torch's are not ours to mend


def backends():
    """Those that run here, but for the interpreter, which is for finding errors."""
    try:
        return ["xla", resolve("mosaic")]
    except BackendError:
        return ["xla"]


def contestants():
    jitted = {"optax chain": optimizer_steps.optax_chain}
    for backend in backends():
        fused = functools.partial(optimizer_steps.jamp_fused, backend=backend)
        jitted[f"jamp fused, {backend}"] = fused
        low = functools.partial(fused, store_remainder=True)
        jitted[f"jamp fused, {backend}, 16-bit remainder"] = low
    return jitted


JITTED = contestants()
TORCH = "torch fused AdamW"


def test_copy(benchmark):
    """The bandwidth that others are measured against, bytes read plus bytes written."""
    source = jax.device_put(_noise((COPIED // 4,)))
    copy = jax.jit(jnp.copy)

    def run(steps):
        start = time.perf_counter()
        target = source
        for _ in range(steps):
            target = copy(target)
        host = time.perf_counter() - start
        target.block_until_ready()
        return host

    benchmark.group = "copy"
    assert copy(source).unsafe_buffer_pointer() != source.unsafe_buffer_pointer()
    _time(benchmark, run, contestant="copy", bytes=2 * source.nbytes)


@pytest.fixture(scope="module", params=SPECS, ids=lambda spec: spec.name)
def inputs(request):
    """Params and raw gradients of a spec; params are float32."""
    spec = request.param
    if len(spec.shapes) > SLOW_TO_COMPILE and not request.config.getoption(
        "--all-specs"
    ):
        pytest.skip("slow to compile: --all-specs")
    leaves = zip(names(spec), spec.shapes, strict=True)
    params, grads = {}, {}
    for name, shape in leaves:
        noise = _noise(shape)
        params[name] = jax.device_put(0.02 * noise)
        grads[name] = jax.device_put(noise if "fp32" in name else noise.astype(HALF))
    return spec, params, grads


@pytest.mark.parametrize("contestant", [*JITTED, TORCH])
def test_optimizer_step(benchmark, inputs, contestant, programs, time_left):
    spec, params, grads = inputs
    if time_left() == 0:
        pytest.skip("after the deadline")
    name = names(spec)[0]
    expected = optimizer_steps.first_step(
        *(np.asarray(tree[name], np.float32) for tree in (params, grads))
    )
    start = _start_torch if contestant == TORCH else _start_jitted
    run, first_param, is_clean, moved = start(
        programs, (spec, contestant), params, grads
    )
    run(1)
    np.testing.assert_allclose(first_param(), expected, rtol=2**-7, atol=1e-7)

    benchmark.group = spec.name
    _time(
        benchmark,
        run,
        contestant=contestant,
        spec=spec.name,
        leaves=len(spec.shapes),
        parameters=spec.total,
        bytes=moved,
    )
    assert is_clean()
    assert np.isfinite(first_param()).all()


def _start_jitted(programs, cell, params, grads):
    spec, name = cell
    contestant = JITTED[name](spec)
    for program in programs[cell]:
        if not program.done():
            pytest.skip("still compiling at the deadline")
    init, step = (program.result() for program in programs[cell])
    state = init(params)

    def run(steps):
        nonlocal state
        start = time.perf_counter()
        for _ in range(steps):
            state = step(state, grads)
        host = time.perf_counter() - start
        state.step.block_until_ready()  # outputs of one program are ready together
        return host

    def first_param():
        return np.asarray(contestant.params(state)[names(spec)[0]], np.float32)

    return run, first_param, lambda: state.skipped_steps == 0, contestant.bytes_moved


def _start_torch(programs, cell, params, grads):
    del programs
    spec, _ = cell
    torch = pytest.importorskip("torch", exc_type=ImportError)
    if ON_GPU and not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    torch.cuda.empty_cache()
    run, first_param, scale = optimizer_steps.torch_adamw(
        "cuda" if ON_GPU else "cpu",
        (0.02 * _noise(shape) for shape in spec.shapes),
        (_noise(shape) for shape in spec.shapes),
        [k not in spec.fp32 for k in range(len(spec.shapes))],
    )
    moved = optimizer_steps.least_bytes(spec)
    return run, first_param, lambda: scale() >= optimizer_steps.SCALE, moved


@pytest.fixture(scope="session")
def programs(request, time_left):
    """Per cell, the compiled `init` and `step`, as futures.

    A step on hundreds of leaves compiles for half a minute on one core. Compiled one
    after another they would take longer than all the timing.
    """
    pool = ThreadPoolExecutor(os.cpu_count())
    compiling = {}
    for spec, contestant in _cells(request):
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
            cell = item.callspec.params
            spec, contestant = cell["inputs"], cell["contestant"]
            if contestant in JITTED and (every or len(spec.shapes) <= SLOW_TO_COMPILE):
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
    return init, jax.jit(contestant.step, donate_argnums=0).lower(state, grads)


def _time(benchmark, run, **what):
    """Rounds of `steps` chained steps; about `SECONDS` in all."""
    run(2)
    start = time.perf_counter()
    run(3)
    one = (time.perf_counter() - start) / 3
    steps = min(max(math.ceil(SHORTEST_ROUND / one), 1), LONGEST_CHAIN)
    rounds = min(max(int(SECONDS / (one * steps)), 5), 50)
    host = []
    benchmark.pedantic(lambda: host.append(run(steps)), rounds=rounds, warmup_rounds=1)
    # If the host took about as long as the round, the device waited for it.
    in_host = statistics.median(host) / steps
    benchmark.extra_info |= what | {"steps": steps, "host_seconds": in_host}


@functools.cache
def _block():
    return np.random.default_rng(0).standard_normal(2**20, np.float32)


def _noise(shape):
    """Normal numbers that come round every 2**20: made anew they would take minutes."""
    return np.resize(_block(), shape)
