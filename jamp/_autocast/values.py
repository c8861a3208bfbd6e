"""Chooses what an operation runs in, by who reads its result: read backward first.

    y = dot_general x w     y: half by the list, but all who read it want float32
    m = reduce_max y        m: float32, likewise
    z = sub y m             z: float32, for it is the exponential that reads it
    e = exp z               e: float32 by the list, but half for the product
    o = dot_general e v

What a float32 operation reads should be computed in float32 (a *feeder*: `logits - max`
before the exponential), where that costs no memory. `rewrite` does as is said here.
"""

import collections
import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core as jc

from jamp._autocast.facts import Facts
from jamp._autocast.frames import Frame, frames_of
from jamp._autocast.primitives import Rule, primitive_name, traits_of
from jamp._autocast.program import Atom, dtype_of, is_float32
from jamp._core.dtypes import FLOAT32


class Want(NamedTuple):
    """What the readers of a value want."""

    # True where all that care want float32, False where one wants half.
    all: bool | None = None
    some: bool = False  # whether one of them wants float32
    # Whether one of them keeps it for the backward pass of a loop, as it is computed.
    kept: bool = False
    carried: bool = False  # whether it goes to the next trip of a loop in float32
    # What is made of it later in the user's program, as far as `Policy.fp8` asks.
    uses: frozenset[str] = frozenset()


_IN_FLOAT32, _IN_HALF = Want(True, True), Want(False, False)
NOBODY = Want()


class Choice(NamedTuple):
    """What an equation runs in."""

    computed: Any  # the dtype that its float32 values are cast to, and its results have
    why: str  # as `Note.why`
    # A bias, a weight that the trips of a loop share, or a table: its gradient is a
    # float32 sum.
    summed: jc.Var | None = None
    apart: bool = False  # whether it casts its operands for itself
    fp8: jc.Var | None = None  # the weight of a product that runs in fp8
    repeated: jc.Var | None = None  # what is broadcast, and added to half in float32


