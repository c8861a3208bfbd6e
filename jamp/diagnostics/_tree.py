"""Operations as a tree of the model's modules, with equal ones in one line."""

import dataclasses
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from jamp.diagnostics._operation import Operation
from jamp.diagnostics._table import short

_UNITS = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
_HEAD = ("module", "FLOPs", "in half", "computed in float32, and why")
_LEAST = 30  # of the last column, however long the names are
# Why an operation is not in half, in fewer words than `explain` has sentences for it.
_WHY = {
    "feeder": "read in float32",
    "fusion": "fused",
    "list": "by the lists",
    "literal": "constant beyond half",
    "no vote": "constants only",
    "operands": "as its operands",
    "recorded": "by the lists",
    "smaller operand": "broadcast",
    "widest": "widest operand",
}


@dataclasses.dataclass
class _Node:
    """A module, or a line of the source outside of modules.

    Attributes:
        name: in the module that it is in.
        own: its operations that are in no module of its own.
        inside: the modules in it, by name.
    """

    name: str
    own: list[Operation] = dataclasses.field(default_factory=list)
    inside: "dict[str, _Node]" = dataclasses.field(default_factory=dict)

    def all(self) -> Iterator[Operation]:
        yield from self.own
        for node in self.inside.values():
            yield from node.all()

    def likeness(self) -> Any:
        """Equal for modules that compute the same in the same precisions."""
        forward = [op for op in self.own if not op.is_backward]
        own = Counter((op.primitive, op.dtype, op.why) for op in forward)
        inside = tuple((n.name, n.likeness()) for n in self.inside.values())
        return own, _total(self.own), inside


class _Row(NamedTuple):
    name: str
    flops: str
    half: str
    rest: str


def text(operations: Sequence[Operation], depth: int | None, width: int) -> str:
    """The tree.

    Args:
        operations: of the whole program.
        depth: how many levels of modules to show; None for all.
        width: what lines are cut to, but for names and lines of the source.

    Raises:
        ValueError: `depth` is less than 1.
    """
    if depth is not None and depth < 1:
        raise ValueError(f"`depth` must be at least 1, got {depth}.")
    root = _Node("")
    for op in operations:
        if op.matters:
            _put(root, op)
    rows = [_Row(*_HEAD), *_rows(root, depth or 99, "")]
    names = max(len(row.name) for row in rows)
    flops = max(len(row.flops) for row in rows)
    lines = []
    for row in rows:
        before = f"{row.name:<{names}}  {row.flops:>{flops}}  {row.half:>7}  "
        room = max(width - len(before), _LEAST)
        rest = textwrap.wrap(row.rest, room, max_lines=2, placeholder=" …") or [""]
        lines += [before + rest[0], *(" " * len(before) + more for more in rest[1:])]
    return "\n".join(line.rstrip() for line in lines)


def _put(root: _Node, op: Operation) -> None:
    node = root
    # What is in no module goes by its line.
    for name in op.module.split("/") if op.module else [short(op.source) or "(JAX)"]:
        node = node.inside.setdefault(name, _Node(name))
    node.own.append(op)


def _rows(node: _Node, depth: int, indent: str) -> Iterator[_Row]:
    for group in _groups(list(node.inside.values())):
        first = group[0]
        times = f"{len(group)} × " if len(group) > 1 else ""
        name = f"{indent}{_name([n.name for n in group])}"
        yield _Row(name, f"{times}{_flops(first)}", _half(first), _rest(first, depth))
        if depth > 1:
            yield from _rows(first, depth - 1, indent + "  ")


def _groups(nodes: list[_Node]) -> list[list[_Node]]:
    """Modules next to each other that are equal."""
    groups: list[list[_Node]] = []
    likeness = None
    for node in nodes:
        new = node.likeness()
        if groups and new == likeness:
            groups[-1].append(node)
        else:
            groups.append([node])
        likeness = new
    return groups


def _name(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    stem = re.sub(r"\d+$", "", names[0])
    if len(names) == 2 or not all(
        re.fullmatch(re.escape(stem) + r"\d+", n) for n in names
    ):
        return ", ".join(names)
    return f"{names[0]} … {names[-1]}"


def _total(operations: Iterable[Operation]) -> tuple[int, int]:
    """FLOPs of the products, and of those in half."""
    matmuls = [op for op in operations if op.is_float_matmul]
    half = sum(op.flops or 0 for op in matmuls if op.is_half)
    return sum(op.flops or 0 for op in matmuls), half


def _flops(node: _Node) -> str:
    total, _ = _total(node.all())
    for size, unit in _UNITS:
        if total >= size:
            return f"{total / size:.3g} {unit}"
    return str(total) if total else ""


def _half(node: _Node) -> str:
    total, half = _total(node.all())
    return f"{half / total:.1%}".replace("100.0%", "100%") if total else ""


def _rest(node: _Node, depth: int) -> str:
    """What a module computes in float32 itself; of all in it where nothing follows."""
    operations: Iterable[Operation] = node.all() if depth == 1 else node.own
    found = [op for op in operations if not op.is_half and not op.is_backward]
    counts: dict[str, Counter[str]] = {}
    for op in found:
        counts.setdefault(op.why, Counter())[op.primitive] += 1
    parts = []
    for why, names in counts.items():
        words = (name if n == 1 else f"{name} {n}×" for name, n in names.items())
        reason = f" ({_WHY.get(why, why)})" if why != "level" else ""
        parts.append(", ".join(words) + reason)
    return "; ".join(parts)
