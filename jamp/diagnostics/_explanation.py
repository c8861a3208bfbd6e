"""What `explain` returns: the operations, their totals, and tables of them."""

import dataclasses
import importlib.util
import io
import os
import shutil
from collections.abc import Iterator
from typing import Any

_HALF = ("float16", "bfloat16")
_COLUMNS = ("line", "name stack", "operation", "operands", "runs in", "why", "FLOPs")


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of the user's program.

    Attributes:
        path: the operations that hold the program that it is in, from outside inward.
        source: `file:line`, the innermost outside of JAX.
        name_stack: the scopes that it is in, as in profiles.
        primitive: its name, as `jax.make_jaxpr` prints it.
        trips: how often it runs the program that it holds; None if nobody knows.
        in_dtypes: of its operands in the user's program.
        dtype: what it runs in; None if it holds programs, or results without a dtype.
        rule: of the lists or of the region: "half", "float32", "promote", "move" or
            "recorded".
        why: what decided: "list", "region", "precision", "feeder", "fusion", "bias",
            "norm", "operands", "widest", "narrowest", "smaller operand", "literal",
            "no vote", "recorded", "own dtype", "no float32", "unknown primitive" or
            "program".
        reason: the same in a sentence; for a list, the reason that its row gives.
        flops: of a matmul or convolution, in all trips of the scans around it.
    """

    path: tuple[str, ...]
    source: str
    name_stack: str
    primitive: str
    trips: int | None
    in_dtypes: tuple[str, ...]
    dtype: str | None
    rule: str | None
    why: str
    reason: str
    flops: int | None

    @property
    def is_float_matmul(self) -> bool:
        """Whether it is a matmul or convolution, and not one of integers."""
        return self.flops is not None and "float" in str(self.dtype)


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What autocast does with a program: `print` it, or take one of its other forms.

    A while loop's FLOPs count once, each branch of a cond counts, and what is inside of
    `shard_map` counts for one device.

    Attributes:
        dtype: the half dtype.
        promote: "widest" or "narrowest".
        operations: in the order of the program; what one holds comes right after it.
    """

    dtype: str
    promote: str
    operations: tuple[Operation, ...]

    @property
    def matmul_flops(self) -> int:
        """FLOPs of all matmuls and convolutions of floats."""
        return sum(op.flops or 0 for op in self.operations if op.is_float_matmul)

    @property
    def half_matmul_flops(self) -> int:
        """FLOPs of those that run in half."""
        matmuls = (op for op in self.operations if op.is_float_matmul)
        return sum(op.flops or 0 for op in matmuls if op.dtype in _HALF)

    @property
    def half_share(self) -> float | None:
        """The part of the matmul FLOPs that runs in half; None if there are none."""
        total = self.matmul_flops
        return self.half_matmul_flops / total if total else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Matmuls that are not in half, and operations that autocast does not know."""
        return tuple(filter(None, map(_warning, self.operations)))

    def to_dict(self) -> dict[str, Any]:
        """As dicts, lists, strings and numbers, for JSON."""
        operations = [dataclasses.asdict(op) for op in self.operations]
        for op in operations:
            op |= {"path": list(op["path"]), "in_dtypes": list(op["in_dtypes"])}
        return {
            "dtype": self.dtype,
            "promote": self.promote,
            "operations": operations,
            "matmul_flops": self.matmul_flops,
            "half_matmul_flops": self.half_matmul_flops,
            "half_share": self.half_share,
            "warnings": list(self.warnings),
        }

    def to_markdown(self) -> str:
        """As a table in Markdown, with the reasons, the totals and the warnings."""
        lines = [(*_cells(op), op.reason) for op in self.operations]
        columns = (*_COLUMNS, "reason")
        lines = [columns, ("---",) * len(columns), *lines]
        table = [f"| {' | '.join(map(_escaped, line))} |" for line in lines]
        warnings = [f"- {warning}" for warning in self.warnings]
        parts = [table, [self._totals()], warnings]
        return "\n\n".join("\n".join(part) for part in parts if part) + "\n"

    def __str__(self) -> str:
        """The table as text, with rich if it is installed, or else in Markdown."""
        if importlib.util.find_spec("rich") is None:
            return self.to_markdown()
        from rich.console import Console

        width = shutil.get_terminal_size((160, 24)).columns
        text = io.StringIO()
        Console(file=text, width=width, color_system=None).print(self)
        return text.getvalue()

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """What rich's `print` shows, in colors."""
        del console, options
        from rich.table import Table
        from rich.text import Text

        table = Table(*_COLUMNS)
        for op in self.operations:
            style = "bold green" if op.dtype in _HALF else ""
            table.add_row(*map(Text, _cells(op)), style=style)
        yield table
        yield Text(self._totals())
        for warning in self.warnings:
            yield Text(f"! {warning}", style="yellow")

    def _totals(self) -> str:
        matmuls = sum(op.is_float_matmul for op in self.operations)
        share = "" if self.half_share is None else f", {self.half_share:.1%} in half"
        return (
            f"{len(self.operations)} operations; {matmuls} matmuls and convolutions: "
            f"{self.matmul_flops:.3g} FLOPs{share} ({self.dtype})."
        )


def _cells(op: Operation) -> tuple[str, ...]:
    trips = "" if op.trips == 1 else f" × {op.trips or '?'}"
    label = op.path[-1].partition(" ")[2] if op.path else ""
    label = f"{label}: " if label else ""
    return (
        _short(op.source),
        op.name_stack,
        f"{'· ' * len(op.path)}{label}{op.primitive}{trips}",
        " ".join(op.in_dtypes),
        op.dtype or "",
        f"{op.rule or ''} ({op.why})".strip(),
        "" if op.flops is None else f"{op.flops:,}",
    )


def _short(source: str) -> str:
    """The last folder and the file: enough to know the line again."""
    return "/".join(source.split(os.sep)[-2:])


def _escaped(cell: str) -> str:
    return cell.replace("|", "\\|")


def _warning(op: Operation) -> str | None:
    where = f"{op.source}: " if op.source else ""
    if op.is_float_matmul and op.dtype not in _HALF:
        return f"{where}{op.primitive} runs in {op.dtype} ({op.why}). {op.reason}"
    if op.why == "unknown primitive":
        return f"{where}{op.primitive}: {op.why}. {op.reason}"
    return None