class Values:
    """What values are wanted in by their readers, and what they are computed in.

    The latter may be wider than what a value asks for, its vote: a feeder is in
    float32, and stands for the half value that it would be otherwise.
    """

    def __init__(self, facts: Facts, wants: dict[jc.Var, Want]):
        self.facts, self.wants = facts, wants
        fp8 = facts.scope.policy.fp8
        self.fp8 = fp8.plan(facts) if fp8 else None
        # Of those that were written so far, by the user's variables.
        self.computed: dict[jc.Var, Any] = {}

    # ---- what readers want

    def want_of(self, atom: Atom) -> Want:
        """What is wanted of a value."""
        is_literal = isinstance(atom, jc.Literal)
        return NOBODY if is_literal else self.wants.get(atom, NOBODY)

    def uses_of(self, atoms: Sequence[Atom]) -> list[frozenset[str]]:
        """What is made of each of some values."""
        return [self.want_of(v).uses for v in atoms]

    def want_float32(self, atom: Atom) -> bool:
        """Whether a value should be computed in float32 for those who read it.

        One reader is enough, if the value is made of one array: to compute it again is
        to read as much. If it joins two, or follows a norm, all must agree.
        """
        want, origin = self.want_of(atom), self.facts[atom].origin
        again = not (origin.joins or origin.normalized)
        return want.all is True or (want.some and again)

    def is_carried(self, atom: Atom) -> bool:
        """Whether a value goes to the next trip of a loop in float32."""
        return self.want_of(atom).carried

    def goes_on(self, eqn: jc.JaxprEqn) -> bool:
        """Whether it adds half to a sum that others read too: a stream of shortcuts.

        That is stored between them: in float32 for their norms, at twice the bytes. A
        loss adds up what was reduced, and needs its digits.
        """
        facts = self.facts
        if facts.votes(eqn.invars) != {facts.half}:
            return False
        origins = [facts[v].origin for v in (*eqn.invars, *eqn.outvars)]
        if not origins[-1].joins or origins[-1].statistic_of:
            return False
        return any(
            origin.joins and v in self._read_twice
            for v, origin in zip(eqn.invars, origins, strict=False)
        )

    @functools.cached_property
    def _read_twice(self) -> set[Atom]:
        eqns = self.facts.jaxpr.eqns
        reads = [v for e in eqns for v in e.invars if isinstance(v, jc.Var)]
        return {v for v, times in collections.Counter(reads).items() if times > 1}

    def table(self, eqn: jc.JaxprEqn) -> jc.Var | None:
        """What rows are looked up in in half, and their gradients summed in float32.

        If only half is read of them, a product here reads the table too. If float32 is,
        it is a half param, whose rows have no more digits.
        """
        if eqn.primitive.name != "gather":
            return None
        facts, table, (out,) = self.facts, eqn.invars[0], eqn.outvars
        want = self.want_of(out)
        is_half = facts.is_half_param(table) and facts[table].vote == facts.half
        in_half = want.all is False and not want.some
        of_head = self._roots_of_weights & facts[table].origin.roots
        wanted = (is_half and self.want_float32(out)) or (in_half and of_head)
        return table if wanted and isinstance(table, jc.Var) else None

    @functools.cached_property
    def _roots_of_weights(self) -> frozenset[Atom]:
        weights = filter(None, map(self.facts.weight, self.facts.jaxpr.eqns))
        return frozenset().union(*(self.facts[v].origin.roots for v in weights))

    def is_chained(self, eqn: jc.JaxprEqn, rule: Rule | None) -> bool:
        """Whether an operation is one of a chain that is computed in float32."""
        kept = any(self.want_of(v).kept for v in eqn.outvars)
        return self.facts.is_chained(eqn, rule) and not kept

    def meets_float32(self, atom: Atom) -> bool:
        """Whether all who read a half value do so in float32.

        One copy serves all of them, also those that only move it: their cotangents meet
        in float32, and are rounded once. In half the softmax and the label of a cross
        entropy would nearly cancel, each rounded by itself.
        """
        return is_float32(atom) and self.want_of(atom).all is True

    # ---- what values are computed in

    def computed_dtype(self, atom: Atom) -> Any:
        """The dtype that a value is in, without a cast."""
        return dtype_of(atom) if isinstance(atom, jc.Literal) else self.computed[atom]

    def outgoing_dtype(self, atom: Atom, want: Want = NOBODY) -> Any:
        """The dtype in which a value goes to a reader that wants so much of it."""
        vote, computed = self.facts[atom].vote, self.computed_dtype(atom)
        wide = want.all or self.want_float32(atom) or self.is_carried(atom)
        return computed if wide else vote or computed

    def outgoing_dtypes(self, eqn: jc.JaxprEqn) -> list[Any]:
        """The dtypes in which operands go to the programs of an equation."""
        wants = _wants_of_programs(eqn, self)
        return list(map(self.outgoing_dtype, eqn.invars, wants))

    def choose(self, eqn: jc.JaxprEqn, rule: Rule) -> Choice:
        """What an equation runs in by a rule of the lists, and why."""
        facts = self.facts
        if rule is Rule.HALF:
            return self._choice_of_product(eqn)
        if rule is Rule.FLOAT32:
            return Choice(FLOAT32, "list")
        if facts.asks(eqn):
            return Choice(FLOAT32, "literal")
        table = self.table(eqn)
        if table is not None:
            return Choice(facts.half, "operands", table)
        bias = facts.bias(eqn)
        # With widest a whole stream of float32 may read it, at twice the bytes.
        (out, *_) = eqn.outvars
        is_half = facts.widest or not self.meets_float32(out)
        if bias is not None and is_half and not self.is_carried(out):
            return Choice(facts.half, "bias", bias)
        if not any(map(is_float32, eqn.outvars)):
            # A comparison: of a rounded copy, `w > 0` would differ for tiny `w`.
            dtypes = {self.computed_dtype(v) for v in self._voters(eqn)}
            in_half = dtypes == {facts.half}
            return Choice(facts.half if in_half else FLOAT32, "operands")
        choice = self._choice_by_votes(eqn, rule)
        if choice.computed == FLOAT32:
            return choice._replace(repeated=self.repeated(eqn))
        return choice

    def repeated(self, eqn: jc.JaxprEqn) -> jc.Var | None:
        """What an equation adds to a large half array, if that is broadcast half.

        Its gradient is a sum of what the other's is rounded to. Not so a bias here: in
        a loss of logits both cotangents are computed in the kernel that needs them.
        """
        facts = self.facts
        is_sum = eqn.primitive.name == "add" and facts.bias(eqn) is None
        if not is_sum or facts.votes(eqn.invars) != {facts.half}:
            return None
        large = facts.full_size(eqn)
        small = [v for v in eqn.invars if v not in large and isinstance(v, jc.Var)]
        in_half = all(self.computed_dtype(v) == facts.half for v in large)
        return small[0] if len(small) == len(large) == 1 and in_half else None

    def _choice_of_product(self, eqn: jc.JaxprEqn) -> Choice:
        facts = self.facts
        half = Choice(facts.half, "list", facts.weight(eqn))
        if self.fp8 is None or facts.ruling(eqn)[1]:
            return half
        why, weight = self.fp8.decide(eqn, self.want_of(eqn.outvars[0]).uses)
        return half._replace(why=why, fp8=weight)

    def _choice_by_votes(self, eqn: jc.JaxprEqn, rule: Rule) -> Choice:
        facts = self.facts
        votes, given = facts.votes(eqn.invars), facts.votes(eqn.outvars)
        if facts.half not in given:
            why = {0: "no vote", 1: "operands"}.get(len(votes), "widest")
            return Choice(FLOAT32, why)
        if any(map(self.want_float32, eqn.outvars)):
            if rule is Rule.PROMOTE or all(
                self.computed_dtype(v) == FLOAT32 or self.meets_float32(v)
                for v in self._voters(eqn)
            ):
                return Choice(FLOAT32, "feeder")
        if self._rounds_for_residual(eqn):
            return Choice(FLOAT32, "feeder")
        if self._is_sum_of_loop(eqn, rule):
            return Choice(FLOAT32, "carry")
        small = facts.smaller(eqn)
        if rule is Rule.PROMOTE and (
            FLOAT32 in facts.votes(small) or any(map(facts.is_half_param, small))
        ):
            # One fusion in either dtype: what is read and written costs, no more.
            if facts.widest:
                return Choice(FLOAT32, "norm")
            # As a norm written in half does, it casts apart from what its statistics
            # read: where the cotangents of both meet in half, XLA moves 2 to 5 % less.
            return Choice(FLOAT32, "smaller operand", apart=True)
        if self.is_chained(eqn, rule):
            return Choice(FLOAT32, "fusion")
        if facts.widest and facts.is_ratio(eqn):
            return Choice(FLOAT32, "ratio")
        return Choice(facts.half, "operands" if len(votes) == 1 else "narrowest")

    def _is_sum_of_loop(self, eqn: jc.JaxprEqn, rule: Rule) -> bool:
        """Whether it is a term of what a loop carries in float32, or all of that.

        In half a sum over the iterations would stop growing. A factor of a term may be
        half, as the gates of an LSTM are.
        """
        dtypes, outs = self.facts.votes(eqn.invars), set(eqn.outvars)
        if rule is Rule.MOVE or traits_of(eqn.primitive.name).keeps_range:
            dtypes |= set(map(self.computed_dtype, self._voters(eqn)))
        else:
            outs &= set(self.facts.jaxpr.outvars)
        return FLOAT32 in dtypes and any(map(self.is_carried, outs))

    def _rounds_for_residual(self, eqn: jc.JaxprEqn) -> bool:
        """Whether a loop would keep half of what all others read in float32.

        As of a gate in `(1 - gate) * h + gate * c`: of two roundings the sum is not 1.
        """
        kept = any(self.want_of(v).kept for v in eqn.outvars)
        return kept and all(
            self.computed_dtype(v) == FLOAT32 for v in self._voters(eqn)
        )

    def _voters(self, eqn: jc.JaxprEqn) -> list[Atom]:
        """The operands with a vote."""
        return [v for v in eqn.invars if self.facts[v].vote is not None]


