"""Operations as a list: some of them, each with its line."""

import os
import re
from collections.abc import Iterable, Sequence

from jamp.diagnostics._operation import Operation

_COLUMNS = "line|module|operation|operands|runs in|why|FLOPs|reason".split("|")


def chosen(operations: Sequence[Operation], filter: str | None) -> list[Operation]:
    """Some operations.

    Args:
        operations: all.
        filter: "products", "float32" or a regex of what computes floats; None for all
            of that, "all" for the rest, too.

    Raises:
        ValueError: it is not a regex.
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


def short(source: str) -> str:
    """A line as one would name it from where one stands; never cut."""
    here = os.path.join(os.getcwd(), "")
    return source.removeprefix(here)


def text(operations: Iterable[Operation]) -> str:
    """A line for each operation, in columns; its place in the source comes last."""
    rows = [
        (
            f"{'· ' * len(op.path)}{op.primitive}",
            op.dtype or "",
            f"{op.why}",
            "" if op.flops is None else f"{op.flops:.3g}",
            op.module,
            short(op.source),
        )
        for op in operations
    ]
    return columns(("operation", "runs in", "why", "FLOPs", "module", "line"), *rows)


def columns(*rows: tuple[str, ...]) -> str:
    """Rows of cells as lines, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (map(str.ljust, row, widths) for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown(operations: Iterable[Operation]) -> str:
    """A table in Markdown, with the reasons."""
    rows = [_COLUMNS, ["---"] * len(_COLUMNS), *map(_cells, operations)]
    return "\n".join(f"| {' | '.join(map(_escaped, row))} |" for row in rows)


def _cells(op: Operation) -> tuple[str, ...]:
    trips = "" if op.trips == 1 else f" × {op.trips or '?'}"
    label = op.path[-1].partition(" ")[2] if op.path else ""
    label = f"{label}: " if label else ""
    return (
        short(op.source),
        op.module,
        f"{'· ' * len(op.path)}{label}{op.primitive}{trips}",
        " ".join(op.in_dtypes),
        op.dtype or "",
        f"{op.rule or ''} ({op.why})".strip(),
        "" if op.flops is None else f"{op.flops:,}",
        op.reason,
    )


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")
