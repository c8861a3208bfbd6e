"""The report of `compare`: modules, and the operations that add the largest errors."""

import dataclasses
import json
import math
from typing import Any

from jamp.diagnostics._modules import rows_of, table, tree_of
from jamp.diagnostics._source import short_line

_SHOWN = 10  # operations below the tree
_FLAGGED = 6  # roundings that an operation may add


@dataclasses.dataclass(frozen=True)
class Row:
    """An operation that both levels run, or all of its iterations in a loop.

    Attributes:
        module, source, phase, primitive: as in `explain`.
        dtype: the narrowest dtype that the operation reads or returns.
        rounding: the unit roundoff: 2**-11 in float16, 2**-8 in bfloat16, and fp8's
            after an fp8 matmul. For a cast of a condition, it is always half's.
        error: the norm of the results' difference, relative to the norm of the right
            result, in the worst iteration; inf if a result overflows.
        mean: the mean error of all iterations.
        added: the error beyond the errors of the operands, whose squares add up.
        ulps: the largest difference, in units in the last place of half.
        overflow, underflow: the shares of results that are not finite, and that are
            zero.
        loops: the iteration with the largest error.
        entering: the errors of the operands, with the modules that computed them.
        advice: a sentence with the fix, or "".
    """

    module: str
    source: str
    phase: str
    primitive: str
    dtype: str
    rounding: float
    error: float
    mean: float
    added: float
    ulps: float
    overflow: float
    underflow: float
    loops: tuple[str, ...]
    entering: tuple[tuple[str, float], ...]
    advice: str

    @property
    def entered(self) -> float:
        """The error of all operands, whose squares add up."""
        return math.hypot(*(error for _, error in self.entering))

    @property
    def is_late(self) -> bool:
        """Whether the operands already have an error of six roundings."""
        return self.entered > _FLAGGED * self.rounding

    def __str__(self) -> str:
        place = ", ".join(filter(None, (short_line(self.source), self.module)))
        return f"{self.primitive} ({self.phase}, {self.dtype}) at {place}"


@dataclasses.dataclass(frozen=True)
class Comparison:
    """The errors of a step at one level, relative to another level: `print` it.

    Attributes:
        levels: the names of the state's level and of the right level.
        loss: the losses at both levels.
        rows: the operations in the order of the program.
        gradients: the relative error of each gradient by its path.
        unaligned: the operations that only one program has.
    """

    levels: tuple[str, str]
    loss: tuple[float, float]
    rows: tuple[Row, ...]
    gradients: dict[str, float]
    unaligned: tuple[str, ...]

    @property
    def operations(self) -> tuple[Row, ...]:
        """The rows, sorted by the roundings that they add. The largest is first.

        Operations on operands with errors of six roundings are last.
        """
        key = lambda row: (row.is_late, -row.added / row.rounding)  # noqa: E731
        return tuple(sorted(self.rows, key=key))

    @property
    def flagged(self) -> tuple[Row, ...]:
        """The operations that add more than six roundings to good operands."""
        adding = (x for x in self.operations if x.added > _FLAGGED * x.rounding)
        return tuple(row for row in adding if not row.is_late)

    def first(self, beyond: float = 0.05) -> Row | None:
        """Returns the first operation of the program with a larger error, or None."""
        return next((row for row in self.rows if row.error > beyond), None)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings and numbers, for JSON."""
        found = dataclasses.asdict(self)
        found["rows"] = [dataclasses.asdict(row) for row in self.operations]
        return json.loads(json.dumps(found))

    def __str__(self) -> str:
        left, right = self.levels
        lines = [
            f"{left} against {right}: the loss is {self.loss[0]:.6g}, and "
            f"{self.loss[1]:.6g}. {len(self.flagged)} of {len(self.rows)} operations "
            f"add more than {_FLAGGED} roundings.",
            _module_table(self.rows),
        ]
        # The derivative of a sine computes the sine again.
        adding = [row for row in self.operations if row.added > row.rounding / 10]
        worst = {str(row): row for row in reversed(adding)}
        flagged = self.flagged
        for place, row in list(reversed(worst.items()))[:_SHOWN]:
            lines.append(f"- {place}: {_percent(row.error)}, {_details(row)}")
            lines += [f"  {row.advice}"] if row in flagged else []
        if self.unaligned:
            lines.append(f"Not compared, see `.unaligned`: {len(self.unaligned)}.")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<jamp.diagnostics.Comparison of {' and '.join(self.levels)}>"


def _module_table(rows: tuple[Row, ...]) -> str:
    lines: list[tuple[str, ...]] = [
        ("module", "forward", "backward", "error added", "worst operation")
    ]
    for label, _, node in rows_of(tree_of(rows)):
        passes = {row.phase: row for row in node.operations}  # the last of each pass
        ends = [passes.get(name) for name in ("forward", "backward")]
        errors = [_percent(row.error) if row else "" for row in ends]
        worst = max(node.operations, key=lambda row: row.added)
        added = _added_by(node.paths, node.operations)
        where = f"{worst.primitive} at {short_line(worst.source)}"
        lines.append((label, *errors, _percent(added), where))
    return table(lines)


def _added_by(paths: set[str], rows: list[Row]) -> float:
    """Returns the error of the last forward result beyond the errors from outside."""
    forward = [row for row in rows if row.phase == "forward"] or rows
    entering = [
        error
        for row in forward
        for module, error in row.entering
        if not any(f"{module}/".startswith(f"{path}/") for path in paths)
    ]
    most = max(entering, default=0.0)
    return max(forward[-1].error - most, 0.0) if math.isfinite(most) else 0.0


def _percent(error: float) -> str:
    return f"{error:.2%}" if math.isfinite(error) else "inf"


def _details(row: Row) -> str:
    parts = [f"{_percent(row.added)} added", f"{row.ulps:.2g} ulps"]
    if row.mean != row.error:
        # Several calls of a function share a row too, even outside of loops.
        where = [f"worst in {row.loops[-1]}"] if row.loops else []
        parts += [*where, f"{_percent(row.mean)} in the mean"]
    for name in ("overflow", "underflow"):
        share = getattr(row, name)
        parts += [f"{share:.1%} {name}"] if share else []
    return ", ".join(parts)