# ---- the program, read backward


def values_of(facts: Facts, out_wants: Sequence[Want]) -> Values:
    """Reads a program of which the facts are known, and what its outputs are for.

    A program in another one is read with that, and again when it is written itself. So
    what was found stays with the facts: however deep it is, it is read once.
    """
    key = tuple(out_wants)
    if key not in facts.wants:
        facts.wants[key] = _read_backward(facts, out_wants)
    return Values(facts, facts.wants[key])


def _read_backward(facts: Facts, out_wants: Sequence[Want]) -> dict[jc.Var, Want]:
    values = Values(facts, {})

    def note(atoms: Sequence[Atom], found: Sequence[Want]) -> None:
        for atom, want in zip(atoms, found, strict=True):
            if not isinstance(atom, jc.Literal):
                values.wants[atom] = _together((values.want_of(atom), want))

    note(facts.jaxpr.outvars, out_wants or [NOBODY] * len(facts.jaxpr.outvars))
    # From the last equation: the readers of its results are all known by then.
    for eqn in reversed(facts.jaxpr.eqns):
        note(eqn.invars, _wants_of_operands(eqn, values))
    return values.wants


def _together(wants: Iterable[Want]) -> Want:
    """What several readers want."""
    first, *others = wants = [want for want in wants if want != NOBODY] or [NOBODY]
    if not others:
        return first
    alls, *rest, uses = zip(*wants, strict=True)
    agreed = False if False in alls else True if True in alls else None
    some, kept, carried = map(any, rest)
    return Want(agreed, some, kept, carried, frozenset().union(*uses))


