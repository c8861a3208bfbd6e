"""Operations as rows of one table: which of them, which columns, in which form."""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

from jamp.diagnostics._operation import Operation

type Cells = Mapping[str, Callable[[Operation], str]]

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_LISTED = "operation|runs in|why|FLOPs|module|line".split("|")
_MARKDOWN = "line|module|operation|operands|runs in|why|FLOPs|reason".split("|")

# Each column, as lists have it, and where Markdown has more room.
_CELLS: Cells = {
    "line": lambda op: short(op.source),
    "module": lambda op: op.module,
    "operation": lambda op: f"{'· ' * len(op.path)}{op.primitive}",
    "operands": lambda op: " ".join(op.in_dtypes),
    "runs in": lambda op: op.dtype or "",
    "why": lambda op: op.why,
    "FLOPs": lambda op: "" if op.flops is None else f"{op.flops:.3g}",
    "reason": lambda op: op.reason,
}
_IN_FULL: Cells = {
    **_CELLS,
    "operation": lambda op: _name_in_full(op),
    "why": lambda op: f"{op.rule or ''} ({op.why})".strip(),
    "FLOPs": lambda op: "" if op.flops is None else f"{op.flops:,}",
}


def chosen(operations: Sequence[Operation], filter: str | None) -> list[Operation]:
    """Operations that compute floats: "products", "float32", a regex, or None for all.

    "all" is the rest, too.

    Raises:
        ValueError: `filter` is not a regex.
    """
    if filter == "all":
        return list(operations)
    computing = [op for op in operations if op.matters]
    if filter is None:
        return computing
    if filter == "products":
        return [op for op in computing if op.is_float_matmul]
    if filter == "float32":
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


def _rows(
    operations: Iterable[Operation], names: Sequence[str], cells: Cells
) -> list[tuple[str, ...]]:
    """The cells of some columns."""
    return [tuple(cells[name](op) for name in names) for op in operations]


def text(operations: Iterable[Operation]) -> str:
    """A line for each operation, in columns; its place in the source comes last."""
    return columns(_LISTED, *_rows(operations, _LISTED, _CELLS))


def markdown(operations: Iterable[Operation]) -> str:
    """A table in Markdown, with the reasons."""
    body = _rows(operations, _MARKDOWN, _IN_FULL)
    escaped = ((cell.replace("|", "\\|") for cell in row) for row in body)
    lines = [_MARKDOWN, ["---"] * len(_MARKDOWN), *escaped]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def diff(ours: Iterable[Operation], theirs: Iterable[Operation]) -> str:
    """A line for each kind of operation of each module that differs.

    Modules that differ by a number are one: "Net/Block_*".
    """
    here, there = _dtypes_by_kind(ours), _dtypes_by_kind(theirs)
    pairs = {kind: (here.get(kind), there.get(kind)) for kind in here | there}
    found = [
        (*kind, *map(_words_of_counts, pair))
        for kind, pair in pairs.items()
        if pair[0] != pair[1]
    ]
    if not found:
        return "No difference."
    return columns(("module", "operation", "here", "there"), *found)


def columns(*rows: Sequence[str]) -> str:
    """Rows of cells as lines, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def short(source: str) -> str:
    """A line as one would name it from where one stands; never cut."""
    here = os.path.join(os.getcwd(), "")
    return source.removeprefix(here)


def magnitude(number: int) -> str:
    """A number in three digits and a letter; "" of 0."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number) if number else ""


def _name_in_full(op: Operation) -> str:
    trips = "" if op.trips == 1 else f" × {op.trips or '?'}"
    label = op.path[-1].partition(" ")[2] if op.path else ""
    label = f"{label}: " if label else ""
    return f"{'· ' * len(op.path)}{label}{op.primitive}{trips}"


def _dtypes_by_kind(
    operations: Iterable[Operation],
) -> dict[tuple[str, str], Counter[str]]:
    found: dict[tuple[str, str], Counter[str]] = {}
    for op in operations:
        if op.matters:
            kind = re.sub(r"\d+", "*", op.module), op.primitive
            found.setdefault(kind, Counter())[str(op.dtype)] += 1
    return found


def _words_of_counts(counts: Counter[str] | None) -> str:
    pairs = sorted((counts or {}).items())
    return ", ".join(f"{n} {dtype}" for dtype, n in pairs) or "none"
