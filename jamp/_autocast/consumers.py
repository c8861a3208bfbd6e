"""Reads a program backward: who wants a value in float32, who reads it in half.

A value whose consumers all run in float32 should be computed in float32 (a *feeder*:
`logits - max` before the exponential). A value that a matmul reads in half anyway is
read in half by its other consumers too (a *shared copy*).
"""

from collections.abc import Sequence
from typing import NamedTuple

from jax.extend import core as jc

from jamp._autocast.jax_internals import CHECKPOINT, program_of, scan_counts
from jamp._autocast.lists import Rule
from jamp._autocast.program import Atom, Scope, is_castable_eqn, is_float32, ruling

type Want = bool | None  # of float32; None: whoever reads it does not care


class Consumers(NamedTuple):
    """What the consumers of some variables say.

    Attributes:
        wants: True where all consumers that care want float32.
        in_half: the variables that a matmul or convolution reads in half.
    """

    wants: dict[jc.Var, Want]
    in_half: set[jc.Var]

    def wants_of(self, atoms: Sequence[Atom]) -> list[Want]:
        """What is wanted of each atom."""
        return [None if isinstance(a, jc.Literal) else self.wants.get(a) for a in atoms]

    def want_float32(self, atom: Atom) -> bool:
        """Whether all consumers that care want it in float32."""
        return not isinstance(atom, jc.Literal) and self.wants.get(atom) is True

    def read_in_half(self, atom: Atom) -> bool:
        """Whether a matmul or convolution reads it in half."""
        return not isinstance(atom, jc.Literal) and atom in self.in_half


def consumers_of(jaxpr: jc.Jaxpr, out_wants: Sequence[Want], scope: Scope) -> Consumers:
    """Reads a program, given what is wanted of its outputs."""
    wants: dict[jc.Var, list[Want]] = {}
    in_half: set[jc.Var] = set()

    def note(atoms, found):
        for atom, want in zip(atoms, found, strict=True):
            if not isinstance(atom, jc.Literal):
                wants.setdefault(atom, []).append(want)

    note(jaxpr.outvars, out_wants)
    # From the last equation: the consumers of its results are all known by then.
    for eqn in reversed(jaxpr.eqns):
        outs = [combine(wants.get(v, ())) for v in eqn.outvars]
        results_in_half = any(v in in_half for v in eqn.outvars)
        found, reads = _of_equation(eqn, outs, results_in_half, scope)
        note(eqn.invars, found)
        in_half |= {
            v
            for v, read in zip(eqn.invars, reads, strict=True)
            if read and not isinstance(v, jc.Literal)
        }
    return Consumers({v: combine(found) for v, found in wants.items()}, in_half)


def combine(wants: Sequence[Want]) -> Want:
    """One refusal decides; otherwise one wish."""
    return False if False in wants else True if True in wants else None


# For each operand: what the equation wants of it, and whether it reads it in half.
type _Answer = tuple[list[Want], list[bool]]


def _of_equation(
    eqn: jc.JaxprEqn, outs: list[Want], results_in_half: bool, scope: Scope
) -> _Answer:
    inside = _INSIDE.get(eqn.primitive.name)
    if inside is not None:
        return inside(eqn, outs, scope)
    rule, _ = ruling(scope, eqn)
    want, half = _of_rule(eqn, rule, outs, results_in_half)
    castable = list(map(is_float32, eqn.invars))
    return [want if c else None for c in castable], [half and c for c in castable]


def _of_rule(
    eqn: jc.JaxprEqn, rule: Rule | None, outs: list[Want], results_in_half: bool
) -> tuple[Want, bool]:
    if not is_castable_eqn(eqn) or not any(is_float32(v) for v in eqn.outvars):
        return None, False  # such as a comparison
    if rule is Rule.HALF:
        return False, True
    if rule is Rule.PROMOTE or rule is Rule.MOVE:
        # It passes on what is wanted of its result. What is only moved is rounded the
        # same before and after; a sum of rounded terms is another sum.
        return combine(outs), rule is Rule.MOVE and results_in_half
    return True, False


def _of_inputs(
    inner: jc.Jaxpr, eqn: jc.JaxprEqn, outs: list[Want], scope: Scope
) -> _Answer:
    """What a program that an equation holds says of its inputs."""
    found = consumers_of(inner, outs, scope.inside(eqn))
    return found.wants_of(inner.invars), [found.read_in_half(v) for v in inner.invars]


def _of_call(eqn: jc.JaxprEqn, outs: list[Want], scope: Scope) -> _Answer:
    return _of_inputs(program_of(eqn), eqn, outs, scope)


def _of_cond(eqn: jc.JaxprEqn, outs: list[Want], scope: Scope) -> _Answer:
    branches = [_of_inputs(b, eqn, outs, scope) for b in eqn.params["branches"]]
    wants, reads = zip(*branches, strict=True)
    return (
        [None, *map(combine, zip(*wants, strict=True))],  # the first is the index
        [False, *map(any, zip(*reads, strict=True))],
    )


def _of_scan(eqn: jc.JaxprEqn, outs: list[Want], scope: Scope) -> _Answer:
    """Only of the slices; constants and carries go in and out as the program says."""
    consts, carry = scan_counts(eqn)
    outs = [None] * carry + outs[carry:]
    wants, reads = _of_inputs(program_of(eqn), eqn, outs, scope)
    fixed = consts + carry
    return [None] * fixed + wants[fixed:], [False] * len(reads)


# Into the others values go in float32, as the program says.
_INSIDE = {
    "jit": _of_call,
    CHECKPOINT: _of_call,
    "closed_call": _of_call,
    "custom_jvp_call": _of_call,
    "cond": _of_cond,
    "scan": _of_scan,
}
