"""An operation to decide on: its votes, and the facts that the table of `decide` reads.

z = add y b        y is a matmul in half, and b its bias: z votes half
m = reduce_max y   m votes float32
d = add c y        c is a float32 carry: d votes float32, and is a carry too
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.extend import core as jc

from jamp._autocast import origins
from jamp._autocast.jax_internals import is_weak_scalar
from jamp._autocast.marks import Source
from jamp._autocast.origins import Origin
from jamp._autocast.primitives import Rule, Shape, traits_of
from jamp._autocast.scope import (
    KEPT,
    NO_MODEL,
    Atom,
    dtype_of,
    exceeds_half,
    is_float32,
    size_of,
)
from jamp._autocast.values import Value, Values, joint_source
from jamp._core.dtypes import FLOAT32


class Case:
    """An equation to decide on, with the facts that the rows of the table read."""

    def __init__(
        self,
        values: Values,
        eqn: jc.JaxprEqn,
        name: str,
        rule: Rule,
        given: Sequence[Value],
    ):
        self.values, self.eqn, self.name, self.rule = values, eqn, name, rule
        self.given, self.traits = given, traits_of(name)
        self.votes = {value.vote for value in given} - {None}
        if values.widest and values.half in self.votes and name in ("add", "sub"):
            if any(map(_is_mask, eqn.invars, given)):
                self.votes.add(FLOAT32)
        # Whether a result is float32 in the user's program, unlike a comparison's.
        self.has_float32_result = any([is_float32(v) for v in eqn.outvars])
        # Whether an operand, and whether the result, may be beyond half's range.
        self.out_of_range = self.result_out_of_range = False
        # Whether it computes from a float32 carry. A matmul returns no carry.
        self.carried = rule is not Rule.HALF and any([x.carried for x in given])
        # Whether it passes on, or compares with, a number that half may change.
        self.keeps_digits = False
        self.bias: jc.Var | None = None
        self.vote: Any = values.half if rule is Rule.HALF else FLOAT32
        if rule is Rule.PROMOTE or rule is Rule.MOVE:
            fill = eqn.params.get("fill_value") if self.has_float32_result else None
            fills = fill is not None and exceeds_half(float(fill), values.half)
            self.out_of_range = fills or any([value.out_of_range for value in given])
            self.result_out_of_range = self.out_of_range and self._passes_numbers()
            self.keeps_digits = values.half in self.votes and self._keeps_digits()
            if name == "add" and values.half in self.votes:
                self.bias = self._bias()
            self.vote = self._vote()
        self.is_half = self.has_float32_result and self.vote == values.half
        self.origins = [
            origins.origin_of_result(eqn, v, rule, [x.origin for x in given])
            if is_float32(v)
            else Origin()
            for v in eqn.outvars
        ]

    # ---- what the rows read

    @property
    def computed(self) -> set[Any]:
        """The dtypes in which the operands with a vote are computed."""
        return {value.dtype for value in self.given if value.vote is not None}

    @property
    def has_smaller_float32(self) -> bool:
        """Whether it broadcasts a float32 value or a half param, which XLA fuses."""
        if self.rule is not Rule.PROMOTE:
            return False
        return any(x.vote == FLOAT32 or x.is_half_param for x in self.smaller)

    @property
    def smaller(self) -> list[Value]:
        """The smaller operands, and the product of a norm's statistic and its scale."""
        full, small = self.by_size()
        roots = [value.origin.roots for value in full]

        def is_of_statistics(value: Value) -> bool:
            origin = value.origin
            others = [each for each in roots if not origins.meet(each, origin.roots)]
            return origins.meet(origins.union(others), origin.statistic_of)

        return small + [value for value in full if is_of_statistics(value)]

    @property
    def is_ratio(self) -> bool:
        """Whether it divides by a float16 value.

        JAX's derivative squares this value: 1 / x ** 2 overflows below x = 0.004.
        """
        half = self.values.half
        in_half = {value.vote for value in self.given[1:]} == {half}
        return self.name == "div" and in_half and half == np.float16

    @property
    def is_fused(self) -> bool:
        """Whether XLA fuses it into the readers of its result, which it never stores.

        Such an equation joins no two large arrays and does not end a norm. An operation
        that does not round keeps the dtype of its operands.
        """
        moves, scope = self.rule is Rule.MOVE, self.values.scope
        if self.traits.rounds and not (moves and scope.derived):
            if not (self.origins[0].joins or self.origins[0].normalized):
                return True
        # Two readers of a loop's gate must see the same digits.
        gates = scope.loop and self.values.widest
        keeps = moves or not self.traits.rounds
        keeps = keeps or (gates and self.traits.reads_operands)
        # A mark, such as a name or a sharding, says that the result is stored.
        is_mark = self.traits.shape is Shape.MARK
        return keeps and not is_mark and self.computed == {FLOAT32}

    def by_size(self) -> tuple[list[Value], list[Value]]:
        """Returns the full-size operands that are not broadcast, and the rest."""
        invars, full, small = self.eqn.invars, [], []
        sizes = [size_of(v) for v in invars]
        size = max([*sizes, *[size_of(v) for v in self.eqn.outvars]])
        for n, value in zip(sizes, self.given, strict=True):
            is_full = n == size and value.origin.varies is None
            (full if is_full else small).append(value)
        return full, small

    # ---- the vote of the results, for a rule that follows the operands

    def _vote(self) -> Any:
        """Returns the dtype that the results ask for."""
        votes, half = self.votes, self.values.half
        out_of_range = self.result_out_of_range or self.keeps_digits
        if out_of_range or self.carried or self._picks():
            return FLOAT32
        if not votes:
            literal = self.rule is Rule.MOVE or is_weak_scalar(self.eqn.outvars[0])
            has_float32 = any(map(is_float32, self.eqn.invars))
            return None if literal and has_float32 else FLOAT32
        if len(votes) == 1:
            return next(iter(votes))
        # An equation with several results, such as a barrier, would round each of them.
        narrow = not self.values.widest and len(self.eqn.outvars) == 1
        of_model = narrow and self.values.scope.policy.of_model
        if of_model and any([self._is_kept(value) for value in self.by_size()[0]]):
            return FLOAT32
        if narrow or self.bias is not None:
            in_half = [value for value in self.given if value.vote == half]
            return FLOAT32 if all([x.is_half_param for x in in_half]) else half
        return half if self._normalizes() else FLOAT32

    def _is_kept(self, value: Value) -> bool:
        """Whether a float32 value depends on kept params, and on no half params."""
        is_kept = Source.KEPT in value.source and Source.HALF not in value.source
        return is_kept and value.vote == FLOAT32

    def _passes_numbers(self) -> bool:
        """Whether a result may be beyond half's range like an operand.

        `(1 - mask) * -1e9` is as large as its literal, and `mask * 1e-16` as small.
        """
        if self.rule is Rule.MOVE or self.traits.keeps_range:
            return True
        votes = {value.vote for value in self.given if not value.out_of_range} - {None}
        return self.values.half not in votes and not (votes and self._shrinks())

    def _keeps_digits(self) -> bool:
        """Whether it does not round, and half may change an operand.

        `clip(x, max=1 - 1e-6)` is below 1, so that its reader may divide by `1 - x`. A
        move counts only numbers: `concatenate` joins two arrays in half (narrowest).
        """
        if self.rule is not Rule.MOVE or self.name == "select_n":
            exact = self.name == "select_n" or not self.traits.rounds
            numbers = [x.changes or x.vote == FLOAT32 for x in self.given]
            return exact and any(numbers)
        for v, x in zip(self.eqn.invars, self.given, strict=True):
            is_number = size_of(v) == 1 or x.origin.varies == ()
            if x.changes or (is_number and x.vote == FLOAT32):
                return True
        return False

    def _shrinks(self) -> bool:
        """Whether its literals beyond half's range make the result smaller.

        A mean over 100,000 numbers divides by such a literal, and fits into float16.
        """
        for i, (v, value) in enumerate(zip(self.eqn.invars, self.given, strict=True)):
            is_divisor = self.name == "div" and i == 1
            if value.out_of_range:
                if not isinstance(v, jc.Literal) or (abs(v.val) > 1) != is_divisor:
                    return False
        return True

    def _picks(self) -> bool:
        """Whether it reduces an operand, or gathers single numbers."""
        if self.name == "gather":
            return all([n == 1 for n in self.eqn.params["slice_sizes"]])
        return self.traits.shape is Shape.REDUCE

    def _bias(self) -> jc.Var | None:
        """Returns the bias that it adds to a matmul in half, or None."""
        pairs = list(zip(self.eqn.invars, self.given, strict=True))
        for (_, of_matmul), (bias, value) in (pairs, pairs[::-1]):
            if not isinstance(bias, jc.Var) or not is_float32(bias):
                continue
            # Without marks, each input may be a param.
            is_data = self.values.scope.policy.marked and Source.DATA in value.source
            if is_data or value.out_of_range or value.carried or not value.is_input:
                continue
            origin, result = of_matmul.origin, self.eqn.outvars[0]
            if origins.is_bias(bias, value.origin, origin, result):
                return bias
        return None

    def _normalizes(self) -> bool:
        """Whether it is part of a norm of a half value, whose result is then half.

        torch's batch and group norms also return the dtype of their input.
        """
        full, small = self.by_size()
        if {value.vote for value in full} - {None} != {self.values.half}:
            return False
        return origins.is_normalized(
            [value.origin for value in full], [value.origin for value in small]
        )

    def results(self, dtype: Any, region: str) -> list[Value]:
        """Returns the values of the results, which are computed in a dtype."""
        # The result counts as data: it stays float32 until it meets a half param.
        ends = region in (KEPT, NO_MODEL)
        source = Source.DATA if ends else joint_source(self.given)
        in_half, values = self.vote == self.values.half, self.values
        value = Value(
            dtype,
            self.vote,
            self.result_out_of_range,
            source=source,
            is_input=values.is_input(self.eqn),
            is_loop_invariant=self.traits.shape is Shape.RESHAPE
            and self.given[0].is_loop_invariant,
            changes=None if in_half else values.changes(self.eqn, self.given),
            carried=self.carried,
        )
        return [
            value._replace(origin=origin)
            if is_float32(v)
            else Value(dtype_of(v), source=source)
            for v, origin in zip(self.eqn.outvars, self.origins, strict=True)
        ]


def _is_mask(atom: Atom, value: Value) -> bool:
    """Returns whether a value is an array of zeros and ones, as `jnp.eye` returns.

    It is exact in half, and so is a product with it. A sum with it is not.
    """
    has_vote = value.vote is not None or value.changes is not None
    return is_float32(atom) and not has_vote and size_of(atom) > 1
