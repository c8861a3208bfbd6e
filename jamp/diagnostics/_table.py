"""Operations as one table: which of them, which columns, in which form.

Their rows are listed, or summed by the modules of the model that they are in: a tree.
"""

import dataclasses
import functools
import os
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

from jamp.diagnostics._operation import Operation, product_flops

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_LISTED = "operation|runs in|why|FLOPs|module|line".split("|")
_LEAST = 30  # of the last column, however long the names are
_HEAD = ("module", "FLOPs", "in half", "computed in float32, and why")
# Why an operation is not in half, in fewer words than `explain` has sentences for it.
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

# The columns that there are, by name; every form shows some of them.
CELLS: dict[str, Callable[[Operation], str]] = {
    "line": lambda op: short(op.source),
    "module": lambda op: op.module,
    "operation": lambda op: _name_in_full(op),
    "operands": lambda op: " ".join(op.in_dtypes),
    "runs in": lambda op: op.dtype or "",
    "why": lambda op: op.why,
    "FLOPs": lambda op: magnitude(op.flops or 0),
    "bytes": lambda op: magnitude(op.bytes),
    "reason": lambda op: op.reason,
}


def chosen(operations: Sequence[Operation], filter: str | None) -> list[Operation]:
    """Operations that compute floats: "products", "float32", a regex, or None for all.

    "all" is the rest, too.
    """
    computing = [op for op in operations if op.matters]
    match filter:
        case "all":
            return list(operations)
        case None:
            return computing
        case "products":
            return [op for op in computing if op.is_float_matmul]
        case "float32":
            return [op for op in computing if not op.is_half]
    try:
        regex = re.compile(filter)
    except re.error as error:
        raise ValueError(
            f"`filter` must be 'products', 'float32', 'all' or a regex, got "
            f"{filter!r}: {error}."
        ) from None
    words = ((op, f"{op.module} {op.primitive} {op.source}") for op in computing)
    return [op for op, text in words if regex.search(text)]


def text(operations: Iterable[Operation]) -> str:
    """A line for each operation, in columns; its place in the source comes last."""
    return columns(_LISTED, *_rows(operations, _LISTED))


def _rows(operations: Iterable[Operation], names: Sequence[str]) -> list[list[str]]:
    return [[CELLS[name](op) for name in names] for op in operations]


def columns(*rows: Sequence[str]) -> str:
    """Rows of cells as lines, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def short(source: str) -> str:
    """A line as one would name it from where one stands; never cut."""
    return source.removeprefix(os.path.join(os.getcwd(), ""))


def magnitude(number: int) -> str:
    """A number in three digits and a letter; "" of 0."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number) if number else ""


def _name_in_full(op: Operation) -> str:
    """An operation with how deep in programs it is, and how often it runs its own."""
    trips = "" if op.trips == 1 else f" × {op.trips or '?'}"
    label = op.path[-1].partition(" ")[2] if op.path else ""
    label = f"{label}: " if label else ""
    return f"{'· ' * len(op.path)}{label}{op.primitive}{trips}"


# ---- by modules


@dataclasses.dataclass
class ModuleGroup:
    """Modules next to each other that are equal; or a line outside of modules."""

    names: list[str]  # of each, in the module that they are in
    path: str  # of the modules that they are in, and of the first
    operations: list[Operation]  # of the first
    own: list[Operation]  # those of them that are in no module inside of it
    inside: "list[ModuleGroup]"

    @property
    def label(self) -> str:
        """What they are called: "Block_0 … Block_11"."""
        names = self.names
        stem = re.escape(re.sub(r"\d+$", "", names[0]))
        if len(names) > 2 and all(re.fullmatch(stem + r"\d+", name) for name in names):
            return f"{names[0]} … {names[-1]}"
        return ", ".join(names)

    @property
    def flops(self) -> str:
        """How many they are, and the FLOPs of the products of one; "" of none."""
        flops, count = magnitude(product_flops(self.operations)[0]), len(self.names)
        return f"{count} × {flops}" if flops and count > 1 else flops

    @property
    def share(self) -> str:
        """How much of these FLOPs is in half; "" if there are none."""
        total, half = product_flops(self.operations)
        return f"{half / total:.1%}".replace("100.0%", "100%") if total else ""

    @functools.cached_property
    def likeness(self) -> object:
        """Equal for modules that compute the same in the same precisions."""
        forward = [op for op in self.own if op.is_forward]
        own = Counter((op.primitive, op.dtype, op.why) for op in forward)
        inside = [(group.names, group.likeness) for group in self.inside]
        return own, product_flops(self.own), inside


def modules_of(operations: Iterable[Operation], depth: int = 0) -> list[ModuleGroup]:
    """The groups of all operations that matter; what is in no module by its line.

    Those of modules that are in `depth` others.
    """
    by_path: dict[tuple[str, ...], list[Operation]] = {}
    for op in operations:
        names = _names(op)
        if op.matters and len(names) > depth:
            by_path.setdefault(names[: depth + 1], []).append(op)
    groups: list[ModuleGroup] = []
    for path, members in by_path.items():
        group = ModuleGroup(
            names=[path[-1]],
            path="/".join(path),
            operations=members,
            own=[op for op in members if _names(op) == path],
            inside=modules_of(members, depth + 1),
        )
        if groups and groups[-1].likeness == group.likeness:
            groups[-1].names += group.names
        else:
            groups.append(group)
    return groups


def _names(op: Operation) -> tuple[str, ...]:
    return tuple(op.module.split("/")) if op.module else (short(op.source) or "(JAX)",)


def tree(operations: Sequence[Operation], depth: int | None, width: int) -> str:
    """The tree, as `Explanation.show` gives it."""
    if depth is not None and depth < 1:
        raise ValueError(f"`depth` must be at least 1, got {depth}.")
    rows = [_HEAD, *_lines(modules_of(operations), depth or 99, "")]
    names, flops = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = []
    for name, number, share, rest in rows:
        before = f"{name:<{names}}  {number:>{flops}}  {share:>7}  "
        room = max(width - len(before), _LEAST)
        cut = textwrap.wrap(rest, room, max_lines=2, placeholder=" …") or [""]
        lines += [before + cut[0], *(" " * len(before) + more for more in cut[1:])]
    return "\n".join(line.rstrip() for line in lines)


def _lines(
    groups: Iterable[ModuleGroup], depth: int, indent: str
) -> Iterator[tuple[str, str, str, str]]:
    for group in groups:
        # All in it where nothing follows.
        rest = _float32_words(group.operations if depth == 1 else group.own)
        yield indent + group.label, group.flops, group.share, rest
        if depth > 1:
            yield from _lines(group.inside, depth - 1, indent + "  ")


def _float32_words(operations: Iterable[Operation]) -> str:
    """What is computed in float32, and why."""
    counts: dict[str, Counter[str]] = {}
    for op in operations:
        if not op.is_half and op.is_forward:
            counts.setdefault(op.why, Counter())[op.primitive] += 1
    parts = []
    for why, names in counts.items():
        words = (name if n == 1 else f"{name} {n}×" for name, n in names.items())
        reason = f" ({_WHY.get(why, why)})" if why != "level" else ""
        parts.append(", ".join(words) + reason)
    return "; ".join(parts)
