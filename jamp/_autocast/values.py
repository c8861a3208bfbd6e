"""What is known of a program's values, and the dtype that an operation takes of it.

These are the rules for what the lists leave open; `rewrite` does as they say.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc
from jax.extend.core import primitives

from jamp._autocast.consumers import Consumers
from jamp._autocast.lists import Rule
from jamp._autocast.program import Atom, Policy, dtype_of, is_float32, size_of
from jamp._core.dtypes import FLOAT32


class Choice(NamedTuple):
    """What an equation runs in.

    Attributes:
        computed: the dtype that its float32 values are cast to, and its results have.
        promotion: the dtype that its results stand for in promotions.
        why: as `Decision.why`.
    """

    computed: Any
    promotion: Any
    why: str


class Values:
    """What is known of the values that were met so far, by the user's variables.

    A value's *computed* dtype is the one that it has at first, without a cast. Its
    *promotion* dtype is the one that it stands for where it meets others. They differ
    where a half value met a smaller float32 one that was broadcast over it, such as a
    statistic, a weight or a bias. That is computed in float32 but is no wider than the
    half value: a norm gives back its input's dtype, a layer with a bias its product's.

    An operand's *vote* is what it says of the dtype of an operation: its promotion
    dtype, or half if a matmul reads a shared copy of it. What comes from literals alone
    has no vote: it takes the dtype of what it meets.
    """

    def __init__(self, policy: Policy, consumers: Consumers):
        self.half, self.promote = policy.dtype, policy.promote
        self.consumers = consumers
        self.computed: dict[jc.Var, Any] = {}
        self.promotion: dict[jc.Var, Any] = {}
        self.from_literals: set[jc.Var] = set()
        self.broadcast: set[jc.Var] = set()  # with the same number more than once

    # ---- what they are

    def computed_dtype(self, atom: Atom) -> Any:
        """The dtype that a value is in, without a cast."""
        return dtype_of(atom) if isinstance(atom, jc.Literal) else self.computed[atom]

    def promotion_dtype(self, atom: Atom) -> Any:
        """The dtype that a value stands for."""
        if isinstance(atom, jc.Literal):
            return dtype_of(atom)
        return self.promotion.get(atom, self.computed[atom])

    def outgoing_dtype(self, atom: Atom) -> Any:
        """The dtype in which a value goes to consumers of which nothing is known."""
        # A bias that was added in float32 goes out in half, unless a loss reads it.
        wanted = self.consumers.want_float32(atom)
        return self.computed_dtype(atom) if wanted else self.promotion_dtype(atom)

    def argument_dtypes(self, atoms: Sequence[Atom]) -> list[Any]:
        """The dtypes in which values go to a program: half where it reads them so."""
        return [
            self.half
            if is_float32(a) and self.consumers.read_in_half(a)
            else self.outgoing_dtype(a)
            for a in atoms
        ]

    def has_no_vote(self, atom: Atom) -> bool:
        """Whether a float32 comes from literals that half can hold."""
        if isinstance(atom, jc.Literal):
            return is_float32(atom) and not self._exceeds_half(atom)
        return atom in self.from_literals

    def vote(self, atom: Atom) -> Any:
        """The dtype that an operand asks for; None if it has no vote."""
        if not is_float32(atom) or self.has_no_vote(atom):
            return None
        if isinstance(atom, jc.Literal):
            return FLOAT32
        in_half = self.consumers.read_in_half(atom)
        return self.half if in_half else self.promotion_dtype(atom)

    def votes(self, atoms: Sequence[Atom]) -> set[Any]:
        """The dtypes that operands ask for."""
        return {self.vote(v) for v in atoms} - {None}

    def _exceeds_half(self, literal: jc.Literal) -> bool:
        """Such as a mask's -1e30, or the 1e-8 in a denominator: inf or 0 in float16."""
        value, limits = abs(float(literal.val)), jnp.finfo(self.half)
        # An infinity is the same in half, and so is zero.
        return float(limits.max) < value < np.inf or 0 < value < float(limits.tiny)

    # ---- what an operation runs in

    def choose(self, eqn: jc.JaxprEqn, rule: Rule) -> Choice:
        """What an equation runs in by a rule of the lists, and why."""
        promotion, why = self._promotion_by_rule(eqn, rule)
        computed = self._computed_by_rule(eqn, rule, promotion)
        if computed != promotion:
            why = "smaller operand" if rule is Rule.PROMOTE else "feeder"
        return Choice(computed, promotion, why)

    def _promotion_by_rule(self, eqn: jc.JaxprEqn, rule: Rule) -> tuple[Any, str]:
        """The dtype that an equation's results stand for, and why."""
        if rule is Rule.HALF:
            return self.half, "list"
        if rule is Rule.FLOAT32:
            return FLOAT32, "list"
        if rule is Rule.PROMOTE and self._feeds_float32(eqn):
            return FLOAT32, "feeder"
        if any(isinstance(v, jc.Literal) and self.vote(v) for v in eqn.invars):
            return FLOAT32, "literal"
        if not any(is_float32(v) for v in eqn.outvars):
            # A comparison: of a shared copy, `w > 0` would differ for tiny `w`.
            in_half = self._all_computed(eqn, self.half)
            return self.half if in_half else FLOAT32, "operands"
        # A bias has no say beside the product that it is broadcast over, but if all are
        # broadcast, as in an outer sum, all of them have.
        voters = self._of_full_size(eqn) if rule is Rule.PROMOTE else eqn.invars
        votes = self.votes(voters) or self.votes(eqn.invars)
        if not votes:
            return FLOAT32, "no vote"
        if len(votes) > 1:
            return self.half if self.promote == "narrowest" else FLOAT32, self.promote
        (dtype,) = votes
        shared = any(
            self.vote(v) not in (None, self.promotion_dtype(v)) for v in eqn.invars
        )
        return dtype, "shared copy" if shared else "operands"

    def _computed_by_rule(self, eqn: jc.JaxprEqn, rule: Rule, promotion: Any) -> Any:
        """The promotion dtype, or float32 where that costs nothing and keeps digits."""
        if promotion == FLOAT32:
            return FLOAT32
        if rule is Rule.PROMOTE:
            # It is one fusion in either dtype: only what is read and written costs.
            full = self._of_full_size(eqn)
            smaller = self.votes([v for v in eqn.invars if v not in full])
            return FLOAT32 if FLOAT32 in smaller else promotion
        if rule is Rule.MOVE and self._feeds_float32(eqn):
            return FLOAT32 if self._all_computed(eqn, FLOAT32) else promotion
        return promotion

    def _feeds_float32(self, eqn: jc.JaxprEqn) -> bool:
        """Whether all that reads its results wants float32."""
        outs = [v for v in eqn.outvars if is_float32(v)]
        return bool(outs) and all(map(self.consumers.want_float32, outs))

    def _all_computed(self, eqn: jc.JaxprEqn, dtype: Any) -> bool:
        """Whether all operands with a vote were computed in a dtype."""
        voters = [v for v in eqn.invars if self.vote(v) is not None]
        return {self.computed_dtype(v) for v in voters} == {dtype}

    def _of_full_size(self, eqn: jc.JaxprEqn) -> list[Atom]:
        """The operands that are as large as the result, and not by being broadcast."""
        # A bias comes out of a `broadcast_in_dim`, as large as the product that it is
        # added to: sizes alone do not tell the two.
        size = max(size_of(v) for v in [*eqn.invars, *eqn.outvars])
        return [
            v
            for v in eqn.invars
            if size_of(v) == size
            and (isinstance(v, jc.Literal) or v not in self.broadcast)
        ]

    # ---- what is learned of its results

    def learn(self, eqn: jc.JaxprEqn, rule: Rule, promotion: Any) -> None:
        """What the equations that follow should know of the results of one."""
        outs = [v for v in eqn.outvars if is_float32(v)]
        self.promotion |= dict.fromkeys(outs, promotion)
        if rule is Rule.MOVE and not self.votes(eqn.invars):
            self.from_literals.update(outs)
        if _repeats(eqn) or self._all_broadcast(eqn, outs):
            self.broadcast.update(outs)

    def learn_recorded(self, eqn: jc.JaxprEqn) -> None:
        """The same of an equation that was left as it is."""
        if eqn.primitive is not primitives.convert_element_type_p:
            return
        # A mask is exact in any dtype.
        if dtype_of(eqn.invars[0]) == jnp.bool_ and is_float32(eqn.outvars[0]):
            self.from_literals.add(eqn.outvars[0])

    def _all_broadcast(self, eqn: jc.JaxprEqn, outs: Sequence[jc.Var]) -> bool:
        """Whether the results are broadcast because all operands are."""
        atoms = [v for v in eqn.invars if not isinstance(v, jc.Literal)]
        sizes = {size_of(v) for v in [*atoms, *outs]}
        return bool(atoms) and len(sizes) == 1 and self.broadcast.issuperset(atoms)


def _repeats(eqn: jc.JaxprEqn) -> bool:
    """Whether it repeats a value along an axis."""
    if eqn.primitive is not primitives.broadcast_in_dim_p:
        return False
    return size_of(eqn.invars[0]) < size_of(eqn.outvars[0])
