"""`jamp.diagnostics.cost`: bytes derived by hand, where they are moved, and errors."""

import functools
import importlib.util
import os

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from jamp.diagnostics import _gpus, cost
from jamp.diagnostics._command import main

pytestmark = [pytest.mark.standard_promotion, pytest.mark.h200]

X = jax.ShapeDtypeStruct((512, 512), jnp.float32)
BYTES = 512 * 512 * 4


def add(state, x):
    with jax.named_scope("head"):
        return state + jnp.sin(x), x[0, 0]


def test_bytes_by_hand():
    found = cost(add, X, X).steps["step"]
    # One kernel reads both and writes the sum; one copies a number.
    assert found.kernels in (1, 2) and found.temp == 0
    assert abs(found.traffic - 3 * BYTES) <= 16
    part = found.parts[0]
    line = add.__code__.co_firstlineno + 2
    assert (part.module, part.source) == ("head", f"{__file__}:{line}")
    assert part.largest == BYTES and abs(part.traffic - 3 * BYTES) <= 16
    half = jax.ShapeDtypeStruct(X.shape, jnp.float16)
    both = cost(add, {"wide": X, "half": half}, half, target="B200")
    wide, narrow = both.steps.values()
    assert abs(wide.traffic - 2.5 * BYTES) <= 16  # 4 + 2 + 4 bytes
    assert abs(narrow.traffic - 1.5 * BYTES) <= 16
    head, first, second, *rest = str(both).splitlines()
    assert head.startswith("on B200") and "2.62 MB (100%)" in first
    assert "1.57 MB  (60%)" in second
    assert rest[1].endswith(f"head tests/test_cost.py:{line}")


MODEL = nn.Dense(256)


def state(level):
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    params = jax.eval_shape(MODEL.init, jax.random.key(0), x)["params"]
    options = {"opt_level": level, "apply_fn": MODEL.apply, "verbosity": 0}
    begin = functools.partial(jamp.initialize, tx=optax.adam(1e-3), **options)
    return jax.eval_shape(begin, params)


def train_step(state, x):
    def loss_fn(params, x):
        return (state.apply_fn({"params": params}, x) ** 2).mean()

    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
    return state.apply_gradients(grads=grads), loss


def costs():
    """What the command is pointed at."""
    x = jax.ShapeDtypeStruct((64, 256), jnp.float32)
    return train_step, {"O0": state("O0"), "O5": state("O5")}, x


def test_levels_side_by_side(capsys):
    assert main(["cost", "tests.test_cost:costs"]) == 0
    printed = capsys.readouterr().out
    step, states, x = costs()
    found = cost(step, states, x)
    assert printed == f"{found}\n" and list(found.steps) == ["O0", "O5"]
    weights = 256 * 257
    # Adam reads and writes the moments and the params, and reads the gradients.
    for name, size in (("O0", 4 * 7), ("O5", 4 * 6 + 2 + 2)):
        adam = [p for p in found.steps[name].parts if p.source.startswith(__file__)]
        assert sum(p.traffic for p in adam) >= size * weights
    assert any(p.module == "Dense" for p in found.steps["O5"].parts)
    assert main(["cost", "tests.test_cost:costs", "--gpu", "A100"]) == 2
    assert "`target` must be 'H200' or 'B200', got 'A100'" in capsys.readouterr().err


def test_what_is_missing(monkeypatch):
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    with pytest.raises(
        ImportError, match="Set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before"
    ):
        _gpus.check_compiler()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'jax\[cuda13-local\]=="):
        cost(add, X, X)
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ
