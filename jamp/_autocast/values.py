"""What values are computed in, and the dtype that an operation takes of it.

These are the rules for what the lists leave open; `rewrite` does as they say.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jc
from jax.extend.core import primitives

from jamp._autocast.consumers import Consumers
from jamp._autocast.jax_internals import is_weak_scalar
from jamp._autocast.lists import Rule
from jamp._autocast.program import Atom, Policy, dtype_of, is_float32
from jamp._core.dtypes import FLOAT32


class Choice(NamedTuple):
    """What an equation runs in.

    Attributes:
        computed: the dtype that its float32 values are cast to, and its results have.
        vote: the dtype that its results stand for where they meet others.
        why: as `Decision.why`.
        bias: the operand that is added to a product in half, if there is one.
    """

    computed: Any
    vote: Any
    why: str
    bias: Atom | None = None


class Values:
    """What is known of the values that were met so far, by the user's variables.

    A value's *computed* dtype is the one that it has at first, without a cast. Its
    *vote* is the dtype that it asks for where it meets others. They differ for what is
    computed in float32 because it costs nothing there, such as a feeder: it stands for
    the half value that it would be otherwise. What comes from literals alone has no
    vote, None: it takes the dtype of what it meets.
    """

    def __init__(self, policy: Policy, consumers: Consumers):
        self.half, self.widest = policy.dtype, policy.promote == "widest"
        self.consumers, self.facts = consumers, consumers.facts
        self.computed: dict[jc.Var, Any] = {}
        self.voted: dict[jc.Var, Any] = {}

    # ---- what they are

    def computed_dtype(self, atom: Atom) -> Any:
        """The dtype that a value is in, without a cast."""
        return dtype_of(atom) if isinstance(atom, jc.Literal) else self.computed[atom]

    def vote(self, atom: Atom) -> Any:
        """The dtype that an operand asks for; None if it has no vote."""
        if not is_float32(atom):
            return None
        if isinstance(atom, jc.Literal):
            return FLOAT32 if self.facts.of(atom).asks else None
        return self.voted.get(atom, self.computed[atom])

    def votes(self, atoms: Sequence[Atom]) -> set[Any]:
        """The dtypes that operands ask for."""
        return {self.vote(v) for v in atoms} - {None}

    def outgoing_dtype(self, atom: Atom) -> Any:
        """The dtype in which a value goes to readers of which nothing is known."""
        wanted = self.consumers.want_float32(atom)
        return self.computed_dtype(atom) if wanted else self._stands_for(atom)

    def _stands_for(self, atom: Atom) -> Any:
        return self.vote(atom) or self.computed_dtype(atom)

    # ---- what an operation runs in

    def choose(self, eqn: jc.JaxprEqn, rule: Rule) -> Choice:
        """What an equation runs in by a rule of the lists, and why."""
        if rule is Rule.HALF:
            return Choice(self.half, self.half, "list")
        if rule is Rule.FLOAT32:
            return Choice(FLOAT32, FLOAT32, "list")
        vote, why = self._vote_of_result(eqn)
        if self.facts.asks(eqn):
            return Choice(FLOAT32, vote, "literal")
        bias = self.facts.bias_of(eqn)
        if bias is not None and self.half in self.votes(eqn.invars):
            return Choice(self.half, self.half, "bias", bias)
        if not any(map(is_float32, eqn.outvars)):
            # A comparison: of a rounded copy, `w > 0` would differ for tiny `w`.
            in_half = self._all_computed(eqn, self.half)
            return Choice(self.half if in_half else FLOAT32, None, "operands")
        if vote == FLOAT32:
            return Choice(FLOAT32, FLOAT32, why)
        if rule is Rule.PROMOTE:
            if any(map(self.consumers.want_float32, eqn.outvars)):
                return Choice(FLOAT32, vote, "feeder")
            # One fusion in either dtype: what is read and written costs, no more.
            full = self.facts.of_full_size(eqn)
            if FLOAT32 in self.votes([v for v in eqn.invars if v not in full]):
                return Choice(FLOAT32, vote, "smaller operand")
        elif any(map(self.consumers.want_float32, eqn.outvars)):
            if self._all_computed(eqn, FLOAT32):
                return Choice(FLOAT32, vote, "feeder")
        return Choice(vote, vote, why)

    def _vote_of_result(self, eqn: jc.JaxprEqn) -> tuple[Any, str]:
        """The dtype that an equation's results stand for, and why."""
        votes = self.votes(eqn.invars)
        if not votes:
            return FLOAT32, "no vote"
        if len(votes) == 1:
            return *votes, "operands"
        if self.widest:
            return FLOAT32, "widest"
        # A literal that half cannot hold is in the result.
        holds = any(self.facts.of(v).asks for v in eqn.outvars)
        return FLOAT32 if holds else self.half, "narrowest"

    def _all_computed(self, eqn: jc.JaxprEqn, dtype: Any) -> bool:
        """Whether all operands with a vote were computed in a dtype."""
        voters = [v for v in eqn.invars if self.vote(v) is not None]
        return {self.computed_dtype(v) for v in voters} == {dtype}

    # ---- what is learned of its results

    def learn(self, eqn: jc.JaxprEqn, rule: Rule, vote: Any) -> None:
        """What the equations that follow should know of the results of one."""
        silent = not self.votes(eqn.invars) and any(map(is_float32, eqn.invars))
        for v in filter(is_float32, eqn.outvars):
            literal = silent and (rule is Rule.MOVE or is_weak_scalar(v))
            self.voted[v] = None if literal and not self.facts.of(v).asks else vote

    def learn_recorded(self, eqn: jc.JaxprEqn) -> None:
        """The same of an equation that was left as it is."""
        if eqn.primitive is not primitives.convert_element_type_p:
            return
        # A mask is exact in any dtype.
        if dtype_of(eqn.invars[0]) == jnp.bool_ and is_float32(eqn.outvars[0]):
            self.voted[eqn.outvars[0]] = None
