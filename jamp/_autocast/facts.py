"""Reads a program forward: what its values are and ask for, whoever reads them.

    y = dot_general x w     y asks for half
    z = mul y 2.0           z too: the literal has no vote
    e = exp z               e asks for float32
    s = add e y             s too: of two votes the widest decides
    t = add y -1e30         t too: half cannot hold the number

What an operand asks for where it meets others is its *vote*: the dtype that torch's
rules would give it. What it is in fact computed in is decided later, by `values`.
"""

import functools
import operator
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast import origins
from jamp._autocast.frames import Frame, Kind, frames_of
from jamp._autocast.inline import inlined
from jamp._autocast.jax_internals import is_weak_scalar
from jamp._autocast.loops import added_carries
from jamp._autocast.marks import Source, marked_source
from jamp._autocast.origins import Origin, origin_of_unknown
from jamp._autocast.primitives import Rule, Shape, primitive_name, traits_of
from jamp._autocast.program import (
    KEPT,
    NO_MODEL,
    Atom,
    Scope,
    dtype_of,
    exceeds_half,
    is_castable_eqn,
    is_float32,
    ruling,
    size_of,
)
from jamp._core.dtypes import FLOAT32


class Fact(NamedTuple):
    """What is known of a value."""

    # The dtype that it asks for. None for what comes from literals alone and takes the
    # dtype of what it meets, and for what is not float32.
    vote: Any
    asks: bool = False  # whether it holds, or may hold, a literal that half cannot
    origin: Origin = Origin()  # what its numbers are made of
    # Which params of the model they depend on, and whether on other data.
    source: Source = Source.DATA
    # Whether it is the same in all trips of a loop, or an input of the whole program.
    shared: bool = False
    # Whether a loop carries it in float32, or it is a sum with what one carries so.
    carried: bool = False


_NO_SOURCE = Source(0)
# Of numbers in the program; and of those that half cannot hold.
_LITERAL = Fact(None, source=_NO_SOURCE)
_ASKING = Fact(FLOAT32, asks=True, source=_NO_SOURCE)


