"""benchmarks.cost and benchmarks.hlo on a compiled program: bytes derived by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks import cost, h200

pytestmark = [pytest.mark.standard_promotion, pytest.mark.h200]


def test_bytes_by_hand_and_where_they_are_moved():
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32)

    def add(state, x):
        with jax.named_scope("head"):
            return state + jnp.sin(x), x[0, 0]  # here

    wide = h200.compile_step(add, x, x)
    narrow = h200.compile_step(add, x, x.update(dtype=jnp.float16), target=h200.B200)
    size = 512 * 512 * 4
    # One kernel reads both and writes the sum; one copies a number.
    assert wide.kernels in (1, 2) and wide.temp == 0
    assert abs(wide.traffic - 3 * size) <= 16
    assert abs(narrow.traffic - 2.5 * size) <= 16
    part = cost.parts(wide)[0]
    line = add.__code__.co_firstlineno + 2
    assert (part.module, part.source) == ("head", f"{__file__}:{line}")
    assert abs(part.traffic - 3 * size) <= 16
    shown = cost.report({"wide": wide, "half": narrow})
    assert "half: " in shown and "(83%)" in shown and f"head {__file__}:{line}" in shown


def test_products_and_collectives_by_dtype():
    mesh = h200.make_mesh(4)

    def shape(size, *spec):
        sharding = NamedSharding(mesh, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(size, jnp.bfloat16, sharding=sharding)

    def step(w, x):
        layer = lambda x, w: (jax.nn.relu(x @ w), None)  # noqa: E731
        return jnp.sum(jax.lax.scan(layer, x, w)[0], dtype=jnp.float32)

    w, x = shape((3, 512, 512), None, "d"), shape((4096, 512), "d")
    found = h200.compile_placed(step, w, x)
    assert found.products == {("bf16", "bf16"): 3}  # once a trip
    gathered = 3 * 512 * 512 * 2 // 4
    given = {("all-gather", "bf16"): gathered, ("all-reduce", "f32"): 4}
    assert found.collectives == given
    line = f"step: a device gives {gathered} B of bf16 to all-gather"
    assert line in cost.report({"step": found})
