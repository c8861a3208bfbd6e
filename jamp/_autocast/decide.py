"""Decides in which dtype each operation runs, by the first row of a table that fits.

    y = dot_general x w     half: it is a matmul
    m = reduce_max y        float32: it reduces
    z = sub y m             float32: a smaller operand is float32
    e = exp z               float32: the lists say so
    o = dot_general e v     half

A row depends on the operands of an operation, and never on the readers of its result.
`explain` prints the reasons of the table, and docs/autocast_lists.md shows the table.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from jax.extend import core as jc

from jamp._autocast.facts import Facts
from jamp._autocast.primitives import Rule, Shape, is_plain, primitive_name, traits_of
from jamp._autocast.program import Atom, dtype_of, is_float32
from jamp._core.dtypes import FLOAT32


class Decision(NamedTuple):
    """How an equation is written."""

    dtype: Any  # the dtype of its results, and of its cast operands
    why: str  # a short reason, see `Note.why`
    # A bias, a weight that the trips of a loop share, or an embedding table, if its
    # gradient is a float32 sum.
    summed: jc.Var | None = None
    apart: bool = False  # whether its casts serve no other equation
    fp8: jc.Var | None = None  # the weight of a matmul that runs in fp8
    repeated: jc.Var | None = None  # the broadcast operand of a float32 sum with half


class Case:
    """An equation to decide on, and the facts that the table reads."""

    def __init__(
        self, facts: Facts, eqn: jc.JaxprEqn, rule: Rule, computed: Mapping[Any, Any]
    ):
        self.facts, self.eqn, self.rule = facts, eqn, rule
        self._computed = computed
        self.votes = facts.votes(eqn.invars)
        self.is_half = facts.half in facts.votes(eqn.outvars)
        self.traits = traits_of(primitive_name(eqn))

    @functools.cached_property
    def bias(self) -> jc.Var | None:
        """The bias that it adds to a matmul, or None."""
        return self.facts.bias(self.eqn)

    @functools.cached_property
    def table(self) -> jc.Var | None:
        """The embedding table that it reads, if a matmul reads the table too."""
        if self.eqn.primitive.name != "gather" or self.facts.widest:
            return None
        table = self.eqn.invars[0]
        facts = self.facts
        weights = [summed_weight(facts, eqn) for eqn in facts.jaxpr.eqns]
        roots = [facts[v].origin.roots for v in weights if v is not None]
        of_product = facts[table].origin.roots & frozenset().union(*roots)
        return table if of_product and isinstance(table, jc.Var) else None

    @property
    def computed(self) -> set[Any]:
        """The dtypes in which the operands with a vote are computed."""
        facts = self.facts
        voters = [v for v in self.eqn.invars if facts[v].vote is not None]
        return set(map(self.computed_dtype, voters))

    def computed_dtype(self, atom: Atom) -> Any:
        """Returns the dtype of a value without a cast."""
        return dtype_of(atom) if isinstance(atom, jc.Literal) else self._computed[atom]

    @property
    def has_float32_result(self) -> bool:
        """Whether a result is float32 in the user's program, unlike a comparison's."""
        return any(map(is_float32, self.eqn.outvars))

    @property
    def has_smaller_float32(self) -> bool:
        """Whether it broadcasts a float32 value or a half param, which XLA fuses."""
        if self.rule is not Rule.PROMOTE:
            return False
        facts, small = self.facts, self.smaller
        return FLOAT32 in facts.votes(small) or any(map(facts.is_half_param, small))

    @property
    def smaller(self) -> list[Atom]:
        """The smaller operands, and the product of a norm's statistic and its scale."""
        facts, eqn = self.facts, self.eqn
        full = facts.full_size(eqn)
        roots = [facts[v].origin.roots for v in full]

        def is_of_statistics(atom: Atom) -> bool:
            origin = facts[atom].origin
            others = frozenset().union(*(r for r in roots if not r & origin.roots))
            return bool(origin.statistic_of & others)

        return [v for v in eqn.invars if v not in full or is_of_statistics(v)]

    @property
    def is_ratio(self) -> bool:
        """Whether it divides by a float16 value.

        JAX's derivative squares this value: 1 / x ** 2 overflows below x = 0.004.
        """
        facts = self.facts
        in_half = facts.votes(self.eqn.invars[1:]) == {facts.half}
        return self.eqn.primitive.name == "div" and in_half and facts.half == np.float16

    @property
    def is_fused(self) -> bool:
        """Whether XLA fuses it into the readers of its result, which it never stores.

        Such an equation joins no two large arrays and does not end a norm. An operation
        that does not round keeps the dtype of its operands.
        """
        moves = self.rule is Rule.MOVE
        if self.traits.rounds and not (moves and self.facts.scope.derived):
            origin = self.facts[self.eqn.outvars[0]].origin
            if not (origin.joins or origin.normalized):
                return True
        # Two readers of a loop's gate must see the same digits.
        gates = self.facts.scope.loop and self.facts.widest
        keeps = moves or not self.traits.rounds
        keeps = keeps or (gates and self.traits.reads_operands)
        # A mark, such as a name or a sharding, says that the result is stored.
        is_mark = self.traits.shape is Shape.MARK
        return keeps and not is_mark and self.computed == {FLOAT32}


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
        lambda case: case.facts.asks(case.eqn),
        _FLOAT32,
        "literal",
        "An operand is a constant that half cannot hold.",
    ),
    Row(
        lambda case: case.table is not None,
        _HALF,
        "table",
        "It looks up rows of a table that a matmul also reads in half.",
    ),
    Row(
        lambda case: case.bias is not None,
        _HALF,
        "bias",
        "It adds a bias to a matmul, and runs in the matmul's dtype.",
    ),
    Row(
        lambda case: not case.has_float32_result and case.computed == {case.facts.half},
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
        lambda case: case.facts.adds_to_carry(case.eqn),
        _FLOAT32,
        "carry",
        "A loop carries its result in float32, so that a sum keeps its digits.",
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
        lambda case: case.facts.widest and case.is_ratio,
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


def decide(
    facts: Facts, eqn: jc.JaxprEqn, rule: Rule, computed: Mapping[Any, Any]
) -> Decision:
    """Decides how to write an equation, given the dtypes in which values are computed.

    fp8 has its own rules for matmuls, in the package `_fp8`.
    """
    case = Case(facts, eqn, rule, computed)
    row = next(row for row in TABLE if row.fits(case))
    if row.in_half:
        summed = (
            summed_weight(facts, eqn) if rule is Rule.HALF else case.table or case.bias
        )
        return Decision(facts.half, row.why, summed)
    # A norm and its statistics read two casts of the same value. Then their cotangents
    # meet in half, and XLA moves 2 to 5 % fewer bytes.
    apart = row.why == "smaller operand" and not facts.widest
    apart = apart and facts[eqn.outvars[0]].origin.normalized
    return Decision(FLOAT32, row.why, apart=apart, repeated=_repeated(case))


def _repeated(case: Case) -> jc.Var | None:
    """Returns the broadcast operand that an equation adds to a large half array.

    Its gradient must sum the same rounded cotangents that the large operand gets.
    """
    facts, eqn = case.facts, case.eqn
    if eqn.primitive.name != "add" or case.votes != {facts.half}:
        return None
    large = facts.full_size(eqn)
    small = [v for v in eqn.invars if v not in large and isinstance(v, jc.Var)]
    in_half = all(case.computed_dtype(v) == facts.half for v in large)
    return small[0] if len(small) == len(large) == 1 and in_half else None


def summed_weight(facts: Facts, eqn: jc.JaxprEqn) -> jc.Var | None:
    """Returns the operand of a matmul whose gradient sums several terms, or None.

    Either all trips of a loop share the operand, or a lookup reads its rows as well.
    """
    if not is_plain(eqn):
        return None
    shared = [v for v in eqn.invars if is_float32(v) and _is_summed(facts, v)]
    return shared[0] if len(shared) == 1 and isinstance(shared[0], jc.Var) else None


def _is_summed(facts: Facts, atom: Atom) -> bool:
    fact = facts[atom]
    is_table = not fact.origin.roots.isdisjoint(facts.tables)
    return fact.shared and (facts.scope.loop or is_table)
