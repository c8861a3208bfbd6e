"""Write the lists: `python docs/autocast_lists.py > docs/autocast_lists.md`."""

import sys
from collections.abc import Iterable

from jamp._autocast.control_flow import RULES
from jamp._autocast.decide import TABLE
from jamp._autocast.lists import (
    FUNCTION_ROWS,
    LIBRARY_ROWS,
    ROWS,
    SOLVER_ROWS,
    Row,
    Rule,
)

_HEAD = """\
# The lists of autocast

`python docs/autocast_lists.py` writes this page from `primitives`, `lists` and `decide`
of `jamp/_autocast`. [Autocast](autocast.md) explains the rules and how to change them.

A `dot_general` without a contracted dimension follows the rule of `mul`; one without a
free dimension follows the rule of `reduce_sum`. Dimensions of size 1 do not count.
"""
_TITLES = {
    Rule.HALF: "In half",
    Rule.FLOAT32: "In float32",
    Rule.PROMOTE: "In the widest dtype of their operands, or as below",
    Rule.MOVE: "In the widest dtype of their operands",
    Rule.RECORDED: "In the dtype that the program has",
}
_DECISIONS = """\
The lists decide first. For `promote` and `move`, the first row of this table that fits
decides. No row depends on the readers of the result. `op.why` of `jamp.explain` names
the row. A float32 result still votes for half if its operands do, so a matmul that
reads it rounds it.
"""
_PROGRAMS = """\
## Operations that contain programs

Autocast applies the same lists to the programs inside {names}.

## Operations in no list

Pallas kernels and foreign functions run in the dtype that the program has, and a
warning names them. Some kernels [only run in half](autocast.md#what-only-runs-in-half).
"""

_DIFFERENCES = [
    (
        "`1 / x`",
        "float32 (`reciprocal`)",
        "`div` promotes, and is computed in float32",
    ),
    (
        "0-d arrays",
        "do not promote",
        "float32 arrays promote; Python numbers do not",
    ),
    (
        "`atan2`, scatter-add",
        "the widest operand",
        "float32",
    ),
    (
        "`dot` of vectors",
        "apex: the widest operand; torch: half",
        "float32",
    ),
    (
        'outer products, such as `einsum("i,j->ij", ...)`',
        "half",
        "`mul` promotes",
    ),
    (
        "`bilinear`; the matmuls in `cdist`",
        "the widest operand; float32",
        "half, like any matmul",
    ),
    (
        "`sin`, `atan`, `erf`, `mean`, pooling, `sort`, linear algebra, FFT",
        "the dtype of the operand, or an error in half",
        "float32",
    ),
    (
        "`prelu`",
        "half",
        "`mul` promotes",
    ),
    (
        "`binary_cross_entropy` in apex",
        "an error",
        "float32",
    ),
]


def page() -> str:
    """Returns the page in Markdown."""
    sections = [
        _section(title, (row for row in ROWS if row.rule is rule))
        for rule, title in _TITLES.items()
    ]
    rows = [(row.says, "half" if row.in_half else "float32", row.why) for row in TABLE]
    decisions = _table(
        "How autocast decides",
        [("the first that fits", "runs in", "why"), ("---",) * 3, *rows],
        _DECISIONS,
    )
    functions = _section("Functions, by the name of their `jit`", FUNCTION_ROWS)
    libraries = _section("Functions of JAX, by module", LIBRARY_ROWS)
    solvers = _section(
        "Functions of JAX that call yours: the rule for their own matmuls",
        SOLVER_ROWS,
    )
    programs = _PROGRAMS.format(names=_names(RULES))
    differences = _table(
        "Differences from apex and torch",
        [("operation", "apex, torch", "jamp"), ("---",) * 3, *_DIFFERENCES],
    )
    functions = [functions, libraries, solvers]
    parts = [_HEAD, *sections, decisions, *functions, programs, differences]
    return "\n".join(parts).rstrip() + "\n"


def _section(title: str, rows: Iterable[Row]) -> str:
    cells = [
        (_names(row.primitives), row.rule.value, row.reason, row.descends_from)
        for row in rows
    ]
    head = [("operations", "rule", "why", "descends from"), ("---",) * 4]
    return _table(title, [*head, *cells])


def _table(title: str, rows: Iterable[tuple[str, ...]], text: str = "") -> str:
    lines = (f"| {' | '.join(row)} |" for row in rows)
    head = [f"## {title}", ""] + ([text] if text else [])
    return "\n".join([*head, *lines, ""])


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    sys.stdout.write(page())
