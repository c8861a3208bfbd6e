"""The report of `explain`: operations as a tree of modules, or as a list."""

import dataclasses
import json
import os
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jamp.diagnostics._operation import (
    Operation,
    computes,
    is_fp8,
    is_half,
    total_flops,
    warnings_of,
)

_SHOWN = 6  # warnings below the tree
_LEAST = 30  # characters of the last column, however long the names are
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
# The tree has less room than the sentences of `explain`.
_WHY = {
    "carry": "sum of a loop",
    "feeder": "read in float32",
    "fusion": "fused",
    "list": "by the lists",
    "literal": "constant beyond half",
    "no vote": "constants only",
    "operands": "as its operands",
    "recorded": "by the lists",
    "smaller operand": "broadcast",
    "widest": "widest operand",
    "kept": "kept weight",
}


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The precision of each operation: `print` it.

    FLOPs count a while loop once, each branch of a cond, and one device of a
    `shard_map`.

    Attributes:
        dtype: the half dtype.
        operations: in the order of the program; the operations of a program follow the
            operation that holds it.
        promote: "widest" or "narrowest", for a function under autocast.
        level: the opt level of a step; "" for a function.
    """

    dtype: str
    operations: tuple[Operation, ...]
    promote: str = ""
    level: str = ""

    @property
    def matmul_flops(self) -> int:
        """FLOPs of all float matmuls and convolutions."""
        return total_flops(self.operations)[0]

    @property
    def half_share(self) -> float | None:
        """The share of the matmul FLOPs that runs in half; None if there are none."""
        total, half = total_flops(self.operations)
        return half / total if total else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Matmuls in float32 or of awkward sizes, and operations unknown to jamp."""
        found = Counter(
            w for op in self.operations for w in warnings_of(op, self.level)
        )
        return tuple(w if n == 1 else f"{w} ({n} ×)" for w, n in found.items())

    def to_dict(self) -> dict[str, Any]:
        """The report as dicts, lists, strings and numbers, for JSON."""
        names = "matmul_flops", "half_share", "warnings"
        totals = {name: getattr(self, name) for name in names}
        return json.loads(json.dumps(dataclasses.asdict(self) | totals))

    def show(
        self, *, depth: int | None = None, filter: str | None = None, width: int = 100
    ) -> str:
        """Returns the tree of modules, with equal ones in one line; or a list.

        Args:
            depth: how many levels of modules to show; None for all.
            filter: lists operations, each with its line: "products", "float32" (those
                that do not run in half), "all", or a regex to search in "module
                operation file:line", such as " exp ". With `depth`, the tree shows
                those operations alone.
            width: of the text. Source lines are never cut.

        Raises:
            ValueError: `depth` is less than 1, or `filter` is not a regex.
        """
        if depth is not None and depth < 1:
            raise ValueError(f"`depth` must be at least 1, got {depth}.")
        chosen = _chosen(self.operations, filter)
        if filter is not None and depth is None:
            return _columns(_LISTED, *map(_cells, chosen))
        warnings = [f"! {warning}" for warning in self.warnings]
        more = len(warnings) - _SHOWN
        if more > 0:
            warnings[_SHOWN:] = [f"! and {more} more in `.warnings`."]
        return "\n".join([self._title(), _tree(chosen, depth or 99, width), *warnings])

    def _title(self) -> str:
        matmuls = sum(op.flops is not None for op in self.operations)
        share = "" if self.half_share is None else f", {self.half_share:.1%} in half"
        fp8, _ = total_flops(op for op in self.operations if is_fp8(op.dtype))
        share += f", {fp8 / self.matmul_flops:.1%} in fp8" if fp8 else ""
        of = f"A step at {self.level}" if self.level else f"autocast, {self.promote}"
        return (
            f"{of}: {matmuls} matmuls and convolutions, {self.matmul_flops:.3g} FLOPs"
            f"{share} ({self.dtype})."
        )

    def __str__(self) -> str:
        return self.show()

    def __repr__(self) -> str:
        """The totals."""
        return f"<jamp.Explanation {self._title()} print() shows the modules>"


def _chosen(operations: Sequence[Operation], filter: str | None) -> list[Operation]:
    if filter == "all":
        return list(operations)
    found = [op for op in operations if computes(op)]
    if filter is None:
        return found
    if filter == "products":
        return [op for op in found if op.flops is not None]
    if filter == "float32":
        return [op for op in found if not is_half(op.dtype)]
    try:
        regex = re.compile(filter)
    except re.error as error:
        raise ValueError(
            f"`filter` must be 'products', 'float32', 'all' or a regex, got "
            f"{filter!r}: {error}."
        ) from None
    words = ((op, f"{op.module} {op.primitive} {op.source}") for op in found)
    return [op for op, text in words if regex.search(text)]


