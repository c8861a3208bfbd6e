"""Operations as a tree of the model's modules, with equal ones in one line."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from jamp.diagnostics._modules import Module, flops_of, label, modules_of
from jamp.diagnostics._operation import Operation

_LEAST = 30  # of the last column, however long the names are
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


class _Row(NamedTuple):
    name: str
    flops: str
    half: str
    rest: str


def text(operations: Sequence[Operation], depth: int | None, width: int) -> str:
    """The tree, as `Explanation.show` gives it.

    Raises:
        ValueError: `depth` is less than 1.
    """
    if depth is not None and depth < 1:
        raise ValueError(f"`depth` must be at least 1, got {depth}.")
    head = _Row("module", "FLOPs", "in half", "computed in float32, and why")
    rows = [head, *_rows(modules_of(operations), depth or 99, "")]
    names = max(len(row.name) for row in rows)
    flops = max(len(row.flops) for row in rows)
    lines = []
    for row in rows:
        before = f"{row.name:<{names}}  {row.flops:>{flops}}  {row.half:>7}  "
        room = max(width - len(before), _LEAST)
        rest = textwrap.wrap(row.rest, room, max_lines=2, placeholder=" …") or [""]
        lines += [before + rest[0], *(" " * len(before) + more for more in rest[1:])]
    return "\n".join(line.rstrip() for line in lines)


def _rows(module: Module, depth: int, indent: str) -> Iterator[_Row]:
    for group in module.groups():
        first = group[0]
        rest = _rest(first, depth)
        yield _Row(indent + label(group), flops_of(group), first.share(), rest)
        if depth > 1:
            yield from _rows(first, depth - 1, indent + "  ")


def _rest(module: Module, depth: int) -> str:
    """What a module computes in float32 itself; of all in it where nothing follows."""
    operations: Iterable[Operation] = module.all() if depth == 1 else module.own
    found = [op for op in operations if not op.is_half and op.is_forward]
    counts: dict[str, Counter[str]] = {}
    for op in found:
        counts.setdefault(op.why, Counter())[op.primitive] += 1
    parts = []
    for why, names in counts.items():
        words = (name if n == 1 else f"{name} {n}×" for name, n in names.items())
        reason = f" ({_WHY.get(why, why)})" if why != "level" else ""
        parts.append(", ".join(words) + reason)
    return "; ".join(parts)
