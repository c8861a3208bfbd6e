"""Operations as rows of one table: which of them, which columns, in which form."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from jamp.diagnostics._operation import Operation

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_LISTED = "operation|runs in|why|FLOPs|module|line".split("|")
_MARKDOWN = "line|module|operation|operands|runs in|why|FLOPs|reason".split("|")

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

    Raises:
        ValueError: `filter` is not a regex.
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


def markdown(operations: Iterable[Operation]) -> str:
    """A table in Markdown, with the reasons."""
    rows = [_MARKDOWN, ["---"] * len(_MARKDOWN), *_rows(operations, _MARKDOWN)]
    escaped = ([cell.replace("|", "\\|") for cell in row] for row in rows)
    return "\n".join(f"| {' | '.join(row)} |" for row in escaped)


def _rows(operations: Iterable[Operation], names: Sequence[str]) -> list[list[str]]:
    return [[CELLS[name](op) for name in names] for op in operations]


def diff(ours: Iterable[Operation], theirs: Iterable[Operation]) -> str:
    """A line for each kind of operation of each module that differs.

    Modules that differ by a number are one: "Net/Block_*".
    """
    counts: dict[tuple[str, str], list[Counter[str]]] = {}
    for side, operations in enumerate((ours, theirs)):
        for op in operations:
            if op.matters:
                kind = re.sub(r"\d+", "*", op.module), op.primitive
                both = counts.setdefault(kind, [Counter(), Counter()])
                both[side][str(op.dtype)] += 1
    found = [
        (*kind, *map(_words_of, both))
        for kind, both in counts.items()
        if both[0] != both[1]
    ]
    if not found:
        return "No difference."
    return columns(("module", "operation", "here", "there"), *found)


def _words_of(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {dtype}" for dtype, n in sorted(counts.items())) or "none"


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
