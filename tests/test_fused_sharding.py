"""Fused optimizers on sharded params: 8 CPU devices, and compiled for 8 H200s."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jamp
from benchmarks.optimizer_steps import fused_step
from jamp import optimizers as jo
from pallas_kernels import BackendError
from tests import h200, subprocesses
from tests.eight_devices import AXES, LEAVES, RUNS, name_of, start

each_run = pytest.mark.parametrize("name", [name_of(run) for run in RUNS])


@pytest.fixture(scope="module")
def results():
    return subprocesses.on_devices(8, "tests.eight_devices")


@each_run
def test_a_mesh_gives_what_one_device_gives(results, name):
    # Sums of squares are added up in another order, of gradients near 1/16.
    assert results[name]["difference"] < 1e-6


@each_run
def test_all_devices_skip_together(results, name):
    assert results[name]["skips"] == [0, 1]


def test_gradients_may_lie_elsewhere_than_params(results):
    assert results["gradients elsewhere"] == {"difference": 0.0, "misplaced": []}


def test_a_state_made_under_jit_is_stepped_by_xla_on_a_mesh_of_auto_axes(results):
    assert results["made under jit/auto"] < 1e-6


def test_a_state_made_under_jit_says_what_kernels_would_need(results):
    message = results["made under jit/interpret"]
    assert re.search("Auto axes.*jamp.initialize.*Explicit.*backend='auto'", message)


def test_under_shard_map(results):
    for key in ("auto/True", "auto/False"):
        assert results[f"shard_map/{key}"] == 0.0


# Compiled for 8 H200s


def h200s(kind):
    devices = h200.make_mesh(8).devices.reshape(4, 2)
    return Mesh(devices, AXES, axis_types=(AxisType[kind],) * 2)


def state_on(mesh, tx, **options):
    """Shapes of a state whose params lie as LEAVES says."""

    def placed(path, x):
        names = [getattr(key, "key", None) for key in path]
        spec = next((LEAVES[n][1] for n in names if n in LEAVES), P())
        sharding = NamedSharding(mesh, spec if x.ndim else P())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    if AxisType.Auto in mesh.axis_types:
        # `initialize` sees how arrays lie; but these are shapes.
        specs = (LEAVES[k][1] for k in sorted(LEAVES))
        tx = tx.replace(shardings=tuple(NamedSharding(mesh, s) for s in specs))
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, (s, _) in LEAVES.items()}
    state = jax.eval_shape(functools.partial(start, tx, **options), params)
    return jax.tree.map_with_path(placed, state)


CLIPPED = functools.partial(jo.fused_adam, max_grad_norm=1.0)
SPLIT = {"level": "O5", "store_remainder": True}
PROGRAMS = {
    "clipped Adam": ("Explicit", CLIPPED, {}),
    "Adam with remainders": ("Explicit", jo.fused_adam, SPLIT),
    "LAMB": ("Auto", jo.fused_lamb, {}),
}


@pytest.mark.h200
@pytest.mark.parametrize("name", PROGRAMS)
def test_only_numbers_travel_between_h200s(name):
    kind, make, options = PROGRAMS[name]
    state = state_on(h200s(kind), make(backend="mosaic"), **options)
    program = h200.compile_placed(fused_step, state, state.params, donate=(0,))
    launches = [instruction for instruction, _ in program.launches()]
    opcodes = {i.opcode.removesuffix("-start").removesuffix("-done") for i in launches}
    assert opcodes == {"custom-call", "fusion", "copy", "all-reduce"}
    reductions = [i.bytes for i in launches if i.opcode == "all-reduce-start"]
    assert reductions and max(reductions) <= 4096
    # In place, all but what the program does not read, which JAX leaves out: the byte
    # `last_step_skipped`, and the half of the one leaf that no kernel takes.
    assert max(program.copies, default=0) <= 4
    left_out = 1 + (0 if "remainders" in name else 2 * LEAVES["few"][0][0] // 2)
    assert program.aliased_bytes == bytes_per_device(state) - left_out


def bytes_per_device(state):
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    )


@pytest.mark.h200
def test_xla_steps_sharded_params_without_gathering_them():
    # What a state that was made under jit gets, on a mesh of Auto axes.
    state = state_on(h200s("Auto"), jo.fused_lamb())
    program = h200.compile_placed(fused_step, state, state.params, donate=(0,))
    opcodes = {instruction.opcode for instruction, _ in program.launches()}
    assert not [x for x in opcodes if x.startswith(("all-g", "all-to", "collective"))]


@pytest.mark.h200
def test_mosaic_under_a_shard_map_takes_averages_and_refuses_what_varies():
    mesh, tx = h200.make_mesh(8), jo.fused_adam(backend="mosaic")
    state = jax.eval_shape(functools.partial(start, tx), {"w": jnp.ones(256)})

    def loss_fn(params, x):
        return params["w"].sum(dtype=jnp.float32) * x.sum()

    x = jax.ShapeDtypeStruct((8,), jnp.float32)

    def by_average(state, x):
        grads = jamp.scaled_grad(loss_fn, axis_name="d")(state, x)
        return state.apply_gradients(grads=grads)

    def by_itself(state, x):
        return state.apply_gradients(grads={"w": jnp.float32(state.params["w"]) * x})

    def lowered(step, check_vma):
        specs = (P(), P("d"))
        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma
        )
        return jax.jit(mapped).lower(state, x).as_text()

    for check_vma in (True, False):
        assert "mosaic_gpu" in lowered(by_average, check_vma)
    with pytest.raises(BackendError, match="'mosaic' cannot.*check_vma=False.*'auto'"):
        lowered(by_itself, check_vma=True)
    assert "mosaic_gpu" in lowered(by_itself, check_vma=False)
