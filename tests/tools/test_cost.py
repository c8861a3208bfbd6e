"""`jamp.diagnostics.cost`: bytes derived by hand, where they are moved, and errors."""

import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jamp.diagnostics import cost
from jamp.tools import _cost
from jamp.tools._command import main

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


def test_products_and_collectives_by_dtype():
    mesh = AbstractMesh((4, 2), ("data", "model"))

    def shape(size, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=sharding)

    def step(w, x):
        layer = lambda x, w: (jax.nn.relu(x @ w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(layer, x, w)[0], dtype=jnp.float32)

    w, x = shape((3, 512, 512), None, "data"), shape((4096, 512), "data")
    both = cost(step, w, x, donate=())
    found = both.steps["step"]
    assert found.products == {("bf16", "bf16"): 3}  # once a trip
    shards = 3 * 512 * 512 * 2 // 4
    assert found.collectives == {
        ("all-gather", "bf16"): shards,
        ("all-reduce", "f32"): 4,
    }
    assert "\nstep: products 3 bf16 x bf16\n" in str(both)
    line = "step: a device gives 393 kB of bf16 to all-gather, 4 B of f32 to all-reduce"
    assert line in str(both)


def costs():
    """What the command is pointed at."""
    half = jax.ShapeDtypeStruct(X.shape, jnp.float16)
    return add, {"wide": X, "half": half}, half


def test_states_side_by_side(capsys):
    both = cost(*costs(), target="B200")
    wide, narrow = both.steps.values()
    assert abs(wide.traffic - 2.5 * BYTES) <= 16  # 4 + 2 + 4 bytes
    assert abs(narrow.traffic - 1.5 * BYTES) <= 16
    head, first, second, one, other, *rest = str(both).splitlines()
    assert head.startswith("on B200") and "2.62 MB (100%)" in first
    assert "1.57 MB (60%)" in second
    assert (one, other) == ("wide: products none", "half: products none")
    assert f"head tests/tools/test_cost.py:{add.__code__.co_firstlineno + 2}" in rest[1]
    assert main(["cost", "tests.tools.test_cost:costs", "--gpu", "B200"]) == 0
    assert capsys.readouterr().out == f"{both}\n"
    assert main(["cost", "tests.tools.test_cost:costs", "--gpu", "A100"]) == 2
    assert "`target` must be 'H200' or 'B200', got 'A100'" in capsys.readouterr().err


def test_what_is_missing(monkeypatch):
    monkeypatch.delenv("JAX_SKIP_CUDA_CONSTRAINTS_CHECK")
    words = "Set JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before"
    with pytest.raises(ImportError, match=words):
        _cost.check_compiler()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'jax\[cuda13-local\]=="):
        cost(add, X, X)
    assert "JAX_SKIP_CUDA_CONSTRAINTS_CHECK" not in os.environ
