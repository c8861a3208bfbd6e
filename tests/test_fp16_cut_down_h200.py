"""What a step of the cut-down FP16_Optimizer moves and launches on an H200."""

import jax
import jax.numpy as jnp
import pytest

from jamp.optimizers import FP16_Optimizer, fused_adam
from tests import h200

pytestmark = pytest.mark.h200

LEAVES, SIZE = 50, 2**16


def compiled(backend, **options):
    """A step of flat buffers that are donated, of 50 leaves in all."""
    tx = fused_adam(legacy=True, backend=backend, **options)
    optimizer = FP16_Optimizer(tx, dynamic_loss_scale=True, verbose=False)
    params = {f"w{i:02}": jnp.ones(SIZE, jnp.float16) for i in range(LEAVES)}
    state = jax.eval_shape(optimizer.init, params)

    def step(state, grads):
        return optimizer.zero_grad(optimizer.step(state.replace(grads=grads)))

    return h200.compile_step(step, state, state.fp16_flat, donate=(0,))


@pytest.mark.parametrize(
    "backend, options, at_most",
    [
        ("mosaic", {}, 30.1),
        ("xla", {}, 30.1),
        ("mosaic", {"max_grad_norm": 1.0}, 32.1),  # clipping reads the gradients, too
    ],
    ids=["mosaic", "xla", "clipped"],
)
def test_a_step_is_one_pass_over_one_buffer(backend, options, at_most):
    program = compiled(backend, **options)
    # The half buffer goes into the kernel to be written, and nothing of it is read.
    unread = 2 * LEAVES * SIZE if backend == "mosaic" else 0
    moved = (program.traffic - unread) / (LEAVES * SIZE)
    assert moved <= at_most
    assert program.kernels <= 20  # most of them on scalars
    assert program.temp < 0.01 * LEAVES * SIZE
    assert all(size <= 4 for size in program.copies)
