"""Compile a program for a TPU v5e on a machine without one: `make tpu` installs libtpu.

XLA writes its optimized HLO and its buffers before it generates code, which takes most
of the time. So a child process compiles, and this process stops it after these files.

XLA copies arrays between the main memory and VMEM, a fast memory of 128 MB on the chip.
Its cost analysis counts the bytes of both alike: nearly half of GPT-2's are in VMEM,
and a param that XLA copies there counts three times. This module counts the bytes of
the main memory alone.
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
from jaxlib import _hlo

from benchmarks import hlo
from tests.support import compilers as compilers

ROOT = pathlib.Path(__file__).parents[1]
HLO = "*step*after_optimizations_after_buffer_assignment.txt"
BUFFERS = "*step*after_optimizations-buffer-assignment.txt"
FILES = (HLO, BUFFERS, "*step*after_optimizations-memory-usage-report.txt")
# A color is a memory other than the main memory.
TEMPORARY = re.compile(r"size (\d+), page 0, preallocated-temp")
FREE = re.compile(r'custom_call_target="(?:AllocateBuffer|ConcatBitcast)"')
CONTROL = ("while", "conditional", "call", "async-start")
COPIES = ("copy", "slice", "dynamic-slice")  # also asynchronous, between memories


class Compiled:
    """The bytes and the temporary memory of a program, in the main memory."""

    kernels, copies = 1, ()  # a TPU runs a program as one kernel

    def __init__(self, code: str):
        """Runs `code`, which compiles a function with the name `step`."""
        with tempfile.TemporaryDirectory(prefix="jamp-tpu-") as name:
            folder = pathlib.Path(name)
            _compile(code, folder)
            (text,), (buffers,) = folder.glob(HLO), folder.glob(BUFFERS)
            # XLA prints `f#1` for an element of a tuple, and this module an equation.
            module = _hlo.hlo_module_from_text(text.read_text())
            self.temp = sum(map(int, TEMPORARY.findall(buffers.read_text())))
        self.traffic = Program(module.to_string()).traffic


class Program(hlo.Program):
    """A program whose cost omits the bytes of VMEM and of other small memories.

    XLA does not print how often a loop runs, so a loop counts once.
    """

    def _cost(self, instruction: hlo.Instruction, outer: hlo.Computation) -> hlo.Cost:
        kind, _, step = instruction.opcode.rpartition("-")
        if FREE.search(instruction.rest) or kind in COPIES and step == "start":
            return hlo.Cost(0, 0)
        if kind in COPIES and step == "done":
            (start,) = (outer[name] for name in instruction.operands)
            ends = outer[start.operands[0]], instruction
            return hlo.Cost(0, instruction.bytes * sum(map(_in_main, ends)))
        cost = super()._cost(instruction, outer)
        if instruction.opcode in CONTROL or not cost.kernels:
            return cost
        return cost._replace(traffic=self._moved(instruction, outer))

    def _moved(self, instruction: hlo.Instruction, outer: hlo.Computation) -> float:
        """Returns the bytes that an operation reads from and writes to main memory."""
        operands = [outer[name] for name in instruction.operands]
        used = [hlo._used(instruction, n, outer) for n in range(len(operands))]
        body, root = outer, instruction
        if instruction.opcode == "fusion":
            (called,) = hlo._called(instruction)
            body = self.computations[called]
            needed = hlo._needed(body)
            (root,) = (i for i in body.values() if i.is_root)
            parameters = [i for i in body.values() if i.opcode == "parameter"]
            by_number = {hlo.parameter_number(p): needed[p.name] for p in parameters}
            used = [by_number[n] for n in range(len(operands))]
        parts = [body[n] for n in root.operands] if root.opcode == "tuple" else [root]
        pairs = zip(operands, used, strict=True)
        read = sum(x.bytes * part for x, part in pairs if _in_main(x))
        return read + sum(hlo._writes(x, body, None) for x in parts if _in_main(x))


def _in_main(instruction: hlo.Instruction) -> bool:
    """Returns whether an array is in the main memory: its layout names no other."""
    return "S(" not in instruction.shape


def _compile(code: str, folder: pathlib.Path) -> None:
    """Runs `code` in a child process until XLA has written its files."""
    flags = f"--xla_dump_to={folder} --xla_dump_hlo_as_text"
    options: dict[str, Any] = {
        "stdout": subprocess.DEVNULL,
        "stderr": subprocess.PIPE,
        "text": True,
    }
    command = [sys.executable, "-W", "ignore", "-c", code]
    options |= {"cwd": ROOT, "env": os.environ | {"XLA_FLAGS": flags}}
    with subprocess.Popen(command, **options) as child:
        while child.poll() is None and not _is_written(folder):
            time.sleep(0.5)
        time.sleep(1)  # the last file may not be complete yet
        child.kill()
        _, error = child.communicate()
    if not _is_written(folder):
        raise RuntimeError(f"XLA wrote no HLO: {error[-2000:]}")


def _is_written(folder: pathlib.Path) -> bool:
    return all(any(folder.glob(pattern)) for pattern in FILES)


def lower_step(fn: Callable, *args: Any, donate: tuple[int, ...] = ()) -> Any:
    """Lowers `fn` for one TPU, from arrays or shapes."""
    mesh = topologies.make_mesh(_topology(), (4,), ("d",))
    sharding = NamedSharding(mesh, PartitionSpec())
    place = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)  # noqa: E731
    return jax.jit(fn, donate_argnums=donate).lower(*jax.tree.map(place, args))


@functools.cache
def _topology() -> topologies.TopologyDescription:
    return topologies.get_topology_desc("v5e:2x2", platform="tpu")
