"""Reads a program forward, and finds the dtype that each value asks for.

    y = dot_general x w     y asks for half
    z = mul y 2.0           z asks for half: the literal has no vote
    e = exp z               e asks for float32
    s = add e y             s asks for float32: the widest of two votes decides
    t = add y -1e30         t asks for float32: half cannot hold the number

The *vote* of a value is the dtype that it asks for when it meets other operands: the
dtype that torch's rules would give it. `decide` chooses the dtype of the computation.
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
    """The facts about one value."""

    # The dtype that it asks for. A value has no vote if it is not float32. A value that
    # is computed from literals alone has none either, and takes the others' dtype.
    vote: Any
    asks: bool = False  # whether it may hold a literal that half cannot represent
    origin: Origin = Origin()  # the arrays that it is computed from
    # Whether it depends on half params, on kept params, or on other data.
    source: Source = Source.DATA
    # Whether it is the same in all trips of a loop, or an input of the whole program.
    shared: bool = False
    # Whether a loop carries it in float32, or it is a sum with such a carry.
    carried: bool = False


_NO_SOURCE = Source(0)
# The facts of a literal, and of a literal that half cannot represent.
_LITERAL = Fact(None, source=_NO_SOURCE)
_ASKING = Fact(FLOAT32, asks=True, source=_NO_SOURCE)


class Facts:
    """The facts about all values of a program.

    `given` holds the facts about its inputs. It is empty if these are unknown.
    """

    def __init__(self, jaxpr: jc.Jaxpr, given: Sequence[Fact], scope: Scope):
        self.before = jaxpr
        policy, jaxpr = scope.policy, inlined(jaxpr, scope)
        self.jaxpr, self.given, self.scope = jaxpr, given, scope
        self.half, self.widest = policy.dtype, policy.promote == "widest"
        self._facts: dict[jc.Var, Fact] = {}
        # The `id` of the equation is the key in all three.
        self._rules: dict[int, tuple[Rule | None, str]] = {}
        self._castable: dict[int, bool] = {}
        self._programs: dict[int, list[Facts]] = {}
        # The float32 embedding tables: the program looks up their rows.
        self.tables: set[Atom] = set()
        inputs = given or [self._unknown(v)._replace(shared=True) for v in jaxpr.invars]
        self._facts.update(zip(jaxpr.invars, inputs, strict=True))
        for eqn in jaxpr.eqns:
            self._facts.update(zip(eqn.outvars, self._result_facts(eqn), strict=True))

    # ---- facts about values

    def __getitem__(self, atom: Atom) -> Fact:
        """Returns the facts about a value."""
        if isinstance(atom, jc.Literal):
            asks = is_float32(atom) and exceeds_half(atom.val, self.half)
            return _ASKING if asks else _LITERAL
        try:
            return self._facts[atom]
        except KeyError:
            return self._unknown(atom)

    def source(self, atoms: Iterable[Atom]) -> Source:
        """Returns the inputs that several values depend on, together."""
        return _joint_source(self[v] for v in atoms)

    def ruling(self, eqn: jc.JaxprEqn) -> tuple[Rule | None, str]:
        """Returns `program.ruling`, unless a half model's params require float32."""
        if id(eqn) not in self._rules:
            self._rules[id(eqn)] = self._ruling(eqn)
        return self._rules[id(eqn)]

    def is_castable(self, eqn: jc.JaxprEqn) -> bool:
        """Returns whether autocast may cast an equation, and caches the answer."""
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
            # A half value that jamp did not mark counts as a half param.
            is_half = dtype_of(atom) == self.half
            return Fact(None, source=Source.HALF if is_half else source)
        vote = None if is_weak_scalar(atom) else FLOAT32
        origin, carried = origin_of_unknown(atom), self.scope.carried
        return Fact(vote, origin=origin, source=source, carried=carried)

    def is_half_param(self, atom: Atom) -> bool:
        """Returns whether a value depends on half params alone. It rounds no other."""
        return self.params_in(atom) == Source.HALF

    def is_weight(self, atom: Atom) -> bool:
        """Returns whether a value depends only on params of the model's dtype."""
        weights = Source.HALF if self.scope.policy.of_model else Source.KEPT
        return self.params_in(atom) == weights

    def depends_on_params(self, atom: Atom) -> bool:
        """Returns whether a value depends on a param. It may depend on data too."""
        return bool(self[atom].source & (Source.HALF | Source.KEPT))

    def params_in(self, atom: Atom) -> Source:
        """Returns the source of a value, without the flag for fp8."""
        return self[atom].source & ~Source.STAYS

    def votes(self, atoms: Sequence[Atom]) -> set[Any]:
        """Returns the dtypes that operands ask for."""
        return {self[v].vote for v in atoms} - {None}

    def asks(self, eqn: jc.JaxprEqn) -> bool:
        """Returns whether an operand or a fill value is too large or small for half."""
        fill = eqn.params.get("fill_value")
        fills = fill is not None and is_float32(eqn.outvars[0])
        asks = any([self[v].asks for v in eqn.invars])
        return asks or fills and exceeds_half(fill, self.half)

    def full_size(self, eqn: jc.JaxprEqn) -> list[Atom]:
        """Returns the full-size operands that are not broadcast values."""
        size = max(size_of(v) for v in [*eqn.invars, *eqn.outvars])
        full = [v for v in eqn.invars if size_of(v) == size]
        return [v for v in full if self[v].origin.varies is None]

    def bias(self, eqn: jc.JaxprEqn) -> jc.Var | None:
        """Returns the bias that an equation adds to a matmul in half, or None."""
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
        """A key that is equal for programs with the same rewritten form."""
        numbers: dict[Any, int] = {}
        given = [f._replace(origin=f.origin.numbered(numbers)) for f in self.given]
        return id(self.before), self.scope.key, tuple(given)

    def programs(self, eqn: jc.JaxprEqn) -> "list[Facts]":
        """Returns the facts of each inner program that takes values in any dtype."""
        return self._programs.get(id(eqn), [])

    def program(
        self, eqn: jc.JaxprEqn, jaxpr: jc.Jaxpr, given: Sequence[Fact]
    ) -> "Facts":
        """Returns the facts of a program that an equation holds, given its inputs'."""
        for facts in self.programs(eqn):
            if facts.before is jaxpr and list(facts.given) == list(given):
                return facts
        return Facts(jaxpr, given, self.scope_of_programs(eqn))

    def scope_of_programs(self, eqn: jc.JaxprEqn) -> Scope:
        """Returns the scope of the programs that an equation holds.

        A closed program does not know the sources of its inputs, so all inherit the
        equation's. If an operand is a kept weight, they all count as data, so that a
        matmul inside runs in float32, like a matmul of this weight.
        """
        weighted = any(self.params_in(v) == Source.KEPT for v in eqn.invars)
        within = Source.DATA if weighted else self.source(eqn.invars)
        frames = frames_of(eqn)
        closed = not frames or frames[0].kind is Kind.CALL and not frames[0].is_open
        carried = closed and any(self[v].carried for v in eqn.invars)
        scope = self.scope.scope_of_programs(eqn)
        return scope._replace(within=within or Source.DATA, carried=carried)

    # ---- facts about results

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
        # The result counts as data: it stays float32 until it meets a half param.
        ends = region in (KEPT, NO_MODEL)
        source = Source.DATA if ends else self.source(eqn.invars)
        found = [self._result_fact(eqn, v, rule) for v in eqn.outvars]
        return [fact._replace(source=source) for fact in found]

    def _frame_facts(self, eqn: jc.JaxprEqn, frame: Frame) -> list[Fact]:
        """Returns the facts about the results of an open program."""
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
        """Returns the carries that are half after each trip and that nothing sums."""
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
        """Returns the facts about the inputs of a scan's body, for float32 carries."""
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
        """Returns the facts about operands that a program takes in the user's dtypes.

        After some trips, the operands at the places of `carries` may depend on all.
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
            # A mask is exact in any dtype, so it has no vote.
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
        """Returns the vote of a result whose rule is to follow the operands."""
        votes = self.votes(eqn.invars)
        if asks or _reads_single(eqn) or self.adds_to_carry(eqn):
            return FLOAT32
        if not votes:
            literal = rule is Rule.MOVE or is_weak_scalar(out)
            return None if literal and any(map(is_float32, eqn.invars)) else FLOAT32
        if len(votes) == 1:
            return next(iter(votes))
        # An equation with several results, such as a barrier, would round each of them.
        narrow = not self.widest and len(eqn.outvars) == 1
        if narrow or self.bias(eqn) is not None:
            in_half = (v for v in eqn.invars if self[v].vote == self.half)
            return FLOAT32 if all(map(self.is_half_param, in_half)) else self.half
        return self.half if self._normalizes(eqn) else FLOAT32

    def adds_to_carry(self, eqn: jc.JaxprEqn) -> bool:
        """Returns whether an equation moves, scales or returns a loop's float32 carry.

        The product of a carry and a gate may run in half, as in an LSTM.
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
        """Returns whether it is part of a norm of a half value. The result is half.

        torch's batch and group norms also return the dtype of their input.
        """
        full = self.full_size(eqn)
        small = [v for v in eqn.invars if v not in full]
        if self.votes(full) != {self.half}:
            return False
        return origins.is_normalized(
            [self[v].origin for v in full], [self[v].origin for v in small]
        )


def _fact_of_one_of(facts: Sequence[Fact]) -> Fact:
    """Returns the facts about the result of a `cond`, given each branch's."""
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
