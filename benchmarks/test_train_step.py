"""Time of a training step of GPT-2: Flax alone, by hand, each level, and torch.amp.

The model has 124 million parameters on a GPU, and fewer on a CPU.
"""

import jax
import pytest

from benchmarks.training_steps import FULL, JITTED, SMALL, TORCH, jitted, torch_step

ON_GPU = jax.default_backend() == "gpu"
SIZE = FULL if ON_GPU else SMALL


@pytest.mark.parametrize("who", [*JITTED, *TORCH])
@pytest.mark.filterwarnings("default")  # torch's warnings
def test_train_step(benchmark, who):
    run = start_torch(who) if who in TORCH else start(who)
    first = run()
    losses = [run() for _ in range(3)]
    benchmark(run)
    benchmark.extra_info |= {"contestant": who, "peak_bytes": peak_bytes(who)}
    assert losses[-1] < first


def peak_bytes(who):
    """Returns the peak memory of the GPU's allocator, or None on a CPU."""
    if ON_GPU and who in TORCH:
        import torch

        return torch.cuda.max_memory_allocated()
    stats = jax.local_devices()[0].memory_stats()
    return stats and stats["peak_bytes_in_use"]


def start(who):
    init, step = jitted(who, SIZE)
    state, tokens = jax.jit(init)(), jax.device_put(SIZE.tokens)
    step = jax.jit(step, donate_argnums=0)

    def run():
        nonlocal state
        state, loss = step(state, tokens)
        return float(loss)  # waits for the device

    return run


def start_torch(who):
    torch = pytest.importorskip("torch", exc_type=ImportError)
    if ON_GPU and not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    return torch_step(who, SIZE, "cuda" if ON_GPU else "cpu")
