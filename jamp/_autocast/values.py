"""What an operation and its results are computed in, where the lists leave it open.

    y = dot_general x w     Choice(half, "list")
    z = sub y m             Choice(float32, "feeder"): an exponential reads it
    e = exp z               Choice(float32, "list")
    b = add y c             Choice(half, "bias", c)

`rewrite` does as they say.
"""

from typing import Any, NamedTuple

from jax.extend import core as jc

from jamp._autocast.consumers import NOBODY, Consumers, Want
from jamp._autocast.primitives import Rule
from jamp._autocast.program import Atom, dtype_of, is_float32
from jamp._core.dtypes import FLOAT32


class Choice(NamedTuple):
    """What an equation runs in."""

    computed: Any  # the dtype that its float32 values are cast to, and its results have
    why: str  # as `Note.why`
    # A bias, or a weight that the trips of a loop share: its gradient is a float32 sum.
    summed: jc.Var | None = None
    apart: bool = False  # whether it casts its operands for itself


class Values:
    """What the values that were met so far are computed in, by the user's variables.

    That may be wider than what a value asks for, its vote: a feeder is in float32, and
    stands for the half value that it would be otherwise.
    """

    def __init__(self, consumers: Consumers):
        self.consumers, self.facts = consumers, consumers.facts
        self.half = self.facts.half
        self.computed: dict[jc.Var, Any] = {}

    def computed_dtype(self, atom: Atom) -> Any:
        """The dtype that a value is in, without a cast."""
        return dtype_of(atom) if isinstance(atom, jc.Literal) else self.computed[atom]

    def outgoing_dtype(self, atom: Atom, want: Want = NOBODY) -> Any:
        """The dtype in which a value goes to readers that want so much of it."""
        vote, computed = self.facts[atom].vote, self.computed_dtype(atom)
        wide = self.consumers.want_float32(atom) or self.consumers.carried([atom])
        return computed if wide or want.all is True else vote or computed

    def meets_float32(self, atom: Atom) -> bool:
        """Whether all who read a half value do so in float32.

        One copy serves all of them, also those that only move it: their cotangents meet
        in float32, and are rounded once. In half the softmax and the label of a cross
        entropy would nearly cancel, each rounded by itself.
        """
        (want,) = self.consumers.wants_of([atom])
        return is_float32(atom) and want.all is True

    def choose(self, eqn: jc.JaxprEqn, rule: Rule) -> Choice:
        """What an equation runs in by a rule of the lists, and why."""
        if rule is Rule.HALF:
            return Choice(self.half, "list", self.facts.weight(eqn))
        if rule is Rule.FLOAT32:
            return Choice(FLOAT32, "list")
        if self.facts.asks(eqn):
            return Choice(FLOAT32, "literal")
        bias = self.facts.bias(eqn)
        # With widest a whole stream of float32 may read it, at twice the bytes.
        if bias is not None and (
            self.facts.widest or not self.meets_float32(eqn.outvars[0])
        ):
            return Choice(self.half, "bias", bias)
        if not any(map(is_float32, eqn.outvars)):
            # A comparison: of a rounded copy, `w > 0` would differ for tiny `w`.
            dtypes = {self.computed_dtype(v) for v in self._voters(eqn)}
            in_half = dtypes == {self.half}
            return Choice(self.half if in_half else FLOAT32, "operands")
        return self._choice_by_votes(eqn, rule)

    def _choice_by_votes(self, eqn: jc.JaxprEqn, rule: Rule) -> Choice:
        votes, given = self.facts.votes(eqn.invars), self.facts.votes(eqn.outvars)
        if self.half not in given:
            why = {0: "no vote", 1: "operands"}.get(len(votes), "widest")
            return Choice(FLOAT32, why)
        if any(map(self.consumers.want_float32, eqn.outvars)):
            if rule is Rule.PROMOTE or all(
                self.computed_dtype(v) == FLOAT32 or self.meets_float32(v)
                for v in self._voters(eqn)
            ):
                return Choice(FLOAT32, "feeder")
        if FLOAT32 in votes and self.consumers.carried(eqn.outvars):
            # A sum over the trips of a loop would stop growing in half.
            return Choice(FLOAT32, "carry")
        small = self.facts.smaller(eqn)
        if rule is Rule.PROMOTE and (
            FLOAT32 in self.facts.votes(small)
            or any(map(self.facts.is_half_param, small))
        ):
            # One fusion in either dtype: what is read and written costs, no more.
            if self.facts.widest:
                return Choice(FLOAT32, "norm")
            # As a norm written in half does, it casts apart from what its statistics
            # read: where the cotangents of both meet in half, XLA moves 2 to 5 % less.
            return Choice(FLOAT32, "smaller operand", apart=True)
        if self.consumers.chains(eqn, rule):
            return Choice(FLOAT32, "fusion")
        return Choice(self.half, "operands" if len(votes) == 1 else "narrowest")

    def _voters(self, eqn: jc.JaxprEqn) -> list[Atom]:
        """The operands with a vote."""
        return [v for v in eqn.invars if self.facts[v].vote is not None]
