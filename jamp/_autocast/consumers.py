"""Reads a program backward: who reads a value in float32, who in half.

    y = dot_general x w     y: float32, for z is wanted so
    m = reduce_max y        m: float32, likewise
    z = sub y m             z: float32, for it is the exponential that reads it
    e = exp z               e: half, for a product reads it
    o = dot_general e v

What a float32 operation reads should be computed in float32 (a *feeder*: `logits - max`
before the exponential), where that costs no memory.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jax.extend import core as jc

from jamp._autocast.facts import Facts
from jamp._autocast.frames import Frame, frames_of
from jamp._autocast.primitives import Rule, traits_of
from jamp._autocast.program import Atom, is_castable_eqn, is_float32
from jamp._core.dtypes import FLOAT32


class Want(NamedTuple):
    """What the readers of a value want."""

    # True where all that care want float32, False where one wants half.
    all: bool | None = None
    some: bool = False  # whether one of them wants float32
    # Whether one of them keeps it for the backward pass of a loop, as it is computed.
    kept: bool = False
    carried: bool = False  # whether it goes to the next trip of a loop in float32


_IN_FLOAT32, _IN_HALF = Want(True, True), Want(False, False)
NOBODY = Want()


class Consumers(NamedTuple):
    """What the readers of some variables want."""

    wants: dict[jc.Var, Want]
    facts: Facts  # what the variables are

    def wants_of(self, atoms: Sequence[Atom]) -> list[Want]:
        """What is wanted of each atom."""
        return [
            NOBODY if isinstance(a, jc.Literal) else self.wants.get(a, NOBODY)
            for a in atoms
        ]

    def want_float32(self, atom: Atom) -> bool:
        """Whether a value should be computed in float32 for those who read it.

        One reader is enough, if the value is made of one array: to compute it again is
        to read as much. If it joins two, or follows a norm, all must agree.
        """
        (want,) = self.wants_of([atom])
        origin = self.facts[atom].origin
        again = not (origin.joins or origin.normalised)
        return want.all is True or (want.some and again)

    def carried(self, atoms: Sequence[Atom]) -> bool:
        """Whether one of them goes to the next trip of a loop in float32."""
        return any(want.carried for want in self.wants_of(atoms))

    def chains(self, eqn: jc.JaxprEqn, rule: Rule | None) -> bool:
        """Whether an operation is one of a chain that is computed in float32."""
        kept = any(want.kept for want in self.wants_of(eqn.outvars))
        return self.facts.is_chained(eqn, rule) and not kept


def consumers_of(facts: Facts, out_wants: Sequence[Want]) -> Consumers:
    """Reads a program of which the facts are known, and what its outputs are for.

    A program in another one is read with that, and again when it is written itself. So
    what was found stays with the facts: however deep it is, it is read once.
    """
    key = tuple(out_wants)
    if key not in facts.readers:
        facts.readers[key] = _read_backward(facts, out_wants)
    return facts.readers[key]


def _read_backward(facts: Facts, out_wants: Sequence[Want]) -> Consumers:
    consumers = Consumers({}, facts)

    def note(atoms, found):
        for atom, want in zip(atoms, found, strict=True):
            if not isinstance(atom, jc.Literal):
                known = consumers.wants.get(atom, NOBODY)
                consumers.wants[atom] = combine((known, want))

    note(facts.jaxpr.outvars, out_wants)
    # From the last equation: the consumers of its results are all known by then.
    for eqn in reversed(facts.jaxpr.eqns):
        note(eqn.invars, wants_of_operands(eqn, consumers))
    return consumers


def combine(wants: Iterable[Want]) -> Want:
    """What several readers want."""
    alls, somes, kept, carried = zip(*wants, strict=True)
    agreed = False if False in alls else True if True in alls else None
    return Want(agreed, any(somes), any(kept), any(carried))


def wants_of_operands(eqn: jc.JaxprEqn, consumers: Consumers) -> Sequence[Want]:
    """What an equation wants of each operand."""
    programs = consumers.facts.programs(eqn)
    if programs:
        frames = frames_of(eqn)
        pairs = zip(frames, programs, strict=True)
        wants = [_wants_of_inputs(*pair, consumers) for pair in pairs]
        # What the programs do not take is the index of a branch.
        others = [NOBODY] * (len(eqn.invars) - len(frames[0].operands))
        return [*others, *map(combine, zip(*wants, strict=True))]
    rule, _ = consumers.facts.ruling(eqn)
    want = _wants_by_rule(eqn, rule, consumers)
    return [want if is_float32(v) else NOBODY for v in eqn.invars]


def _wants_by_rule(eqn: jc.JaxprEqn, rule: Rule | None, consumers: Consumers) -> Want:
    outs = [v for v in eqn.outvars if is_float32(v)]
    if not is_castable_eqn(eqn, rule, consumers.facts.half) or not outs:
        return NOBODY  # such as a comparison
    if rule is Rule.HALF:
        return _IN_HALF
    if rule is not Rule.PROMOTE and rule is not Rule.MOVE:
        return _IN_FLOAT32
    facts = consumers.facts
    if facts.bias(eqn) is not None:
        return NOBODY
    # A weight that is only moved, to where a product reads it, is float32 too.
    computes = rule is Rule.PROMOTE and facts.votes(outs) == {FLOAT32}
    if facts.scope.loop and computes and traits_of(eqn.primitive.name).reads_operands:
        return Want(kept=True)
    if computes or facts.asks(eqn):
        return _IN_FLOAT32
    # It passes on what is wanted of its result.
    want = combine(consumers.wants_of(outs))
    some = consumers.chains(eqn, rule) or any(map(consumers.want_float32, outs))
    moves = rule is Rule.MOVE
    kept, carried = want.kept and moves, want.carried and moves
    return want._replace(some=some, kept=kept, carried=carried)


def _wants_of_inputs(frame: Frame, program: Facts, consumers: Consumers) -> list[Want]:
    """What a program wants of its inputs: of a loop's, only of the slices.

    Its constants and carries go in and out as the user's program says.
    """
    carried = wants_of_carries(frame, consumers.facts)
    outs = consumers.wants_of(frame.results[frame.carries :])
    found = consumers_of(program, [*carried, *outs])
    fixed = frame.consts + frame.carries
    return [NOBODY] * fixed + found.wants_of(frame.program.invars[fixed:])


def wants_of_carries(frame: Frame, facts: Facts) -> list[Want]:
    """What the next trip of a loop wants of its carries."""
    carries = frame.results[: frame.carries]
    return [Want(carried=facts[v].vote == FLOAT32) for v in carries]