def _wants_of_operands(eqn: jc.JaxprEqn, values: Values) -> Sequence[Want]:
    """What an equation wants of each operand."""
    if values.facts.programs(eqn):
        return _wants_of_programs(eqn, values)
    rule, _ = values.facts.ruling(eqn)
    want = _wants_by_rule(eqn, rule, values)
    if values.fp8 is None:
        return [want if is_float32(v) else NOBODY for v in eqn.invars]
    uses = values.fp8.uses_of_operands(eqn, values.uses_of(eqn.outvars))
    pairs = zip(eqn.invars, uses, strict=True)
    return [(want if is_float32(v) else NOBODY)._replace(uses=u) for v, u in pairs]


def _wants_of_programs(eqn: jc.JaxprEqn, values: Values) -> list[Want]:
    """What the programs of an equation want of each operand."""
    frames = frames_of(eqn)
    pairs = zip(frames, values.facts.programs(eqn), strict=True)
    wants = [_wants_of_inputs(*pair, values) for pair in pairs]
    # What the programs do not take is the index of a branch.
    others = [NOBODY] * (len(eqn.invars) - len(frames[0].operands))
    return [*others, *map(_together, zip(*wants, strict=True))]


def _wants_by_rule(eqn: jc.JaxprEqn, rule: Rule | None, values: Values) -> Want:
    facts, outs = values.facts, [v for v in eqn.outvars if is_float32(v)]
    if not outs or not facts.is_castable(eqn):
        return NOBODY  # such as a comparison
    if rule is Rule.HALF:
        return _IN_HALF
    if rule is not Rule.PROMOTE and rule is not Rule.MOVE:
        return _IN_FLOAT32
    if facts.bias(eqn) is not None:
        return NOBODY
    # A weight that is only moved, to where a product reads it, is float32 too.
    computes = rule is Rule.PROMOTE and facts.votes(outs) == {FLOAT32}
    if facts.scope.loop and computes and traits_of(primitive_name(eqn)).reads_operands:
        return Want(kept=True)
    if computes or facts.asks(eqn):
        return _IN_FLOAT32
    # It passes on what is wanted of its result.
    want = _together(map(values.want_of, outs))
    some = values.is_chained(eqn, rule) or any(map(values.want_float32, outs))
    moves = rule is Rule.MOVE
    adds = moves or traits_of(eqn.primitive.name).keeps_range
    kept, carried = want.kept and moves, want.carried and adds
    if want.all and values.goes_on(eqn):
        want = want._replace(all=False)
    return want._replace(some=some, kept=kept, carried=carried)


def wants_of_closed(results: Sequence[Atom], values: Values) -> list[Want]:
    """What is wanted of the results of a program that keeps the user's dtypes."""
    wants = map(values.want_of, results)
    return [Want(carried=want.carried, uses=want.uses) for want in wants]


def _wants_of_inputs(frame: Frame, program: Facts, values: Values) -> list[Want]:
    """What a program wants of its inputs: of a loop's, only of the slices.

    Its constants and carries go in and out as the user's program says.
    """
    found = values_of(program, wants_of_results(frame, values))
    fixed = frame.consts + frame.carries
    wants = list(map(found.want_of, frame.program.invars))
    return [*[Want(uses=w.uses) for w in wants[:fixed]], *wants[fixed:]]


def wants_of_results(frame: Frame, values: Values) -> list[Want]:
    """What is wanted of a program's results: of a loop's carries, by its next trip."""
    carries = frame.results[: frame.carries]
    votes = [values.facts[v].vote for v in carries]
    carried = [Want(carried=vote == FLOAT32) for vote in votes]
    if values.fp8 and carries:
        uses = values.fp8.uses_of_carries(frame, values.uses_of(carries))
        pairs = zip(carried, uses, strict=True)
        carried = [want._replace(uses=uses) for want, uses in pairs]
    return [*carried, *map(values.want_of, frame.results[frame.carries :])]
