"""Compile a program for an H200 on a machine without a GPU.

XLA's GPU compiler runs on the CPU; `make test` installs it (tests/compilers.py). Set
JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 before JAX is imported, or it looks for cuDNN. Nothing
runs and nothing is allocated; `tests.hlo` says what can be read off the result.
"""

import atexit
import functools
import pathlib
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec

from jamp.tools._cost import CHEAP as CHEAP, TARGETS, compiled, topology
from tests import compilers as compilers
from tests.hlo import Program

H200, B200 = TARGETS["H200"], TARGETS["B200"]
# XLA starts ptxas for each of its kernels, and nobody reads what that writes: a script
# in its place writes nothing, and says its version. Mosaic's kernels take the real one.
CUDA = pathlib.Path(sys.prefix, "h200/nvidia/cu13")
STUB = """#!/bin/sh
case $1 in /*) : >"$3" ;; *) exec {}/bin/ptxas "$@" ;; esac
"""


def compile_step(
    fn: Callable, *args: Any, donate: tuple[int, ...] = (), target: str = H200
) -> Program:
    """Compiles `fn`, of arrays or their shapes, for one GPU; donates some arguments."""
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
    options = {"xla_gpu_cuda_data_dir": _stub()} if CUDA.exists() else {}
    program = compiled(lowered, **options)
    return Program(program.as_text(), program.memory_analysis().temp_size_in_bytes)


@functools.cache
def _stub() -> str:
    """Where XLA finds the script in ptxas' place, as long as this process lives."""
    folder = tempfile.TemporaryDirectory(prefix="jamp-cuda-")
    atexit.register(folder.cleanup)
    place = pathlib.Path(folder.name)
    (place / "bin").mkdir()
    (place / "nvvm").symlink_to(CUDA / "nvvm")
    (place / "bin/ptxas").write_text(STUB.format(CUDA))
    (place / "bin/ptxas").chmod(0o755)
    return folder.name


def make_mesh(devices: int, target: str = H200, **kwargs: Any) -> jax.sharding.Mesh:
    """A mesh of one axis, "d", of GPUs that are not here."""
    return topologies.make_mesh(topology(devices, target), (devices,), ("d",), **kwargs)


def _placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
