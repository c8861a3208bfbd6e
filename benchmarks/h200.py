"""Compile a program for an H200 on a machine without a GPU, and count its cost.

XLA's GPU compiler runs on the CPU; `make .venv/h200` installs it. Set
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before you import JAX, or it looks for cuDNN. The
program does not run. `benchmarks.hlo` counts its cost.
"""

import atexit
import functools
import json
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from benchmarks.hlo import Program
from tests.support import compilers as compilers


def _text_proto(fields: dict[str, Any]) -> str:
    """Formats fields as protobuf text, which XLA reads as a target description."""
    parts = (
        f"{name} {{ {_text_proto(x)} }}"
        if isinstance(x, dict)
        else f"{name}: {json.dumps(x)}"
        for name, x in fields.items()
    )
    return "\n".join(parts)


def _target(name: str, compute: int, cores: int, bandwidth: int) -> str:
    device = {
        "threads_per_block_limit": 1024,
        "threads_per_warp": 32,
        "shared_memory_per_block": 49152,
        "shared_memory_per_core": 233472,
        "threads_per_core_limit": 2048,
        "core_count": cores,
        "fpus_per_core": 128,
        "block_dim_limit_x": 2147483647,
        "block_dim_limit_y": 65535,
        "block_dim_limit_z": 65535,
        "memory_bandwidth": bandwidth,
        "l2_cache_size": 62914560,
        "clock_rate_ghz": 1.98,
        "device_memory_size": 150_000_000_000,
        "shared_memory_per_block_optin": 232448,
        "cuda_compute_capability": {"major": compute, "minor": 0},
        "registers_per_core_limit": 65536,
        "registers_per_block_limit": 65536,
    }
    fields = {
        "gpu_device_info": device,
        "platform_name": "CUDA",
        "dnn_version_info": {"major": 9, "minor": 8},
        "runtime_version": {"major": 13, "minor": 0, "patch": 0},
        "device_description_str": f"NVIDIA {name}",
    }
    return _text_proto(fields)


H200 = _target("H200", compute=9, cores=132, bandwidth=4_800_000_000_000)
B200 = _target("B200", compute=10, cores=148, bandwidth=8_000_000_000_000)

# Autotuning needs a GPU. Without it, the HLO is the same in half the time.
CHEAP: dict[str, Any] = {
    "xla_gpu_autotune_level": 0,
    "xla_backend_optimization_level": 0,
    "xla_gpu_disable_gpuasm_optimizations": True,
}
# XLA starts ptxas for each kernel, and no one reads the output. This script replaces
# ptxas: it prints a version and writes nothing. Mosaic's kernels use the real ptxas.
CUDA = pathlib.Path(sys.prefix, "h200/nvidia/cu13")
STUB = """#!/bin/sh
case $1 in /*) : >"$3" ;; *) exec {}/bin/ptxas "$@" ;; esac
"""


def compile_step(
    fn: Callable, *args: Any, donate: tuple[int, ...] = (), target: str = H200
) -> Program:
    """Compiles `fn` for one GPU, from arrays or shapes, and donates some arguments."""
    return compile_lowered(lower_step(fn, *args, donate=donate, target=target))


def lower_step(
    fn: Callable, *args: Any, donate: tuple[int, ...] = (), target: str = H200
) -> jax.stages.Lowered:
    """Lowers `fn` for one GPU, as `compile_step` does."""
    sharding = NamedSharding(make_mesh(1, target), PartitionSpec())
    placed = jax.tree.map(functools.partial(_placed, sharding=sharding), args)
    return jax.jit(fn, donate_argnums=donate).lower(*placed)


def compile_placed(fn: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Program:
    """Compiles `fn` for the devices of the sharded shapes `args`."""
    return compile_lowered(jax.jit(fn, donate_argnums=donate).lower(*args))


def compile_lowered(lowered: jax.stages.Lowered) -> Program:
    """Compiles a program that was lowered for a GPU."""
    options = {"xla_gpu_cuda_data_dir": _stub()} if CUDA.exists() else {}
    # Bypass the cache: without a GPU, JAX cannot read a program from it.
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        program = lowered.compile(compiler_options=CHEAP | options)
    finally:
        jax.config.update(name, before)
    memory: Any = program.memory_analysis()
    return Program(program.as_text() or "", memory.temp_size_in_bytes)


@functools.cache
def _stub() -> str:
    """Returns the folder of the script that replaces ptxas in this process."""
    folder = tempfile.TemporaryDirectory(prefix="jamp-cuda-")
    atexit.register(folder.cleanup)
    place = pathlib.Path(folder.name)
    (place / "bin").mkdir()
    (place / "nvvm").symlink_to(CUDA / "nvvm")
    (place / "bin/ptxas").write_text(STUB.format(CUDA))
    (place / "bin/ptxas").chmod(0o755)
    return folder.name


def make_mesh(devices: int, target: str = H200, **kwargs: Any) -> jax.sharding.Mesh:
    """Returns a mesh of absent GPUs with one axis, "d"."""
    return topologies.make_mesh(
        _topology(devices, target), (devices,), ("d",), **kwargs
    )


@functools.cache
def _topology(devices: int, target: str) -> topologies.TopologyDescription:
    return topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x1x{devices}"
    )


def _placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
