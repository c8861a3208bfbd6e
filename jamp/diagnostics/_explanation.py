"""The report of `explain`: operations as a tree of modules."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any

from jamp.diagnostics._modules import rows_of, table, tree_of
from jamp.diagnostics._operation import (
    Operation,
    computes,
    is_fp8,
    is_half,
    total_flops,
    warning_of,
)

_SHOWN = 6  # warnings below the tree
_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclasses.dataclass(frozen=True)
class Explanation:
    """The precision of each operation: `print` it.

    `print` shows a tree of modules, with equal modules in one line. FLOPs count a while
    loop once, each branch of a cond, and one device of a `shard_map`.

    Attributes:
        dtype: the half dtype.
        operations: the operations in the order of the program. The operations of an
            inner program follow the operation that contains it.
        promote: "widest" or "narrowest", for a function under autocast.
        level: the opt level of a step; "" for a function.
    """

    dtype: str
    operations: tuple[Operation, ...]
    promote: str = ""
    level: str = ""

    @property
    def half_share(self) -> float | None:
        """The share of the matmul FLOPs that runs in half; None if there are none."""
        total, half = total_flops(self.operations)
        return half / total if total else None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Warnings: float32 matmuls, unknown operations."""
        found = Counter(warning_of(op, self.level) for op in self.operations)
        return tuple(w if n == 1 else f"{w} ({n} ×)" for w, n in found.items() if w)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report as dicts, lists, strings and numbers, for JSON."""
        totals = {"half_share": self.half_share, "warnings": self.warnings}
        return json.loads(json.dumps(dataclasses.asdict(self) | totals))

    def __str__(self) -> str:
        rows = [("module", "FLOPs", "in half", "computed in float32, and why")]
        for label, times, node in rows_of(tree_of(filter(computes, self.operations))):
            # The numbers are averages over equal modules.
            count = len(node.paths)
            total, half = total_flops(node.operations)
            flops = (f"{times} × " if times > 1 else "") + _magnitude(total // count)
            share = f"{half / total:.1%}".replace("100.0%", "100%") if total else ""
            words = _float32_words(node.own, count)
            rows.append((label, flops if total else "", share, words))
        warnings = [f"! {warning}" for warning in self.warnings]
        if len(warnings) > _SHOWN:
            more = len(warnings) - _SHOWN
            warnings[_SHOWN:] = [f"! and {more} more in `.warnings`."]
        return "\n".join([self._title(), table(rows), *warnings])

    def __repr__(self) -> str:
        """Returns the totals."""
        return f"<jamp.Explanation {self._title()} print() shows the modules>"

    def _title(self) -> str:
        matmuls = sum(op.flops is not None for op in self.operations)
        total, half = total_flops(self.operations)
        fp8, _ = total_flops(op for op in self.operations if is_fp8(op.dtype))
        share = f", {half / total:.1%} in half" if total else ""
        share += f", {fp8 / total:.1%} in fp8" if fp8 else ""
        of = f"A step at {self.level}" if self.level else f"autocast, {self.promote}"
        return (
            f"{of}: {matmuls} matmuls and convolutions, {total:.3g} FLOPs{share} "
            f"({self.dtype})."
        )


def _magnitude(number: int) -> str:
    """Formats a number as three digits and a letter, or "" for 0."""
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number) if number else ""


def _float32_words(operations: Iterable[Operation], modules: int) -> str:
    """Describes the float32 operations in one of several equal modules."""
    counts: dict[str, Counter[str]] = {}
    for op in operations:
        if op.phase == "forward" and not is_half(op.dtype):
            counts.setdefault(op.why, Counter())[op.primitive] += 1
    parts = []
    for why, names in counts.items():
        pairs = ((name, -(-n // modules)) for name, n in names.items())
        words = (name if n == 1 else f"{name} {n}×" for name, n in pairs)
        parts.append(", ".join(words) + (f" ({why})" if why != "level" else ""))
    return "; ".join(parts)
