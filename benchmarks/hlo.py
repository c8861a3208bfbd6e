"""Read a scheduled HLO module, and count its cost.

Each instruction in the ENTRY computation is one launch or free:

- `parameter`, `get-tuple-element`, `tuple`, `bitcast`, `constant` and tokens are free.
  Any other instruction, including `copy`, is one kernel that reads its operands and
  writes its result.
- If an instruction slices an operand, even inside a fusion, only the slices count as
  read. If it updates a result in place, only the update counts as written. Otherwise, a
  loop over stacked layers would count the whole stack once per layer.
- A `while` counts its body and condition once per known iteration, or once. A
  `conditional` counts its most expensive branch and one kernel that reads the
  predicate. A `call` counts its computation. An async pair counts once: it reads at the
  start and writes at the end. An async fusion does both at the start.
"""

import collections
import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

FREE = frozenset(
    "parameter get-tuple-element tuple bitcast constant after-all add-dependency"
    " opt-barrier partition-id replica-id async-update".split()
)
COUNTED_AT_START = ("async-start", "call-start", "async-update", "fusion-start")
SLICING = frozenset(("slice", "dynamic-slice", "dynamic-update-slice"))
# Bytes per element of types whose names do not contain their bits.
BYTES = {"pred": 1, "token": 0, "opaque": 0}
PRODUCTS = frozenset(("dot", "ragged-dot", "scaled-dot", "convolution"))
LIBRARIES = ("__cublas$", "__cudnn$")
COLLECTIVES = frozenset(
    "all-gather all-reduce all-to-all collective-broadcast collective-permute"
    " ragged-all-to-all reduce-scatter".split()
)

type Computation = dict[str, Instruction]


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    rest: str  # the text after the operands; a parameter's number
    is_root: bool

    @property
    def bytes(self) -> float:
        return shape_bytes(self.shape)

    @property
    def dtype(self) -> str:
        """The dtype of the array, or of a tuple's first array."""
        return self.shape.lstrip("(").partition("[")[0]

    @property
    def is_product(self) -> bool:
        target = self.attribute(r'custom_call_target="([^"]+)"') or ""
        return self.opcode in PRODUCTS or target.startswith(LIBRARIES)

    def attribute(self, pattern: str) -> str | None:
        match = re.search(pattern, self.rest)
        return match[1] if match else None


