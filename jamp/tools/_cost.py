"""`cost`: what a step costs on a GPU that need not be there.

XLA's GPU compiler runs on the CPU: `pip install 'jax[cuda13-local]'`. Nothing runs and
nothing is allocated.
"""

import dataclasses
import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jamp.diagnostics._source import is_installed, module_path
from jamp.diagnostics._table import columns, magnitude, short
from jamp.tools._hlo import Cost, Instruction, Program

_SHOWN = 6

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


class Part(NamedTuple):
    """What one line of a module costs.

    Attributes:
        module: its path.
        source: `file:line`; "" if XLA does not say.
        kernels: how many it launches.
        traffic: bytes that these read and write.
        largest: bytes of the largest result.
    """

    module: str
    source: str
    kernels: int
    traffic: int
    largest: int


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a compiled step costs.

    Attributes:
        kernels: how many it launches.
        traffic: bytes that they read and write: with the bandwidth of a GPU, the time
            of what is not bound by its matrix units.
        temp: bytes of temporary memory, beside arguments and results.
        products: how often a product runs, by the HLO types of its two factors, such as
            `("bf16", "bf16")`; convolutions too. What XLA took back from fp8 shows
            here.
        collectives: bytes that a device gives to collectives, by their kind and type,
            such as `("all-gather", "f8e4m3fn")`.
        parts: by module and line, the one that moves most bytes first.
    """

    kernels: int
    traffic: int
    temp: int
    products: Mapping[tuple[str, ...], int]
    collectives: Mapping[tuple[str, str], int]
    parts: tuple[Part, ...]


@dataclasses.dataclass(frozen=True)
class Costs:
    """The costs of one step, of one state or of several: `print` it.

    Attributes:
        target: the GPU.
        steps: by the names that the states were given.
    """

    target: str
    steps: dict[str, StepCost]

    def __str__(self) -> str:
        first, *_ = self.steps.values()
        rows = [(f"on {self.target}", "kernels", "bytes moved", "temp")]
        for name, step in self.steps.items():
            moved = f"{_bytes(step.traffic)} ({step.traffic / first.traffic:.0%})"
            rows.append((name, f"{step.kernels:,}", moved, _bytes(step.temp)))
        lines = [columns(*rows)]
        for name, step in self.steps.items():
            lines += _by_dtype(name, step)
        for name, step in self.steps.items():
            lines.append(f"{name}: where most bytes are moved")
            for module, source, kernels, traffic, largest in step.parts[:_SHOWN]:
                where = " ".join(filter(None, (module, short(source)))) or "(no name)"
                lines.append(
                    f"  {_bytes(traffic)} in {kernels} kernels, largest result "
                    f"{_bytes(largest)}: {where}"
                )
        return "\n".join(lines)


def _by_dtype(name: str, step: StepCost) -> Iterator[str]:
    """Lines of what runs, and what crosses devices, in which dtype."""
    runs = sorted(step.products.items(), key=lambda item: -item[1])
    shown = [f"{count:,} {' x '.join(factors)}" for factors, count in runs]
    yield f"{name}: products {', '.join(shown) or 'none'}"
    crossing = sorted(step.collectives.items(), key=lambda item: -item[1])
    if crossing:
        sizes = [f"{_bytes(n)} of {dtype} to {kind}" for (kind, dtype), n in crossing]
        yield f"{name}: a device gives {', '.join(sizes)}"


def _bytes(number: int) -> str:
    shown = magnitude(number) or "0"
    return f"{shown}{'B' if ' ' in shown else ' B'}"


def cost(
    step: Callable[..., Any],
    states: Any,
    *args: Any,
    target: str = "H200",
    donate: int | tuple[int, ...] = 0,
) -> Costs:
    """Compiles a training step for a GPU, and counts what it moves; nothing runs.

    XLA's own schedule is read: each launch reads its operands and writes its results,
    slices count as slices. Clusters of cuDNN and cuBLAS count as they are called. This
    is what jamp's tests hold its levels to. Where arguments are sharded over a mesh, it
    compiles for as many GPUs, and counts what one of them does.

    Args:
        step: `(state, *args) -> ...`; it need not be jitted.
        states: a state; or a dict of states of several levels, by name, to compare: the
            first is 100 %. Shapes do, as of `jax.eval_shape`.
        *args: the rest of what `step` takes: the batch, or its shapes.
        target: "H200" or "B200".
        donate: which arguments to donate; the state.

    Returns:
        A `Costs`: print it.

    Raises:
        ImportError: the GPU compiler is missing; the message says what to install.
        ValueError: `target` is not a GPU that is known.
    """
    if target not in TARGETS:
        known = " or ".join(map(repr, TARGETS))
        raise ValueError(f"`target` must be {known}, got {target!r}.")
    check_compiler()
    several = states if isinstance(states, Mapping) else {"step": states}
    found = {
        str(name): _cost(step, (state, *args), target, donate)
        for name, state in several.items()
    }
    return Costs(target, found)


def _cost(
    step: Callable[..., Any], args: PyTree, target: str, donate: int | tuple[int, ...]
) -> StepCost:
    found = [getattr(x, "sharding", None) for x in jax.tree.leaves(args)]
    mesh = _mesh([x.mesh for x in found if isinstance(x, NamedSharding)], target)

    def placed(x: Any) -> Any:
        if not hasattr(x, "dtype"):
            return x
        given, spec = getattr(x, "sharding", None), PartitionSpec()
        if isinstance(given, NamedSharding) and given.mesh.size == mesh.size:
            spec = given.spec
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    lowered = jax.jit(step, donate_argnums=donate).lower(*jax.tree.map(placed, args))
    found = compiled(lowered)
    memory: Any = found.memory_analysis()
    program = Program(found.as_text() or "", memory.temp_size_in_bytes)
    parts = sorted(_parts(program), key=lambda part: -part.traffic)
    return StepCost(
        program.kernels,
        program.traffic,
        program.temp,
        program.products,
        program.collectives,
        tuple(parts),
    )


def _mesh(given: Iterable[Mesh | AbstractMesh], target: str) -> Mesh:
    """GPUs that are not here: a mesh like the largest of those given, or one GPU."""
    like = max([AbstractMesh((1,), ("d",)), *given], key=lambda mesh: mesh.size)
    devices = topology(like.size, TARGETS[target]).devices
    shape = np.array(devices).reshape(like.axis_sizes)
    return Mesh(shape, like.axis_names, axis_types=like.axis_types)


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


def compiled(lowered: jax.stages.Lowered, **options: Any) -> jax.stages.Compiled:
    """Compiles what was lowered for a GPU; `options` are XLA's, beside `CHEAP`."""
    # Not into the cache: without a GPU a program cannot be read back from it.
    name = "jax_persistent_cache_min_compile_time_secs"
    before = getattr(jax.config, name)
    jax.config.update(name, math.inf)
    try:
        return lowered.compile(compiler_options=CHEAP | options)
    finally:
        jax.config.update(name, before)


