"""Compile a step for an H200 on a machine without a GPU, and count what it costs.

XLA's GPU compiler runs on the CPU. What it returns is the scheduled HLO: in its ENTRY
computation every instruction is one launch, or free. What is counted, and how:

- `parameter`, `get-tuple-element`, `tuple`, `bitcast`, `constant` and tokens are free.
  Any other instruction is one kernel (`copy` too) that reads its operands and writes its
  result.
- An operand of which a fusion reads only slices counts as those slices, and a result
  updated in place counts as its update; a loop over stacked layers would otherwise
  count the whole stack once per layer.
- `call` and async pairs count as what they run, where they start. A `while` counts its
  body and its condition as often as XLA knows that it runs, else once. A `conditional`
  counts as its dearest branch, and one kernel that reads the predicate.
"""

import functools
import importlib.util
import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

# Without a GPU there is neither cuDNN nor CUPTI, and compiling needs neither. The plugin
# reads this when it starts, which JAX_PLATFORMS=cpu puts off to the first compile.
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
from jax.experimental import topologies

PLUGIN = "jax_cuda13_plugin"

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

FREE = frozenset(
    "parameter get-tuple-element tuple bitcast constant after-all add-dependency"
    " opt-barrier partition-id replica-id".split()
)
CALLERS = frozenset(("fusion", "call", "while", "conditional"))
SLICING = frozenset(("slice", "dynamic-slice", "dynamic-update-slice"))
DOTS = frozenset(("dot", "ragged-dot", "scaled-dot", "convolution"))
LIBRARY_PRODUCT = re.compile(r'custom_call_target="(__cublas\$|__cudnn\$)')
SIZES = {"pred": 1, "token": 0, "opaque": 0, "s4": 0.5, "u4": 0.5, "s2": 0.25, "u2": 0.25}


def missing() -> str | None:
    """Why nothing can be compiled for an H200 here; None where it can."""
    if importlib.util.find_spec(PLUGIN) is None:
        return f"`{PLUGIN}` is not installed: `pip install jax-cuda13-plugin`"
    return None


def compile_step(step: Callable, *args: Any, donate: tuple[int, ...] = ()) -> "Program":
    """Compile `step` for an H200; `args` may be shapes, nothing is allocated."""
    placed = jax.tree.map(_on_h200, args)
    compiled = jax.jit(step, donate_argnums=donate).lower(*placed).compile()
    memory = compiled.memory_analysis()
    return Program(compiled.as_text(), memory.temp_size_in_bytes)


def _on_h200(leaf: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=_replicated())


@functools.cache
def _replicated() -> jax.sharding.NamedSharding:
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology="1x1x1"
    )
    mesh = topologies.make_mesh(topology, (1,), ("d",))
    return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


class Product(NamedTuple):
    """One matrix product or convolution and the types of its two factors."""

    op: str
    lhs: str
    rhs: str
    where: str


class Instruction(NamedTuple):
    """One line of HLO."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str

    @property
    def bytes(self) -> float:
        return shape_bytes(self.shape)


class Cost(NamedTuple):
    """Launches and the bytes that they read and write."""

    kernels: float
    traffic: float


type Computation = dict[str, Instruction]


@dataclass(frozen=True)
class Program:
    """A compiled step: its scheduled HLO, and its peak temporary memory in bytes."""

    text: str
    temp: int

    @functools.cached_property
    def computations(self) -> dict[str, Computation]:
        return parse(self.text)

    @functools.cached_property
    def entry(self) -> Computation:
        return self.computations[_entry_name(self.text)]

    @functools.cached_property
    def cost(self) -> Cost:
        return self._cost_of(self.entry)

    @property
    def kernels(self) -> int:
        return int(self.cost.kernels)

    @property
    def traffic(self) -> int:
        return int(self.cost.traffic)

    @functools.cached_property
    def products(self) -> list[Product]:
        """Every dot and convolution of the module, inside fusions and loops too."""
        return [
            _product(instruction, computation)
            for computation in self.computations.values()
            for instruction in computation.values()
            if _is_product(instruction)
        ]

    @functools.cached_property
    def aliased(self) -> frozenset[int]:
        """The numbers of the parameters whose buffers an output takes over."""
        header = self.text[: self.text.index("entry_computation_layout")]
        return frozenset(int(n) for n in re.findall(r": \((\d+), \{", header))

    def copies(self, at_least: int) -> list[Instruction]:
        """Every copy in ENTRY of `at_least` bytes."""
        copies = [i for i in self.entry.values() if i.opcode.startswith("copy")]
        return [i for i in copies if i.bytes >= at_least]

    def launches(self) -> list[tuple[Instruction, Cost]]:
        """ENTRY's instructions that are not free, each with its cost."""
        costs = ((i, self._cost(i, self.entry)) for i in self.entry.values())
        return [(instruction, cost) for instruction, cost in costs if cost.kernels]

    def _cost_of(self, computation: Computation) -> Cost:
        return _add(self._cost(i, computation) for i in computation.values())

    def _cost(self, instruction: Instruction, computation: Computation) -> Cost:
        opcode = instruction.opcode
        called = [self.computations[name] for name in _called(instruction)]
        if opcode in FREE or opcode.endswith(("-done", "-update")):
            return Cost(0, 0)
        if opcode == "call" or (opcode.endswith("-start") and called):
            return _add(map(self._cost_of, called))
        if opcode == "while":
            once = _add(map(self._cost_of, called))
            trips = _trip_count(instruction)
            return Cost(trips * once.kernels, trips * once.traffic)
        if opcode == "conditional":
            dearest = max(map(self._cost_of, called), key=lambda cost: cost.traffic)
            return Cost(1 + dearest.kernels, 4 + dearest.traffic)
        body = called[0] if opcode == "fusion" else None
        reads = sum(_reads(instruction, computation, body))
        return Cost(1, reads + _writes(instruction, computation, body))


