"""Reads a program backward: who wants a value in float32, who reads it in half.

A value whose consumers all run in float32 should be computed in float32 (a *feeder*:
`logits - max` before the exponential). A value that a matmul reads in half anyway is
read in half by its other consumers too (a *shared copy*).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from jax.extend import core as jc

from jamp._autocast.lists import Rule
from jamp._autocast.program import Atom, Scope, is_castable_eqn, is_float32, rule_of
from jamp._core.compat import scan_counts

type Want = bool | None  # None: whoever reads it does not care


class Demand(NamedTuple):
    """What the consumers of some variables say.

    Attributes:
        wants: True where all consumers that care want float32.
        halved: the variables that a matmul or convolution reads in half.
    """

    wants: dict[jc.Var, Want]
    halved: set[jc.Var]

    def of(self, atoms: Sequence[Atom]) -> list[Want]:
        """What is wanted of each atom."""
        return [None if isinstance(a, jc.Literal) else self.wants.get(a) for a in atoms]

    def wants_float32(self, atom: Atom) -> bool:
        """Whether all consumers that care want it in float32."""
        return not isinstance(atom, jc.Literal) and self.wants.get(atom) is True

    def reads_half(self, atoms: Sequence[Atom]) -> list[bool]:
        """Which atoms are read in half."""
        return [not isinstance(a, jc.Literal) and a in self.halved for a in atoms]


def demand(jaxpr: jc.Jaxpr, out_wants: Sequence[Want], scope: Scope) -> Demand:
    """Reads a program, given what is wanted of its outputs."""
    uses: dict[jc.Var, list[Want]] = {}
    halved: set[jc.Var] = set()

    def use(atoms, wants):
        for atom, want in zip(atoms, wants, strict=True):
            if not isinstance(atom, jc.Literal):
                uses.setdefault(atom, []).append(want)

    use(jaxpr.outvars, out_wants)
    for eqn in reversed(jaxpr.eqns):
        outs = [combine(uses.get(v, ())) for v in eqn.outvars]
        halves = [v in halved for v in eqn.outvars]
        wants, reads = _of_equation(eqn, outs, halves, scope)
        use(eqn.invars, wants)
        halved |= {
            v
            for v, read in zip(eqn.invars, reads, strict=True)
            if read and not isinstance(v, jc.Literal)
        }
    return Demand({v: combine(wants) for v, wants in uses.items()}, halved)


def combine(wants: Sequence[Want]) -> Want:
    """One refusal decides; otherwise one wish."""
    return False if False in wants else True if True in wants else None


type _Answer = tuple[list[Want], list[bool]]


def _of_equation(
    eqn: jc.JaxprEqn, outs: list[Want], halves: list[bool], scope: Scope
) -> _Answer:
    inside = _INSIDE.get(eqn.primitive.name)
    if inside is not None:
        return inside(eqn, outs, scope)
    rule = rule_of(scope, eqn)
    want, half = _of_rule(eqn, rule, outs, halves)
    return (
        [want if is_float32(v) else None for v in eqn.invars],
        [half and is_float32(v) for v in eqn.invars],
    )


def _of_rule(
    eqn: jc.JaxprEqn, rule: Rule | None, outs: list[Want], halves: list[bool]
) -> tuple[Want, bool]:
    if not is_castable_eqn(eqn) or not any(is_float32(v) for v in eqn.outvars):
        return None, False  # such as a comparison
    if rule is Rule.HALF:
        return False, True
    if rule is Rule.PROMOTE or rule is Rule.MOVE:
        return combine(outs), rule is Rule.MOVE and any(halves)
    return True, False


def _of_call(name: str) -> Callable[[jc.JaxprEqn, list[Want], Scope], _Answer]:
    def answer(eqn, outs, scope):
        inner = eqn.params[name]
        found = demand(inner, outs, scope.inside(eqn))
        return found.of(inner.invars), found.reads_half(inner.invars)

    return answer


def _of_cond(eqn: jc.JaxprEqn, outs: list[Want], scope: Scope) -> _Answer:
    answers = [
        (found.of(branch.invars), found.reads_half(branch.invars))
        for branch in eqn.params["branches"]
        for found in [demand(branch, outs, scope.inside(eqn))]
    ]
    wants = [combine(wants) for wants in zip(*(w for w, _ in answers), strict=True)]
    reads = [any(reads) for reads in zip(*(r for _, r in answers), strict=True)]
    return [None, *wants], [False, *reads]


def _of_scan(eqn: jc.JaxprEqn, outs: list[Want], scope: Scope) -> _Answer:
    """Only of the slices; constants and carries go in and out as the program says."""
    inner = eqn.params["jaxpr"]
    consts, carry, _ = scan_counts(eqn.params)
    outs = [None] * carry + outs[carry:]
    wants = demand(inner, outs, scope.inside(eqn)).of(inner.invars)
    fixed = consts + carry
    return [None] * fixed + wants[fixed:], [False] * len(wants)


_INSIDE = {
    "jit": _of_call("jaxpr"),
    "remat2": _of_call("jaxpr"),
    "closed_call": _of_call("call_jaxpr"),
    "custom_jvp_call": _of_call("call_jaxpr"),
    "cond": _of_cond,
    "scan": _of_scan,
}
