"""Where two explanations run the same operation in different precisions."""

import re
from collections import Counter
from collections.abc import Iterable

from jamp.diagnostics._operation import Operation
from jamp.diagnostics._table import columns

type Key = tuple[str, str]


def text(ours: Iterable[Operation], theirs: Iterable[Operation]) -> str:
    """A line for each kind of operation of each module that differs.

    Modules that differ by a number are one: "Net/Block_*".
    """
    here, there = _counted(ours), _counted(theirs)
    rows = []
    for key in dict.fromkeys((*here, *there)):
        before, after = here.get(key, Counter()), there.get(key, Counter())
        if before != after:
            rows.append((*key, _words(before), _words(after)))
    if not rows:
        return "No difference."
    return columns(("module", "operation", "here", "there"), *rows)


def _counted(operations: Iterable[Operation]) -> dict[Key, Counter[str]]:
    found: dict[Key, Counter[str]] = {}
    for op in operations:
        if op.matters:
            key = re.sub(r"\d+", "*", op.module), op.primitive
            found.setdefault(key, Counter())[str(op.dtype)] += 1
    return found


def _words(counts: Counter[str]) -> str:
    return ", ".join(f"{n} {dtype}" for dtype, n in sorted(counts.items())) or "none"