class Cost(NamedTuple):
    """Launches and the bytes that they read and write."""

    kernels: float
    traffic: float


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        text: its scheduled HLO.
        temp: its peak temporary memory in bytes.
        unread: whether a custom call does not read an operand of a shape that it
            updates in place, as Mosaic kernels do. The HLO does not contain this.
    """

    text: str = dataclasses.field(repr=False)
    temp: int = 0
    unread: Callable[[str], bool] = lambda shape: False

    @functools.cached_property
    def computations(self) -> dict[str, Computation]:
        return parse(self.text)

    @functools.cached_property
    def entry(self) -> Computation:
        header = re.search(r"^ENTRY %?([\w.\-]+) ", self.text, re.MULTILINE)
        assert header is not None, "the module has no ENTRY computation"
        return self.computations[header[1]]

    @functools.cached_property
    def cost(self) -> Cost:
        return self._total(self.entry)

    @property
    def kernels(self) -> int:
        return round(self.cost.kernels)

    @property
    def traffic(self) -> int:
        return round(self.cost.traffic)

    def launches(self) -> list[tuple[Instruction, Cost]]:
        """Returns ENTRY's instructions with their costs, without the free ones."""
        costs = [(i, self._cost(i, self.entry)) for i in self.entry.values()]
        return [(instruction, cost) for instruction, cost in costs if any(cost)]

    @functools.cached_property
    def products(self) -> collections.Counter[tuple[str, ...]]:
        """Counts matmuls by the types of their operands."""
        runs: collections.Counter[tuple[str, ...]] = collections.Counter()
        for instruction, outer, times in self._runs(self.entry):
            if instruction.is_product:
                factors = instruction.operands[:2]
                runs[tuple(outer[name].dtype for name in factors)] += times
        return runs

    @functools.cached_property
    def collectives(self) -> collections.Counter[tuple[str, str]]:
        """Bytes that a device sends to collectives, by kind and type."""
        given: collections.Counter[tuple[str, str]] = collections.Counter()
        for instruction, outer, times in self._runs(self.entry):
            kind = instruction.opcode.removesuffix("-start")
            if kind in COLLECTIVES:
                for operand in (outer[name] for name in instruction.operands):
                    given[kind, operand.dtype] += times * round(operand.bytes)
        return given

    @functools.cached_property
    def aliased_bytes(self) -> int:
        """Bytes of the parameters whose buffers the outputs reuse."""
        header = self.text[: self.text.index("entry_computation_layout")]
        aliased = {int(n) for n in re.findall(r"\}?: \((\d+), \{", header)}
        found = [i for i in self.entry.values() if i.opcode == "parameter"]
        return round(sum(p.bytes for p in found if parameter_number(p) in aliased))

    @functools.cached_property
    def copies(self) -> list[int]:
        """Bytes of the result of each copy in ENTRY."""
        found = self.entry.values()
        return [round(i.bytes) for i in found if i.opcode in ("copy", "copy-done")]

    def _runs(
        self, computation: Computation, times: int = 1
    ) -> Iterator[tuple[Instruction, Computation, int]]:
        """Yields each instruction, its computation and its runs. A branch runs once."""
        for instruction in computation.values():
            yield instruction, computation, times
            for name in _called(instruction):
                inside = self.computations[name]
                yield from self._runs(inside, times * _trips(instruction))

    def _total(self, computation: Computation) -> Cost:
        return _add(self._cost(i, computation) for i in computation.values())

    def _cost(self, instruction: Instruction, outer: Computation) -> Cost:
        opcode = instruction.opcode.removesuffix("-start")
        called = [self.computations[name] for name in _called(instruction)]
        if opcode in FREE:
            return Cost(0, 0)
        if opcode.endswith("-done"):
            start = outer[instruction.operands[0]].opcode
            return Cost(0, 0 if start in COUNTED_AT_START else instruction.bytes)
        if opcode in ("call", "async"):
            return _add(map(self._total, called))
        if opcode == "while":
            return _add(map(self._total, called * _trips(instruction)))
        if opcode == "conditional":
            predicate = Cost(1, outer[instruction.operands[0]].bytes)
            dearest = max(map(self._total, called), key=lambda cost: cost.traffic)
            return _add([predicate, dearest])
        body = called[0] if opcode == "fusion" else None
        starts = instruction.opcode != opcode and body is None
        writes = 0 if starts else _writes(instruction, outer, body)
        names = (instruction.operands[n] for n in aliased_operands(instruction))
        spared = [outer[n].bytes for n in names if self.unread(outer[n].shape)]
        return Cost(1, _reads(instruction, outer, body) + writes - sum(spared))


