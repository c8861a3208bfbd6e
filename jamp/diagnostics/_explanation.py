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
_WIDTH = 100  # characters of a line of the tree
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

    def show(self, *, depth: int | None = None, filter: str | None = None) -> str:
        """Returns the tree of modules, with equal ones in one line; or a list.

        Args:
            depth: how many levels of modules to show; None for all.
            filter: lists operations, each with its line: "products", "float32" (those
                that do not run in half), "all", or a regex to search in "module
                operation file:line". With `depth`, the tree shows those alone.

        Raises:
            ValueError: `depth` is less than 1, or `filter` is not a regex.
        """
        if depth is not None and depth < 1:
            raise ValueError(f"`depth` must be at least 1, got {depth}.")
        chosen = _chosen(self.operations, filter)
        if filter is not None and depth is None:
            return _columns(_LISTED, *map(_cells, chosen))
        warnings = [f"! {warning}" for warning in self.warnings]
        if len(warnings) > _SHOWN:
            more = len(warnings) - _SHOWN
            warnings[_SHOWN:] = [f"! and {more} more in `.warnings`."]
        return "\n".join([self._title(), _tree(chosen, depth or 99), *warnings])

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
        search = re.compile(filter).search
    except re.error as error:
        raise ValueError(
            f"`filter` must be 'products', 'float32', 'all' or a regex, got "
            f"{filter!r}: {error}."
        ) from None
    return [op for op in found if search(f"{op.module} {op.primitive} {op.source}")]


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


class _Node:
    """The modules of one pattern, such as `Block_*`; or a source line."""

    def __init__(self):
        self.paths: set[str] = set()  # of the modules
        self.operations: list[Operation] = []
        self.own: list[Operation] = []  # those outside of inner nodes
        self.inside: dict[str, _Node] = {}


def _tree(operations: Iterable[Operation], depth: int) -> str:
    root = _Node()
    for op in filter(computes, operations):
        names = op.module.split("/") if op.module else [_short(op.source) or "(JAX)"]
        node = root
        for i, name in enumerate(names[:depth], 1):
            pattern = re.sub(r"\d+", "*", name) if op.module else name
            node = node.inside.setdefault(pattern, _Node())
            node.paths.add("/".join(names[:i]))
            node.operations.append(op)
        node.own.append(op)
    rows = [("module", "FLOPs", "in half", "computed in float32, and why")]
    rows += _rows(root, "")
    names, flops = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = []
    for name, number, share, rest in rows:
        before = f"{name:<{names}}  {number:>{flops}}  {share:>7}  "
        room = max(_WIDTH - len(before), _LEAST)
        cut = textwrap.wrap(rest, room, max_lines=2, placeholder=" …") or [""]
        lines += [before + cut[0], *(" " * len(before) + more for more in cut[1:])]
    return "\n".join(line.rstrip() for line in lines)


def _rows(node: _Node, indent: str) -> Iterator[tuple[str, str, str, str]]:
    """The cells of inner nodes. Counts and FLOPs are averages over equal modules."""
    for pattern, inner in node.inside.items():
        count = len(inner.paths)
        names = {path.rpartition("/")[2] for path in inner.paths}
        label = names.pop() if len(names) == 1 and "*" in pattern else pattern
        times = round(count / max(1, len(node.paths)))
        total, half = total_flops(inner.operations)
        flops = (f"{times} × " if times > 1 else "") + _magnitude(total // count)
        share = f"{half / total:.1%}".replace("100.0%", "100%") if total else ""
        words = _float32_words(inner.own, count)
        yield indent + label, flops if total else "", share, words
        yield from _rows(inner, indent + "  ")


def _float32_words(operations: Iterable[Operation], modules: int) -> str:
    """The operations in float32, and why, in one of several equal modules."""
    counts: dict[str, Counter[str]] = {}
    for op in operations:
        if op.phase == "forward" and not is_half(op.dtype):
            counts.setdefault(op.why, Counter())[op.primitive] += 1
    parts = []
    for why, names in counts.items():
        pairs = ((name, -(-n // modules)) for name, n in names.items())
        words = (name if n == 1 else f"{name} {n}×" for name, n in pairs)
        reason = f" ({_WHY.get(why, why)})" if why != "level" else ""
        parts.append(", ".join(words) + reason)
    return "; ".join(parts)