def parse(text: str) -> dict[str, Computation]:
    """The computations of a module by name, each its instructions by name."""
    computations: dict[str, Computation] = {}
    for line in text.splitlines():
        if (header := re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)) is not None:
            current = computations[header[1]] = {}
        elif (match := re.match(r"\s+(?:ROOT )?%?([\w.\-]+) = ", line)) is not None:
            instruction = _instruction(match[1], line[match.end() :])
            current[instruction.name] = instruction
    return computations


def _entry_name(text: str) -> str:
    match = re.search(r"^ENTRY %?([\w.\-]+) ", text, re.MULTILINE)
    assert match is not None, "the module has no ENTRY computation"
    return match[1]


def _instruction(name: str, line: str) -> Instruction:
    shape_end = _closing(line, 0) if line.startswith("(") else line.index(" ")
    shape, line = line[:shape_end], line[shape_end:].lstrip()
    opcode, _, _ = line.partition("(")
    end = _closing(line, len(opcode))
    inside, rest = line[len(opcode) + 1 : end - 1], line[end:]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    if opcode == "parameter":
        rest = inside + rest  # its number
    return Instruction(name, shape, opcode, operands, rest)


def _closing(text: str, start: int) -> int:
    """The place behind the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError(f"unbalanced parentheses in {text!r}")


def shape_bytes(shape: str) -> float:
    """Bytes of a shape as HLO prints it, the sum over a tuple."""
    arrays = re.findall(r"\b([a-z]+[0-9a-z]*)\[([^\]]*)\]", shape)
    return sum(_array_bytes(dtype, dimensions) for dtype, dimensions in arrays)


def _array_bytes(dtype: str, dimensions: str) -> float:
    sizes = [int(size.removeprefix("<=")) for size in dimensions.split(",") if size]
    # f32, bf16, f8e4m3fn, c64: the first number is the bits.
    bits = re.search(r"\d+", dtype)
    item = SIZES[dtype] if dtype in SIZES else int(bits[0]) / 8 if bits else math.nan
    return math.prod(sizes) * item


def _add(costs: Any) -> Cost:
    costs = list(costs)
    return Cost(sum(c.kernels for c in costs), sum(c.traffic for c in costs))


def _called(instruction: Instruction) -> list[str]:
    pattern = (
        r"\b(?:calls|to_apply|body|condition|true_computation|false_computation"
        r"|branch_computations)=(\{[^}]*\}|%?[\w.\-]+)"
    )
    if instruction.opcode not in CALLERS and not instruction.opcode.endswith("-start"):
        return []
    groups = re.findall(pattern, instruction.rest)
    return [name for group in groups for name in re.findall(r"[\w.\-]+", group)]


def _trip_count(instruction: Instruction) -> int:
    known = re.search(r'"known_trip_count":\{"n":"(\d+)"', instruction.rest)
    return int(known[1]) if known else 1


def _reads(
    instruction: Instruction, outer: Computation, body: Computation | None
) -> list[float]:
    """Bytes read of each operand."""
    whole = [outer[name].bytes for name in instruction.operands]
    if body is None:
        return [size * _used(instruction, n, outer) for n, size in enumerate(whole)]
    parameters = {_number(i): i for i in body.values() if i.opcode == "parameter"}
    return [size * _needed(parameters[n], body) for n, size in enumerate(whole)]


def _needed(instruction: Instruction, body: Computation) -> float:
    """The fraction of a value inside a fusion that the fusion's result depends on."""
    users = [i for i in body.values() if instruction.name in i.operands]
    if not users:
        return 1 if instruction is list(body.values())[-1] else 0
    fractions = (
        _needed(user, body) * _used(user, user.operands.index(instruction.name), body)
        for user in users
    )
    return min(1, sum(fractions))


def _used(user: Instruction, number: int, computation: Computation) -> float:
    """The fraction of its operand `number` that an instruction reads."""
    if number > 0 or user.opcode not in SLICING:
        return 1
    if user.opcode == "dynamic-update-slice":
        return 0
    return user.bytes / max(computation[user.operands[0]].bytes, 1)


def _number(parameter: Instruction) -> int:
    return int(parameter.rest.partition(",")[0])


def _writes(
    instruction: Instruction, outer: Computation, body: Computation | None
) -> float:
    if instruction.opcode == "dynamic-update-slice":
        return outer[instruction.operands[1]].bytes
    if body is None:
        return instruction.bytes
    root = list(body.values())[-1]
    roots = [body[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return sum(_writes(_through_bitcast(r, body), body, None) for r in roots)


def _through_bitcast(instruction: Instruction, body: Computation) -> Instruction:
    while instruction.opcode == "bitcast":
        instruction = body[instruction.operands[0]]
    return instruction


def _is_product(instruction: Instruction) -> bool:
    is_library = instruction.opcode == "custom-call"
    return instruction.opcode in DOTS or (
        is_library and LIBRARY_PRODUCT.search(instruction.rest) is not None
    )


def _product(instruction: Instruction, computation: Computation) -> Product:
    target = re.search(r'custom_call_target="([^"]+)"', instruction.rest)
    lhs, rhs = (_dtype(computation[name]) for name in instruction.operands[:2])
    where = re.search(r'op_name="([^"]*)"', instruction.rest)
    op = target[1] if target else instruction.opcode
    return Product(op, lhs, rhs, where[1] if where else instruction.name)


def _dtype(instruction: Instruction) -> str:
    return instruction.shape.lstrip("(").partition("[")[0]
