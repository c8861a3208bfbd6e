"""Test the modules that `import jamp` and a step load. As a module, run a step."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

import jamp
from tests.support import subprocesses

LATE = (
    "jax.experimental.pallas.mosaic_gpu",
    "jamp.diagnostics",
    "jamp.fp16_utils",
    "jamp.nnx",
)


@pytest.mark.slow
def test_a_step_loads_neither_pallas_nor_unused_packages():
    imported, stepped, used = json.loads(subprocesses.run("tests.project.test_import"))
    assert imported == stepped == []
    assert used == list(LATE)


def loaded():
    return [name for name in LATE if name in sys.modules]


def step(backend):
    tx = jamp.optimizers.fused_adam(1e-3, backend=backend)
    state = jamp.initialize({"w": jnp.ones(200)}, tx, opt_level="O2", verbosity=0)
    grads = jamp.scaled_grad(lambda params: params["w"].sum())(state)
    return jax.eval_shape(lambda s: s.apply_gradients(grads=grads), state)


if __name__ == "__main__":
    found = [loaded()]
    step("xla")
    found.append(loaded())
    step("interpret")
    assert all(getattr(jamp, name) for name in ("explain", "fp16_utils", "nnx"))
    print(json.dumps([*found, loaded()]))
