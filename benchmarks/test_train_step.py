"""Time of a training step of GPT-2: Flax alone, by hand, each level, and torch.amp.

The sizes are real on a GPU, and small on a CPU.
"""

import jax
import pytest

from benchmarks.training_steps import JITTED, SIZES, TORCH, jitted, torch_step

ON_GPU = jax.default_backend() == "gpu"
FUSED = "cudnn" if ON_GPU else "xla"


@pytest.mark.parametrize("who", [*JITTED, *TORCH])
@pytest.mark.parametrize("name", SIZES)
@pytest.mark.filterwarnings("default")  # torch's warnings
def test_train_step(benchmark, name, who):
    size = SIZES[name] if ON_GPU else SIZES[name].small()
    run = start_torch(who, size) if who in TORCH else start(who, size)
    first = run()
    losses = [run() for _ in range(3)]
    benchmark(run)
    half, fp8 = size.flops(who)
    benchmark.extra_info |= {
        "contestant": who,
        "size": name,
        "tokens": size.batch * size.length,
        "half_flops": half,
        "fp8_flops": fp8,
        "peak_bytes": peak_bytes(who),
    }
    assert losses[-1] < first


def peak_bytes(who):
    """Returns the peak memory of the GPU's allocator, or None on a CPU."""
    if ON_GPU and who in TORCH:
        import torch

        return torch.cuda.max_memory_allocated()
    stats = jax.local_devices()[0].memory_stats()
    return stats and stats["peak_bytes_in_use"]


def start(who, size):
    init, step = jitted(who, size, FUSED)
    state, tokens = jax.jit(init)(), jax.device_put(size.tokens)
    step = jax.jit(step, donate_argnums=0)

    def run():
        nonlocal state
        state, loss = step(state, tokens)
        return float(loss)  # waits for the device

    return run


def start_torch(who, size):
    torch = pytest.importorskip("torch", exc_type=ImportError)
    if ON_GPU and not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    return torch_step(who, size, "cuda" if ON_GPU else "cpu")
