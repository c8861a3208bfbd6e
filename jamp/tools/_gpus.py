"""GPUs that programs are compiled for where there is none.

XLA's GPU compiler runs on the CPU: `pip install 'jax[cuda13-local]'`. Nothing runs and
nothing is allocated.
"""

import functools
import importlib.util
import math
import os
from typing import Any

import jax
from jax.experimental import topologies

_H200 = """
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

TARGETS = {
    "H200": _H200,
    "B200": _H200.replace("core_count: 132", "core_count: 148")
    .replace("4800000000000", "8000000000000")
    .replace("major: 9", "major: 10")
    .replace("NVIDIA H200", "NVIDIA B200"),
}

# Half the time, same HLO: without a GPU there is nothing to tune on, and nothing runs.
CHEAP: dict[str, Any] = {
    "xla_gpu_autotune_level": 0,
    "xla_backend_optimization_level": 0,
    "xla_gpu_disable_gpuasm_optimizations": True,
}
_VARIABLE = "JAX_SKIP_CUDA_CONSTRAINTS_CHECK"


def check_compiler() -> None:
    """Raises an ImportError unless XLA's GPU compiler can be asked."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        raise ImportError(
            "This compiles for a GPU that is not here, by XLA's GPU compiler: "
            f"pip install 'jax[cuda13-local]=={jax.__version__}', and set "
            f"{_VARIABLE}=1 before JAX is imported."
        )
    if _VARIABLE not in os.environ and jax.default_backend() != "gpu":
        raise ImportError(f"Set {_VARIABLE}=1 before JAX is imported.")


@functools.cache
def topology(devices: int, target: str) -> topologies.TopologyDescription:
    """GPUs of one kind, given one of `TARGETS`' texts."""
    return topologies.get_topology_desc(
        platform="cuda", target_config=target, topology=f"1x1x{devices}"
    )


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles what was lowered for a GPU."""
    # Not into the cache: without a GPU a program cannot be read back from it.
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        return lowered.compile(compiler_options=CHEAP)
    finally:
        jax.config.update(name, before)