def parse(text: str) -> dict[str, Computation]:
    """Maps names of computations to their instructions by name."""
    computations: dict[str, Computation] = {}
    for line in text.splitlines():
        header = re.match(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        assignment = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
        if header is not None:
            current = computations[header[1]] = {}
        elif assignment is not None:
            is_root, name = assignment[1] is not None, assignment[2]
            current[name] = _instruction(name, line[assignment.end() :], is_root)
    return computations


def _instruction(name: str, line: str, is_root: bool) -> Instruction:
    shape_end = _closing(line, 0) if line.startswith("(") else line.index(" ")
    shape, call = line[:shape_end], line[shape_end:].lstrip()
    opcode = call[: call.index("(")]
    end = _closing(call, len(opcode))
    inside = call[len(opcode) + 1 : end - 1]
    operands = tuple(re.findall(r"%([\w.\-]+)", inside))
    rest = call[end:] if operands else inside + call[end:]
    return Instruction(name, shape, opcode, operands, rest, is_root)


def _closing(text: str, start: int) -> int:
    """Returns the index after the parenthesis that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[place], 0)
        if depth == 0:
            return place + 1
    raise ValueError(f"unbalanced parentheses in {text!r}")


def shape_bytes(shape: str) -> float:
    """Returns the bytes of a printed shape, summed over a tuple."""
    total = 0.0
    for dtype, axes in re.findall(r"\b([a-z]+\d*\w*)\[([^\]]*)\]", shape):
        sizes = (int(size.removeprefix("<=")) for size in axes.split(",") if size)
        bits = re.search(r"\d+", dtype)  # f32, bf16, f8e4m3fn, s4, c64
        total += math.prod(sizes) * (int(bits[0]) / 8 if bits else BYTES[dtype])
    return total


def _trips(instruction: Instruction) -> int:
    """Returns the known number of a loop's iterations, or 1."""
    return int(instruction.attribute(r'known_trip_count":\{"n":"(\d+)"') or 1)


def _called(instruction: Instruction) -> list[str]:
    attributes = r"\b(?:calls|body|condition|\w+_computations?)=(\{[^}]*\}|%?[\w.\-]+)"
    if instruction.opcode in ("call", "call-start"):
        attributes = r"\bto_apply=(%?[\w.\-]+)"
    groups = re.findall(attributes, instruction.rest)
    return [name for group in groups for name in re.findall(r"[\w.\-]+", group)]


def _add(costs: Iterable[Cost]) -> Cost:
    costs = list(costs)
    return Cost(sum(c.kernels for c in costs), sum(c.traffic for c in costs))


def _reads(
    instruction: Instruction, outer: Computation, body: Computation | None
) -> float:
    sizes = [outer[name].bytes for name in instruction.operands]
    used = [_used(instruction, n, outer) for n in range(len(sizes))]
    if body is not None:
        needed = _needed(body)
        parameters = (i for i in body.values() if i.opcode == "parameter")
        by_number = {parameter_number(p): needed[p.name] for p in parameters}
        used = [by_number[n] for n in range(len(sizes))]
    return sum(size * part for size, part in zip(sizes, used, strict=True))


def _needed(body: Computation) -> dict[str, float]:
    """Maps each value of a fusion to the fraction that affects the result."""
    needed = {name: float(i.is_root) for name, i in body.items()}
    for user in reversed(body.values()):
        for number, name in enumerate(user.operands):
            part = needed[user.name] * _used(user, number, body)
            needed[name] = min(1, needed[name] + part)
    return needed


def _used(user: Instruction, number: int, computation: Computation) -> float:
    """Returns the fraction of operand `number` that an instruction reads."""
    if number > 0 or user.opcode not in SLICING:
        return 1
    if user.opcode == "dynamic-update-slice":
        return 0
    return user.bytes / computation[user.operands[0]].bytes


def _writes(
    instruction: Instruction, outer: Computation, body: Computation | None
) -> float:
    if instruction.opcode == "bitcast":
        return _writes(outer[instruction.operands[0]], outer, None)
    if instruction.opcode == "dynamic-update-slice":
        return outer[instruction.operands[1]].bytes
    if instruction.opcode == "tuple":
        return sum(_writes(outer[name], outer, None) for name in instruction.operands)
    if body is None:
        return instruction.bytes
    return _writes(next(i for i in body.values() if i.is_root), body, None)


def parameter_number(parameter: Instruction) -> int:
    """Returns the index of a parameter in its computation."""
    return int(parameter.rest.partition(",")[0])


def aliased_operands(instruction: Instruction) -> list[int]:
    """Returns the operands whose memory the results of a custom call reuse."""
    aliasing = r"output_to_operand_aliasing=(\{(?:[^{}]|\{[^{}]*\})*\})"
    pairs = instruction.attribute(aliasing) or ""
    return [int(n) for n in re.findall(r": \((\d+), \{", pairs)]