def _parts(program: Program) -> Iterator[Part]:
    lines = _lines_of_frames(program.text)
    found: dict[tuple[str, str], list[tuple[Instruction, Cost]]] = {}
    for instruction, cost in program.launches():
        names = instruction.attribute(r'op_name="([^"]*)"') or ""
        frame = instruction.attribute(r"stack_frame_id=(\d+)")
        key = _module(names), lines.get(frame or "", "")
        found.setdefault(key, []).append((instruction, cost))
    for (module, source), launches in found.items():
        yield Part(
            module,
            source,
            kernels=round(sum(cost.kernels for _, cost in launches)),
            traffic=round(sum(cost.traffic for _, cost in launches)),
            largest=round(max(instruction.bytes for instruction, _ in launches)),
        )


def _module(names: str) -> str:
    """The modules of an `op_name`, without the jitted function and the operation."""
    return "/".join(module_path(names.partition("/")[2]).split("/")[:-1])


def _lines_of_frames(text: str) -> dict[str, str]:
    """The user's line of each of the stack frames that a module ends with.

    It is the innermost in no installed package, and not in jamp; else "".
    """
    _, _, names = text.partition("\nFileNames\n")
    names, _, _ = names.partition("\nFunctionNames\n")
    files = dict(re.findall(r'^(\d+) "(.*)"$', names, re.MULTILINE))
    place = r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+) "
    places = {
        number: f"{files[file]}:{line}"
        for number, file, line in re.findall(place, text, re.MULTILINE)
        if file in files and not is_installed(files[file])
    }
    frame = r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    lines: dict[str, str] = {}
    for number, at, parent in re.findall(frame, text, re.MULTILINE):
        outer = str(int(parent or 0) - 1)  # `parent` is one more than its number
        lines[number] = places.get(at) or lines.get(outer, "")  # it comes before
    return lines
