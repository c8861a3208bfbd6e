"""Kernels on eight H200s: nothing is sent but a few numbers."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import pallas_kernels as pk
from tests import h200
from tests.hlo import Program

pytestmark = pytest.mark.h200

MOSAIC = pk.Options(backend="mosaic")
NUMBERS = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.999, "eps": 1e-8}
# Shape and spec of each leaf. No axis divides the last two of "mixed".
LAYOUTS = {
    "fsdp": [((4096, 256), P("data")), ((1024,), P("data")), ((512, 8, 8), P("data"))],
    "tensor": [((256, 4096), P(None, "model")), ((4096,), P("model"))],
    "replicated": [((300, 7), P()), ((768,), P())],
    "mixed": [
        ((4096, 256), P("data", "model")),
        ((2048, 128), P(("data", "model"))),
        ((256, 4096), P(None, "model")),
        ((1024,), P("data")),
        ((333,), P()),
        ((), P()),
    ],
}


def make_mesh(axis_type: AxisType) -> Mesh:
    devices = h200.make_mesh(8).devices.reshape(4, 2)
    return Mesh(devices, ("data", "model"), axis_types=(axis_type,) * 2)


def arguments(layout: str, mesh: Mesh) -> tuple[Any, ...]:
    """Weights, both moments and gradients of each leaf, and a scale."""

    def column(dtype):
        shardings = [NamedSharding(mesh, spec) for _, spec in LAYOUTS[layout]]
        return [
            jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
            for (shape, _), sharding in zip(LAYOUTS[layout], shardings, strict=True)
        ]

    weights = list(map(pk.Weight, column(jnp.bfloat16), column(jnp.float32)))
    mu, nu = column(jnp.float32), column(jnp.float32)
    scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(mesh, P()))
    return weights, mu, nu, column(jnp.bfloat16), scale


def adam(options, weights, mu, nu, grads, scale):
    """Checked and clipped."""
    found = pk.found_inf(grads, options=options)
    norm = pk.l2norm(grads, options=options).norm
    options = options._replace(unscale=scale / jnp.maximum(norm, 1), skip=found)
    return pk.adam(weights, grads, mu, nu, **NUMBERS, options=options)


def lamb(options, weights, mu, nu, grads, scale):
    options = options._replace(unscale=scale)
    numbers = NUMBERS | {"averaging": 0.1, "weight_decay": 0.01}
    return pk.lamb(weights, grads, mu, nu, **numbers, options=options)


def compiled(step: Any, options: pk.Options, args: tuple[Any, ...]) -> Program:
    def in_place(*args):  # results in the order of what is donated
        stepped = step(options, *args)
        return stepped.weights, stepped.moments["mu"], stepped.moments["nu"]

    return h200.compile_placed(in_place, *args, donate=(0, 1, 2))


def sent(program: Program) -> dict[str, float]:
    """By kind of collective, the most bytes that one of them sends."""
    most: dict[str, float] = {}
    for computation in program.computations.values():
        for i in computation.values():
            opcode = i.opcode.removesuffix("-start").removesuffix("-done")
            if opcode.startswith(("all-", "collective-", "reduce-scatter", "ragged-")):
                most[opcode] = max(most.get(opcode, 0), i.bytes)
    return most


def assert_in_place(program: Program, args: tuple[Any, ...]) -> None:
    held = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(args[:3])
    )
    # The half copy of the leaf of shape (), which XLA steps, is not read: JAX drops it.
    assert held - 2 <= program.aliased_bytes <= held
    assert max(program.copies, default=0) <= 8


@pytest.mark.parametrize("layout", LAYOUTS)
def test_adam_sends_scalars(layout):
    args = arguments(layout, make_mesh(AxisType.Explicit))
    program = compiled(adam, MOSAIC, args)
    assert "mosaic_gpu" in program.text
    assert sent(program).keys() == ({"all-reduce"} if layout != "replicated" else set())
    assert max(sent(program).values(), default=0) <= 16  # a few scalars in one
    assert_in_place(program, args)


def test_lamb_sends_two_numbers_per_leaf():
    args = arguments("mixed", make_mesh(AxisType.Explicit))
    program = compiled(lamb, MOSAIC, args)
    assert sent(program).keys() == {"all-reduce"}
    assert sent(program)["all-reduce"] <= 2 * 2 * 4 * len(LAYOUTS["mixed"])
    assert_in_place(program, args)


def test_meshes_of_auto_axes_send_scalars_if_shardings_are_told():
    args = arguments("mixed", make_mesh(AxisType.Auto))
    shardings = [grad.sharding for grad in args[3]]
    program = compiled(adam, MOSAIC._replace(shardings=shardings), args)
    assert "mosaic_gpu" in program.text
    assert sent(program).keys() == {"all-reduce"}
    assert sent(program)["all-reduce"] <= 16
    assert_in_place(program, args)


def test_meshes_of_auto_axes_run_xla_otherwise():
    args = arguments("mixed", make_mesh(AxisType.Auto))
    program = compiled(adam, pk.Options(backend="auto"), args)
    assert "mosaic_gpu" not in program.text
    assert sent(program).keys() == {"all-reduce"}
    assert sent(program)["all-reduce"] <= 4 * 4 * len(LAYOUTS["mixed"])


@pytest.mark.message
def test_meshes_of_auto_axes_refuse_mosaic_and_say_what_to_do():
    args = arguments("mixed", make_mesh(AxisType.Auto))
    with pytest.raises(pk.BackendError) as error:
        compiled(adam, MOSAIC, args)
    for words in ("Auto axes", "NamedSharding", "Explicit axes", "backend='auto'"):
        assert words in str(error.value)


def test_replicated_gradients_of_sharded_weights_are_cut_not_sent():
    mesh = make_mesh(AxisType.Explicit)
    *state, grads, scale = arguments("fsdp", mesh)
    whole = NamedSharding(mesh, P())
    grads = [jax.ShapeDtypeStruct(g.shape, g.dtype, sharding=whole) for g in grads]
    args = (*state, grads, scale)
    program = compiled(adam, MOSAIC, args)
    assert sent(program).keys() <= {"all-reduce"}
    assert max(sent(program).values(), default=0) <= 16
    assert_in_place(program, args)
