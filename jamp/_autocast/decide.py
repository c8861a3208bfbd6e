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

from jamp._autocast.calls import Replacement
from jamp._autocast.case import Case
from jamp._autocast.primitives import Rule, is_plain
from jamp._autocast.scope import is_float32
from jamp._autocast.sums import (
    LOOKUPS,
    add_repeated,
    with_bias,
    with_lookup,
    with_weight,
)
from jamp._autocast.values import Values
from jamp._core.dtypes import FLOAT32


class Decision(NamedTuple):
    """How an equation is written."""

    dtype: Any  # the dtype in which it runs: float32, half or fp8
    why: str  # a short reason, see `Note.why`
    replacement: Replacement | None = None  # what computes it instead
    own_casts: bool = False  # whether no other equation reads its casts


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
        lambda case: case.out_of_range or case.keeps_digits,
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
        return Decision(case.values.half, row.why, _with_float32_sum(case))
    # A norm and its statistics read two casts of the same value. Then their cotangents
    # meet in half, and XLA moves 2 to 5 % fewer bytes.
    is_norm = case.is_half and case.has_smaller_float32 and case.origins[0].normalized
    own_casts = is_norm and not case.values.widest
    return Decision(FLOAT32, row.why, _with_rounded_sum(case), own_casts)


def _with_float32_sum(case: Case) -> Replacement | None:
    """Replaces an equation in half if the gradient of an operand is a float32 sum.

    The operand is a bias, the array of a lookup, or a weight that iterations share.
    """
    eqn, half = case.eqn, case.values.half
    if case.rule is Rule.HALF:
        weight = shared_weight(case.values, eqn)
        if weight is None:
            return None
        first = eqn.invars[0] is weight
        numbers, copies = eqn.params["dimension_numbers"], case.values.summed
        case.values.summed += 1
        operands = (eqn.invars[first], half), (weight, FLOAT32), (weight, half)
        return Replacement(with_weight(numbers, first, copies), operands)
    if case.bias is not None:
        matmul = eqn.invars[eqn.invars[0] is case.bias]
        return Replacement(with_bias, ((matmul, half), (case.bias, FLOAT32)))
    is_lookup = case.name in LOOKUPS and isinstance(eqn.invars[0], jc.Var)
    if is_lookup and is_float32(eqn.invars[0]):
        function = with_lookup(eqn.primitive, tuple(sorted(eqn.params.items())))
        return Replacement(function, [(v, half) for v in eqn.invars], passes=True)
    return None


def _with_rounded_sum(case: Case) -> Replacement | None:
    """Replaces a float32 sum of a large half array and a broadcast array.

    The gradient of the broadcast array must sum the rounded cotangents that the large
    one gets.
    """
    half = case.values.half
    if case.name != "add" or case.votes != {half}:
        return None
    full, small = case.by_size()
    in_half = all(value.dtype == half for value in full)
    if not (len(small) == len(full) == 1 and in_half):
        return None
    pairs = zip(case.eqn.invars, case.given, strict=True)
    (large, _), (atom, _) = sorted(pairs, key=lambda pair: pair[1] is small[0])
    if isinstance(atom, jc.Literal):
        return None
    return Replacement(add_repeated(half), ((large, FLOAT32), (atom, FLOAT32)))


def shared_weight(values: Values, eqn: jc.JaxprEqn) -> jc.Var | None:
    """Returns the operand of a matmul that all iterations of a loop share, or None.

    Its gradient is a sum over the iterations.
    """
    if not is_plain(eqn) or not values.scope.loop:
        return None
    shared = [v for v in eqn.invars if is_float32(v) and values[v].is_loop_invariant]
    return shared[0] if len(shared) == 1 and isinstance(shared[0], jc.Var) else None