# ---- a list

_LISTED = ("operation", "runs in", "why", "FLOPs", "module", "line")


def _cells(op: Operation) -> tuple[str, ...]:
    """A row of the list; dots indent the operations of an inner program."""
    name = "· " * len(op.path) + op.primitive
    flops = _magnitude(op.flops or 0)
    return name, op.dtype or "", op.why, flops, op.module, _short(op.source)


def _columns(*rows: Sequence[str]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def _short(source: str) -> str:
    """A line relative to the current folder."""
    return source.removeprefix(os.path.join(os.getcwd(), ""))


def _magnitude(number: int) -> str:
    """A number in three digits and a letter; "" for 0."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number) if number else ""


# ---- a tree


@dataclasses.dataclass
class _Module:
    """Equal neighboring modules; or a source line outside of modules."""

    names: list[str]
    operations: list[Operation]  # of the first one
    own: list[Operation]  # those of them outside of inner modules
    inside: "list[_Module]"

    def likeness(self) -> object:
        """Equal for modules that compute the same in the same precisions."""
        forward = [op for op in self.own if op.phase == "forward"]
        own = Counter((op.primitive, op.dtype, op.why) for op in forward)
        inside = [(module.names, module.likeness()) for module in self.inside]
        return own, total_flops(self.own), inside

    def cells(self) -> tuple[str, str, str]:
        """The label, the FLOPs of each, and the share of them that is in half."""
        names, (total, half) = self.names, total_flops(self.operations)
        stem = re.escape(re.sub(r"\d+$", "", names[0]))
        is_row = all(re.fullmatch(stem + r"\d+", name) for name in names)
        joined = len(names) > 2 and is_row
        label = f"{names[0]} … {names[-1]}" if joined else ", ".join(names)
        if not total:
            return label, "", ""
        count = f"{len(names)} × " if len(names) > 1 else ""
        share = f"{half / total:.1%}".replace("100.0%", "100%")
        return label, count + _magnitude(total), share


def _modules(operations: Iterable[Operation], depth: int = 0) -> list[_Module]:
    """The modules inside of `depth` others."""
    by_path: dict[tuple[str, ...], list[Operation]] = {}
    for op in operations:
        names = _names(op)
        if computes(op) and len(names) > depth:
            by_path.setdefault(names[: depth + 1], []).append(op)
    modules: list[_Module] = []
    for path, members in by_path.items():
        own = [op for op in members if _names(op) == path]
        module = _Module([path[-1]], members, own, _modules(members, depth + 1))
        if modules and modules[-1].likeness() == module.likeness():
            modules[-1].names += module.names
        else:
            modules.append(module)
    return modules


def _names(op: Operation) -> tuple[str, ...]:
    if op.module:
        return tuple(op.module.split("/"))
    return (_short(op.source) or "(JAX)",)


def _tree(operations: Sequence[Operation], depth: int, width: int) -> str:
    head = ("module", "FLOPs", "in half", "computed in float32, and why")
    rows = [head, *_rows(_modules(operations), depth, "")]
    names, flops = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = []
    for name, number, share, rest in rows:
        before = f"{name:<{names}}  {number:>{flops}}  {share:>7}  "
        room = max(width - len(before), _LEAST)
        cut = textwrap.wrap(rest, room, max_lines=2, placeholder=" …") or [""]
        lines += [before + cut[0], *(" " * len(before) + more for more in cut[1:])]
    return "\n".join(line.rstrip() for line in lines)


def _rows(
    modules: Iterable[_Module], depth: int, indent: str
) -> Iterator[tuple[str, str, str, str]]:
    for module in modules:
        label, flops, share = module.cells()
        # The last level shows the operations of inner modules, too.
        rest = _float32_words(module.operations if depth == 1 else module.own)
        yield indent + label, flops, share, rest
        if depth > 1:
            yield from _rows(module.inside, depth - 1, indent + "  ")


def _float32_words(operations: Iterable[Operation]) -> str:
    """The operations in float32, and why."""
    counts: dict[str, Counter[str]] = {}
    for op in operations:
        if op.phase == "forward" and not is_half(op.dtype):
            counts.setdefault(op.why, Counter())[op.primitive] += 1
    parts = []
    for why, names in counts.items():
        words = (name if n == 1 else f"{name} {n}×" for name, n in names.items())
        reason = f" ({_WHY.get(why, why)})" if why != "level" else ""
        parts.append(", ".join(words) + reason)
    return "; ".join(parts)
