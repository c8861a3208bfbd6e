"""Operations by the modules of the model that they are in: the tree, and its text."""

import dataclasses
import functools
import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from jamp.diagnostics._operation import Operation, product_flops
from jamp.diagnostics._table import magnitude, short

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


@dataclasses.dataclass
class Group:
    """Modules next to each other that are equal; or a line outside of modules."""

    names: list[str]  # of each, in the module that they are in
    path: str  # of the modules that they are in, and of the first
    operations: list[Operation]  # of the first
    own: list[Operation]  # those of them that are in no module inside of it
    inside: "list[Group]"

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


def groups_of(operations: Iterable[Operation], depth: int = 0) -> list[Group]:
    """The groups of all operations that matter; what is in no module by its line.

    Those of modules that are in `depth` others.
    """
    by_path: dict[tuple[str, ...], list[Operation]] = {}
    for op in operations:
        names = _names(op)
        if op.matters and len(names) > depth:
            by_path.setdefault(names[: depth + 1], []).append(op)
    groups: list[Group] = []
    for path, members in by_path.items():
        group = Group(
            names=[path[-1]],
            path="/".join(path),
            operations=members,
            own=[op for op in members if _names(op) == path],
            inside=groups_of(members, depth + 1),
        )
        if groups and groups[-1].likeness == group.likeness:
            groups[-1].names += group.names
        else:
            groups.append(group)
    return groups


def _names(op: Operation) -> tuple[str, ...]:
    return tuple(op.module.split("/")) if op.module else (short(op.source) or "(JAX)",)


def text(operations: Sequence[Operation], depth: int | None, width: int) -> str:
    """The tree, as `Explanation.show` gives it.

    Raises:
        ValueError: `depth` is less than 1.
    """
    if depth is not None and depth < 1:
        raise ValueError(f"`depth` must be at least 1, got {depth}.")
    rows = [_HEAD, *_rows(groups_of(operations), depth or 99, "")]
    names, flops = (max(len(row[i]) for row in rows) for i in (0, 1))
    lines = []
    for name, number, share, rest in rows:
        before = f"{name:<{names}}  {number:>{flops}}  {share:>7}  "
        room = max(width - len(before), _LEAST)
        cut = textwrap.wrap(rest, room, max_lines=2, placeholder=" …") or [""]
        lines += [before + cut[0], *(" " * len(before) + more for more in cut[1:])]
    return "\n".join(line.rstrip() for line in lines)


def _rows(
    groups: Iterable[Group], depth: int, indent: str
) -> Iterator[tuple[str, str, str, str]]:
    for group in groups:
        # All in it where nothing follows.
        rest = _float32_words(group.operations if depth == 1 else group.own)
        yield indent + group.label, group.flops, group.share, rest
        if depth > 1:
            yield from _rows(group.inside, depth - 1, indent + "  ")


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
