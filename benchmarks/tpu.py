"""Compile a program for a TPU v5e on a machine without one: `make tpu` installs libtpu.

Only one process at a time can use the library.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from tests.support import compilers as compilers


class Compiled:
    """The bytes and the temporary memory of a program, as XLA counts them."""

    kernels, copies = 1, ()  # a TPU runs a program as one kernel

    def __init__(self, compiled: Any):
        self.compiled = compiled
        self.traffic = compiled.cost_analysis()["bytes accessed"]
        self.temp = compiled.memory_analysis().temp_size_in_bytes


def lower_step(fn: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """Lowers `fn` for one TPU, from arrays or shapes."""
    mesh = topologies.make_mesh(_topology(), (4,), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    return jax.jit(fn, donate_argnums=donate).lower(*jax.tree.map(place, args))


def compile_lowered(lowered: Any) -> Compiled:
    return Compiled(lowered.compile())


@functools.cache
def _topology() -> topologies.TopologyDescription:
    return topologies.get_topology_desc("v5e:2x2", platform="tpu")