class Facts:
    """What is known of the values of a program.

    `given` is what is known of its inputs: nothing, if it is empty.
    """

    def __init__(self, jaxpr: jc.Jaxpr, given: Sequence[Fact], scope: Scope):
        self.before = jaxpr
        policy, jaxpr = scope.policy, inlined(jaxpr, scope)
        self.jaxpr, self.given, self.scope = jaxpr, given, scope
        self.half, self.widest = policy.dtype, policy.promote == "widest"
        self._facts: dict[jc.Var, Fact] = {}
        # By the `id` of the equation, all three.
        self._rules: dict[int, tuple[Rule | None, str]] = {}
        self._castable: dict[int, bool] = {}
        self._programs: dict[int, list[Facts]] = {}
        # Tables in float32 whose rows are looked up.
        self.tables: set[Atom] = set()
        inputs = given or [self._unknown(v)._replace(shared=True) for v in jaxpr.invars]
        self._facts.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            self._facts.update(zip(eqn.outvars, self._result_facts(eqn), strict=True))

    # ---- what values are

    def __getitem__(self, atom: Atom) -> Fact:
        """What is known of a value."""
        if isinstance(atom, jc.Literal):
            asks = is_float32(atom) and exceeds_half(atom.val, self.half)
            return _ASKING if asks else _LITERAL
        try:
            return self._facts[atom]
        except KeyError:
            return self._unknown(atom)

    def source(self, atoms: Iterable[Atom]) -> Source:
        """What values depend on, together."""
        return _joint_source(self[v] for v in atoms)

    def ruling(self, eqn: jc.JaxprEqn) -> tuple[Rule | None, str]:
        """As `program.ruling`; a product may be in float32 for its weight."""
        if id(eqn) not in self._rules:
            self._rules[id(eqn)] = self._ruling(eqn)
        return self._rules[id(eqn)]

    def is_castable(self, eqn: jc.JaxprEqn) -> bool:
        """Whether an equation may be cast, as `program.is_castable_eqn` says."""
        if id(eqn) not in self._castable:
            rule, _ = self.ruling(eqn)
            self._castable[id(eqn)] = is_castable_eqn(eqn, rule, self.half)
        return self._castable[id(eqn)]

    def _ruling(self, eqn: jc.JaxprEqn) -> tuple[Rule | None, str]:
        rule, region = ruling(self.scope, eqn)
        if rule is not Rule.HALF or region or not self.scope.policy.of_model:
            return rule, region
        sources = [self.params_in(v) for v in eqn.invars]
        sources += [Source.HALF for v in eqn.invars if dtype_of(v) == self.half]
        if Source.KEPT in sources and Source.HALF not in sources:
            return Rule.FLOAT32, KEPT
        of_model = any(Source.HALF in source for source in sources)
        return (rule, region) if of_model else (Rule.FLOAT32, NO_MODEL)

    def _unknown(self, atom: Atom) -> Fact:
        source = self.scope.within
        if not is_float32(atom):
            # Half params that the user's program has from elsewhere.
            is_half = dtype_of(atom) == self.half
            return Fact(None, source=Source.HALF if is_half else source)
        vote = None if is_weak_scalar(atom) else FLOAT32
        origin, carried = origin_of_unknown(atom), self.scope.carried
        return Fact(vote, origin=origin, source=source, carried=carried)

    def is_half_param(self, atom: Atom) -> bool:
        """Whether a value is made of half params alone: it rounds nothing it meets."""
        return self.params_in(atom) == Source.HALF

    def is_weight(self, atom: Atom) -> bool:
        """Whether a value is made of params alone: of a half model, of half ones."""
        weights = Source.HALF if self.scope.policy.of_model else Source.KEPT
        return self.params_in(atom) == weights

    def depends_on_params(self, atom: Atom) -> bool:
        """Whether a value is made of some param, and maybe of data too."""
        return bool(self[atom].source & (Source.HALF | Source.KEPT))

    def params_in(self, atom: Atom) -> Source:
        """The params that a value depends on, whatever fp8 does with them."""
        return self[atom].source & ~Source.STAYS

    def votes(self, atoms: Sequence[Atom]) -> set[Any]:
        """The dtypes that operands ask for."""
        return {self[v].vote for v in atoms} - {None}

    def asks(self, eqn: jc.JaxprEqn) -> bool:
        """Whether an operand of an equation asks for float32 by its number."""
        fill = eqn.params.get("fill_value")
        fills = fill is not None and is_float32(eqn.outvars[0])
        asks = any([self[v].asks for v in eqn.invars])
        return asks or fills and exceeds_half(fill, self.half)

    def full_size(self, eqn: jc.JaxprEqn) -> list[Atom]:
        """The operands that are as large as the result, and not by being broadcast."""
        size = max(size_of(v) for v in [*eqn.invars, *eqn.outvars])
        full = [v for v in eqn.invars if size_of(v) == size]
        return [v for v in full if self[v].origin.varies is None]

    def bias(self, eqn: jc.JaxprEqn) -> jc.Var | None:
        """The bias that an equation adds to a product in half, if it does."""
        if eqn.primitive.name != "add" or self.half not in self.votes(eqn.invars):
            return None
        for product, bias in (eqn.invars, eqn.invars[::-1]):
            fact, of_product = self[bias], self[product].origin
            if fact.asks or fact.carried:
                continue
            if isinstance(bias, jc.Var) and is_float32(bias):
                if origins.is_bias(bias, fact.origin, of_product):
                    return bias
        return None

    @property
    def key(self) -> Any:
        """Equal for programs that are rewritten to the same, wherever they stand."""
        numbers: dict[Any, int] = {}
        given = [f._replace(origin=f.origin.numbered(numbers)) for f in self.given]
        return id(self.before), self.scope.key, tuple(given)

    def programs(self, eqn: jc.JaxprEqn) -> "list[Facts]":
        """The same of each program that an equation holds, if values pass into it."""
        return self._programs.get(id(eqn), [])

    def program(
        self, eqn: jc.JaxprEqn, jaxpr: jc.Jaxpr, given: Sequence[Fact]
    ) -> "Facts":
        """The same of a program that an equation holds, by what is known going in."""
        for facts in self.programs(eqn):
            if facts.before is jaxpr and list(facts.given) == list(given):
                return facts
        return Facts(jaxpr, given, self.scope_of_programs(eqn))

    def scope_of_programs(self, eqn: jc.JaxprEqn) -> Scope:
        """The scope of the programs that an equation holds.

        Of a derivative's operands nothing is known: it is in half as a product is.
        """
        weighted = any(self.params_in(v) == Source.KEPT for v in eqn.invars)
        within = Source.DATA if weighted else self.source(eqn.invars)
        frames = frames_of(eqn)
        closed = not frames or frames[0].kind is Kind.CALL and not frames[0].is_open
        carried = closed and any(self[v].carried for v in eqn.invars)
        scope = self.scope.scope_of_programs(eqn)
        return scope._replace(within=within or Source.DATA, carried=carried)

    # ---- what an equation makes of them

    def _result_facts(self, eqn: jc.JaxprEqn) -> list[Fact]:
        frames = frames_of(eqn)
        if frames and frames[0].is_open:
            found = [self._frame_facts(eqn, frame) for frame in frames]
            return [_fact_of_one_of(facts) for facts in zip(*found, strict=True)]
        source = marked_source(eqn)
        if source is not None:
            vote = self.half if Source.HALF in source else FLOAT32
            asks = self[eqn.invars[0]].asks
            return [Fact(vote, asks, origin_of_unknown(eqn.outvars[0]), source)]
        rule, region = self.ruling(eqn)
        # What is made of a kept weight stays float32, until it meets half again.
        ends = region in (KEPT, NO_MODEL)
        source = Source.DATA if ends else self.source(eqn.invars)
        found = [self._result_fact(eqn, v, rule) for v in eqn.outvars]
        return [fact._replace(source=source) for fact in found]

    def _frame_facts(self, eqn: jc.JaxprEqn, frame: Frame) -> list[Fact]:
        """What is known of the results of a program that values pass through."""
        is_loop = frame.kind is Kind.LOOP
        given = self.trip_facts(frame) if is_loop else [self[v] for v in frame.operands]
        found = Facts(frame.program, given, self.scope_of_programs(eqn))
        self._programs.setdefault(id(eqn), []).append(found)
        self.tables |= found.tables
        if is_loop:
            return self._loop_facts(frame, found)
        known = frozenset().union(*(fact.origin.roots for fact in given))
        facts = []
        for inner, outer in zip(found.jaxpr.outvars, frame.results, strict=True):
            fact = found[inner]
            facts.append(fact._replace(origin=fact.origin.returned(known, outer)))
        return facts

    def _loop_facts(self, frame: Frame, found: "Facts") -> list[Fact]:
        facts, in_half = [], self._half_carries(frame, found)
        for i, inner in enumerate(found.jaxpr.outvars):
            fact = self._unknown(frame.results[i])._replace(source=found[inner].source)
            if i >= frame.carries or i in in_half:
                fact = fact._replace(vote=found[inner].vote)
            facts.append(fact)
        return facts

    def _half_carries(self, frame: Frame, found: "Facts") -> set[int]:
        """The carries that are activations: half after each trip, and no sums."""
        starts = [self[v] for v in frame.operands[frame.consts :][: frame.carries]]
        votes = [found[v].vote for v in found.jaxpr.outvars]
        pairs = enumerate(zip(votes, starts, strict=False))
        given = (i for i, (v, x) in pairs if v == self.half and x.vote and not x.asks)
        in_half = set() if self.widest else set(given)
        of_model = self.scope.policy.of_model
        slices = frame.operands[frame.consts + frame.carries :]
        are_weights = [not of_model or self.is_weight(v) for v in slices]
        return in_half and in_half - added_carries(frame, are_weights)

    def trip_facts(self, frame: Frame) -> list[Fact]:
        """What is known of the inputs of a scan's body, with all carries in float32."""
        fixed = frame.consts + frame.carries
        known = self.operand_facts(frame.operands, range(frame.consts, fixed))
        for i, v in enumerate(frame.operands):
            fact = self[v]
            vote = fact.vote if i >= fixed else known[i].vote
            shared = i < frame.consts
            known[i] = known[i]._replace(asks=fact.asks, vote=vote, shared=shared)
        return known

    def operand_facts(
        self, operands: Sequence[Atom], carries: Sequence[int] = ()
    ) -> list[Fact]:
        """What is known of operands where they go in as the user's program has them.

        At the places of `carries` are those that may be made of all, after some trips.
        """
        facts = map(self.__getitem__, operands)
        known = [
            self._unknown(v)._replace(source=fact.source, carried=fact.carried)
            for v, fact in zip(operands, facts, strict=True)
        ]
        for i in carries:
            known[i] = known[i]._replace(source=self.source(operands))
        return known

    def _result_fact(self, eqn: jc.JaxprEqn, out: jc.Var, rule: Rule | None) -> Fact:
        if not is_float32(out):
            return Fact(None)
        if rule is Rule.RECORDED or rule is None or not self.is_castable(eqn):
            # A mask is exact in any dtype.
            mask = eqn.invars and dtype_of(eqn.invars[0]) == jnp.bool_
            exact = mask and eqn.primitive.name == "convert_element_type"
            return self._unknown(out)._replace(vote=None if exact else FLOAT32)
        given = [self[v] for v in eqn.invars]
        origin = origins.origin_of_result(eqn, out, rule, [f.origin for f in given])
        if rule is Rule.HALF or rule is Rule.FLOAT32:
            return Fact(self.half if rule is Rule.HALF else FLOAT32, origin=origin)
        first = given[0] if given else Fact(None)
        if eqn.primitive.name == "gather" and first.shared and first.vote == FLOAT32:
            self.tables |= first.origin.roots
        literal = all([fact.asks or not fact.vote for fact in given])
        traits = traits_of(primitive_name(eqn))
        keeps = rule is Rule.MOVE or traits.keeps_range
        asks = (keeps or literal) and self.asks(eqn)
        vote = self._vote(eqn, out, rule, asks)
        shared = first.shared and traits.shape is Shape.RESHAPE
        carried = vote == FLOAT32 and self.adds_to_carry(eqn)
        return Fact(vote, asks, origin, shared=shared, carried=carried)

    def _vote(self, eqn: jc.JaxprEqn, out: jc.Var, rule: Rule, asks: bool) -> Any:
        """What the result of an operation that only takes what it gets asks for."""
        votes = self.votes(eqn.invars)
        if asks or _reads_single(eqn) or self.adds_to_carry(eqn):
            return FLOAT32
        if not votes:
            literal = rule is Rule.MOVE or is_weak_scalar(out)
            return None if literal and any(map(is_float32, eqn.invars)) else FLOAT32
        if len(votes) == 1:
            return next(iter(votes))
        # Of several results, as of a barrier, each would have to be rounded.
        narrow = not self.widest and len(eqn.outvars) == 1
        if narrow or self.bias(eqn) is not None:
            in_half = (v for v in eqn.invars if self[v].vote == self.half)
            return FLOAT32 if all(map(self.is_half_param, in_half)) else self.half
        return self.half if self._normalizes(eqn) else FLOAT32

    def adds_to_carry(self, eqn: jc.JaxprEqn) -> bool:
        """Whether a result is a float32 carry of a loop, moved, scaled or added to.

        A gate is another array: its product with a carry may be half, as in an LSTM.
        """
        carries = [v for v in eqn.invars if self[v].carried]
        if not carries:
            return False
        traits = traits_of(primitive_name(eqn))
        moves = traits.keeps_range or self.ruling(eqn)[0] is Rule.MOVE
        others = [v for v in eqn.invars if v not in carries and is_float32(v)]
        scales = traits.reads_operands and all(size_of(v) == 1 for v in others)
        is_carry = eqn.outvars[0] in self._results
        return moves or scales or is_carry

    @functools.cached_property
    def _results(self) -> set[Atom]:
        return {v for v in self.jaxpr.outvars if isinstance(v, jc.Var)}

    def _normalizes(self, eqn: jc.JaxprEqn) -> bool:
        """Whether it is part of a norm of a value in half, which stays half.

        As torch's batch and group norms, and XLA's fusions, hand on what they got.
        """
        full = self.full_size(eqn)
        small = [v for v in eqn.invars if v not in full]
        if self.votes(full) != {self.half}:
            return False
        return origins.is_normalized(
            [self[v].origin for v in full], [self[v].origin for v in small]
        )


def _fact_of_one_of(facts: Sequence[Fact]) -> Fact:
    """What is known of a value that is one of several."""
    if len(facts) == 1:
        return facts[0]
    votes = {fact.vote for fact in facts} - {None}
    vote = FLOAT32 if len(votes) > 1 else next(iter(votes), None)
    asks, carried = (
        any(getattr(f, name) for f in facts) for name in ("asks", "carried")
    )
    return Fact(vote, asks, source=_joint_source(facts), carried=carried)


def _joint_source(facts: Iterable[Fact]) -> Source:
    return functools.reduce(operator.or_, {f.source for f in facts}, _NO_SOURCE)


def _reads_single(eqn):
    name = primitive_name(eqn)
    if name == "gather":
        return all(n == 1 for n in eqn.params["slice_sizes"])
    return traits_of(name).shape is Shape.REDUCE
