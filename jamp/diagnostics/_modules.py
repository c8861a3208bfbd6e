"""A report by module: a tree in which equal modules share a line."""

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jamp.diagnostics._source import short_line

_WIDTH = 100  # characters of a line
_LEAST = 30  # least width of the last column


class Node:
    """The modules of one pattern, such as `Block_*`; or a source line.

    Attributes:
        paths: the paths of the modules.
        operations: the operations in them.
        own: the operations that are in no inner module.
        inside: the inner modules by pattern.
    """

    def __init__(self):
        self.paths: set[str] = set()
        self.operations: list[Any] = []
        self.own: list[Any] = []
        self.inside: dict[str, Node] = {}


def tree_of(operations: Iterable[Any]) -> Node:
    """Makes the tree of operations. An operation without a module has its line."""
    root = Node()
    for op in operations:
        names = op.module.split("/") if op.module else [short_line(op.source)]
        node = root
        for i, name in enumerate(names, 1):
            pattern = re.sub(r"\d+", "*", name) if op.module else name or "(JAX)"
            node = node.inside.setdefault(pattern, Node())
            node.paths.add("/".join(names[:i]))
            node.operations.append(op)
        node.own.append(op)
    return root


def rows_of(node: Node, indent: str = "") -> Iterator[tuple[str, int, Node]]:
    """Returns the label, the count in its parent and the node of each inner module."""
    for pattern, inner in node.inside.items():
        names = {path.rpartition("/")[2] for path in inner.paths}
        label = names.pop() if len(names) == 1 and "*" in pattern else pattern
        times = round(len(inner.paths) / max(1, len(node.paths)))
        yield indent + label, times, inner
        yield from rows_of(inner, indent + "  ")


def table(rows: Sequence[Sequence[str]]) -> str:
    """Aligns columns, and gives the last column at most two lines of a row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    room = max(_WIDTH - sum(widths) - 2 * len(widths), _LEAST)
    lines = []
    for *cells, rest in rows:
        pads = [str.ljust, *[str.rjust] * (len(widths) - 1)]
        padded = (pad(x, n) for pad, x, n in zip(pads, cells, widths, strict=True))
        before = "".join(f"{cell}  " for cell in padded)
        cut = textwrap.wrap(rest, room, max_lines=2, placeholder=" …") or [""]
        lines += [before + cut[0], *(" " * len(before) + more for more in cut[1:])]
    return "\n".join(line.rstrip() for line in lines)
