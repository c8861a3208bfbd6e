"""Compile a program for a TPU v5e on a machine without one: `make tpu` installs libtpu.

XLA writes its optimized HLO and its buffers before it generates code, which takes most
of the time. So a child process compiles, and this process stops it after these files.
"""

import functools
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_ID", "0")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib import _hlo, _jax

from tests.support import compilers as compilers

ROOT = pathlib.Path(__file__).parents[1]
HLO = "*step*after_optimizations_after_buffer_assignment.txt"
BUFFERS = "*step*after_optimizations-buffer-assignment.txt"
LAST = "*step*after_optimizations-memory-usage-report.txt"
# A color is a memory other than the main memory.
TEMPORARY = re.compile(r"size (\d+), page 0, preallocated-temp")


class Compiled:
    """The bytes and the temporary memory of a program, as XLA counts them."""

    kernels, copies = 1, ()  # a TPU runs a program as one kernel

    def __init__(self, code: str):
        """Runs `code`, which compiles a function with the name `step`."""
        with tempfile.TemporaryDirectory(prefix="jamp-tpu-") as name:
            folder = pathlib.Path(name)
            _compile(code, folder)
            (hlo,), (buffers,) = folder.glob(HLO), folder.glob(BUFFERS)
            module = _hlo.hlo_module_from_text(hlo.read_text())
            self.temp = sum(map(int, TEMPORARY.findall(buffers.read_text())))
        client = jax.local_devices(backend="cpu")[0].client
        self.traffic = _jax.hlo_module_cost_analysis(client, module)["bytes accessed"]


def _compile(code: str, folder: pathlib.Path) -> None:
    """Runs `code` in a child process until XLA has written its last file."""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    options: dict[str, Any] = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    command = [sys.executable, "-W", "ignore", "-c", code]
    options |= {"cwd": ROOT, "env": os.environ | {"XLA_FLAGS": flags}}
    with subprocess.Popen(command, **options) as child:
        while child.poll() is None and not any(folder.glob(LAST)):
            time.sleep(0.5)
        time.sleep(1)  # the file may not be complete yet
        child.kill()
        _, error = child.communicate()
    if not any(folder.glob(LAST)):
        raise RuntimeError(f"XLA wrote no HLO: {error[-2000:]}")


def lower_step(fn: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """Lowers `fn` for one TPU, from arrays or shapes."""
    mesh = topologies.make_mesh(_topology(), (4,), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    return jax.jit(fn, donate_argnums=donate).lower(*jax.tree.map(place, args))


@functools.cache
def _topology() -> topologies.TopologyDescription:
    return topologies.get_topology_desc("v5e:2x2", platform="tpu")
