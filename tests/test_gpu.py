"""Guards `make gpu`: JAX falls back to the CPU in silence where CUDA does not start."""

import jax
import pytest


@pytest.mark.gpu
def test_gpu_run_is_on_a_gpu():
    assert jax.default_backend() == "gpu"
