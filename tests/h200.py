"""Compile a program for an H200 on a machine without a GPU.

XLA's GPU compiler runs on the CPU: `pip install jax-cuda13-plugin`. Set
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before JAX is imported, or it looks for cuDNN. Nothing
runs and nothing is allocated; `tests.hlo` says what can be read off the result.
"""

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from tests.hlo import Program

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024  threads_per_warp: 32  shared_memory_per_block: 49152
  shared_memory_per_core: 233472  threads_per_core_limit: 2048  core_count: 132
  fpus_per_core: 128  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535
  block_dim_limit_z: 65535  memory_bandwidth: 4800000000000  l2_cache_size: 62914560
  clock_rate_ghz: 1.98  device_memory_size: 150000000000
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""

B200 = (
    H200.replace("core_count: 132", "core_count: 148")
    .replace("4800000000000", "8000000000000")
    .replace("major: 9", "major: 10")
    .replace("NVIDIA H200", "NVIDIA B200")
)

# Half the time, same HLO: without a GPU there is nothing to tune on, and nothing runs.
CHEAP = {
    "xla_gpu_autotune_level": 0,
    "xla_backend_optimization_level": 0,
    "xla_gpu_disable_gpuasm_optimizations": True,
}


def compile_step(
    fn: Callable, *args: Any, donate: tuple[int, ...] = (), target: str = H200
) -> Program:
    """Compiles `fn` for one GPU.

    Args:
        fn: what to jit.
        *args: its arguments, arrays or their shapes, as from `jax.eval_shape`.
        donate: which arguments to donate.
        target: what GPU.
    """
    return compile_lowered(lower_step(fn, *args, donate=donate, target=target))


def lower_step(
    fn: Callable, *args: Any, donate: tuple[int, ...] = (), target: str = H200
) -> jax.stages.Lowered:
    """Lowers `fn` for one GPU, as `compile_step` does."""
    sharding = NamedSharding(make_mesh(1, target), PartitionSpec())
    placed = jax.tree.map(functools.partial(_placed, sharding=sharding), args)
    return jax.jit(fn, donate_argnums=donate).lower(*placed)


def compile_placed(fn: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Program:
    """Compiles `fn` for where the shapes `args` are sharded."""
    return compile_lowered(jax.jit(fn, donate_argnums=donate).lower(*args))


def compile_lowered(lowered: jax.stages.Lowered) -> Program:
    """Compiles what was lowered for a GPU."""
    with _not_cached():
        compiled = lowered.compile(compiler_options=CHEAP)
    return Program(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes)


@contextlib.contextmanager
def _not_cached():
    """Keeps a program out of the cache: without a GPU it cannot be read back."""
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        yield
    finally:
        jax.config.update(name, before)


def make_mesh(devices: int, target: str = H200, **kwargs: Any) -> jax.sharding.Mesh:
    """A mesh of one axis, "d", of GPUs that are not here."""
    return topologies.make_mesh(
        _topology(devices, target), (devices,), ("d",), **kwargs
    )


def _placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


@functools.cache
def _topology(devices: int, target: str) -> topologies.TopologyDescription:
    return topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x1x{devices}"
    )
