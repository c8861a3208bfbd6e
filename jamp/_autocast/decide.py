"""Decides in which dtype each operation runs, by the first row of a table that fits.

    y = dot_general x w     half: it is a matmul
    m = reduce_max y        float32: it reduces
    z = sub y m             float32: a smaller operand is float32
    e = exp z               float32: the lists say so
    o = dot_general e v     half

A row depends on the operands of an operation, and never on the readers of its result.
`explain` prints the reasons of the table, and docs/autocast_lists.md shows the table.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax.extend import core as jc

from jamp._autocast.case import Case
from jamp._autocast.primitives import Rule, is_plain
from jamp._autocast.program import is_float32
from jamp._core.dtypes import FLOAT32


class Decision(NamedTuple):
    """How an equation is written."""

    dtype: Any  # the dtype of its results, and of its cast operands
    why: str  # a short reason, see `Note.why`
    # A bias, a weight that the iterations of a loop share, or the array of a lookup, if
    # its gradient is a float32 sum.
    summed: jc.Var | None = None
    apart: bool = False  # whether other equations may not read its casts
    fp8: jc.Var | None = None  # the weight of a matmul that runs in fp8
    repeated: jc.Var | None = None  # the broadcast operand of a float32 sum with half


class Row(NamedTuple):
    """A row of the table."""

    fits: Callable[[Case], bool]
    in_half: bool
    why: str
    says: str


_HALF, _FLOAT32 = True, False
TABLE = (
    Row(
        lambda case: case.rule is Rule.HALF,
        _HALF,
        "list",
        "The lists say so.",
    ),
    Row(
        lambda case: case.rule is Rule.FLOAT32,
        _FLOAT32,
        "list",
        "The lists say so.",
    ),
    Row(
        lambda case: case.asks or case.keeps_digits,
        _FLOAT32,
        "literal",
        "Half cannot hold an operand, or would change a number that it compares or "
        "passes on.",
    ),
    Row(
        lambda case: case.bias is not None,
        _HALF,
        "bias",
        "It adds a bias to a matmul, and runs in the matmul's dtype.",
    ),
    Row(
        lambda case: (
            not case.has_float32_result and case.computed == {case.values.half}
        ),
        _HALF,
        "operands",
        "Its operands are in this dtype.",
    ),
    Row(
        lambda case: case.has_float32_result and not case.votes,
        _FLOAT32,
        "no vote",
        "All its operands are constants or masks, which have no vote.",
    ),
    Row(
        lambda case: not case.has_float32_result or case.votes == {FLOAT32},
        _FLOAT32,
        "operands",
        "Its operands are in this dtype.",
    ),
    Row(
        lambda case: case.carried,
        _FLOAT32,
        "carry",
        "It reads a float32 carry of a loop, whose steps would lose their digits.",
    ),
    Row(
        lambda case: len(case.votes) == 1 and not case.is_half,
        _FLOAT32,
        "statistic",
        "It reduces its operand or picks single numbers. Such results are float32.",
    ),
    Row(
        lambda case: not case.is_half,
        _FLOAT32,
        "widest",
        "Its operands differ, and the widest dtype decides.",
    ),
    Row(
        lambda case: case.has_smaller_float32,
        _FLOAT32,
        "smaller operand",
        "It broadcasts a smaller float32 operand, and computes in float32.",
    ),
    Row(
        lambda case: case.is_fused,
        _FLOAT32,
        "fusion",
        "XLA fuses it with its readers: it runs in float32, and they round its result.",
    ),
    Row(
        lambda case: case.values.widest and case.is_ratio,
        _FLOAT32,
        "ratio",
        "It divides by a float16 value, which its derivative squares.",
    ),
    Row(
        lambda case: len(case.votes) == 1,
        _HALF,
        "operands",
        "Its operands are in this dtype.",
    ),
    Row(
        lambda case: True,
        _HALF,
        "narrowest",
        "Its operands differ, and the narrowest dtype decides.",
    ),
)


def decide(case: Case) -> Decision:
    """Decides how to write an equation.

    fp8 has its own rules for matmuls, in the package `_fp8`.
    """
    for row in TABLE:
        if row.fits(case):
            break
    if row.in_half:
        is_matmul = case.rule is Rule.HALF
        summed = summed_weight(case) if is_matmul else case.bias or case.table
        return Decision(case.values.half, row.why, summed)
    # A norm and its statistics read two casts of the same value. Then their cotangents
    # meet in half, and XLA moves 2 to 5 % fewer bytes.
    is_norm = case.is_half and case.has_smaller_float32 and case.origins[0].normalized
    apart = is_norm and not case.values.widest
    return Decision(FLOAT32, row.why, apart=apart, repeated=_repeated(case))


def _repeated(case: Case) -> jc.Var | None:
    """Returns the broadcast operand that an equation adds to a large half array.

    Its gradient must sum the same rounded cotangents that the large operand gets.
    """
    half = case.values.half
    if case.name != "add" or case.votes != {half}:
        return None
    full, small = case.by_size()
    in_half = all(value.dtype == half for value in full)
    if not (len(small) == len(full) == 1 and in_half):
        return None
    (atom,) = [
        v for v, x in zip(case.eqn.invars, case.given, strict=True) if x is small[0]
    ]
    return atom if isinstance(atom, jc.Var) else None


def summed_weight(case: Case) -> jc.Var | None:
    """Returns the operand of a matmul that all iterations of a loop share, or None.

    Its gradient is a sum over the iterations.
    """
    if not is_plain(case.eqn) or not case.values.scope.loop:
        return None
    pairs = zip(case.eqn.invars, case.given, strict=True)
    shared = [v for v, x in pairs if is_float32(v) and x.invariant]
    return shared[0] if len(shared) == 1 and isinstance(shared[0], jc.Var) else None
