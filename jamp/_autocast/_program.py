"""The words that the other files of this folder share: policies, scopes, variables."""

import dataclasses
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast._lists import AutocastLists, Rule
from jamp._dtypes import FLOAT32

type Atom = jc.Var | jc.Literal

# Name scopes that mark the operations of `half_function` and its like. A scope is part of
# the traced program, so that jit's caches cannot lose it or leak it.
MARKERS = {
    Rule.HALF: "jamp_half",
    Rule.FLOAT32: "jamp_float32",
    Rule.PROMOTE: "jamp_promote",
    Rule.RECORDED: "jamp_recorded",
}
_MARKER = re.compile("|".join(MARKERS.values()))
_RULES = {marker: rule for rule, marker in MARKERS.items()}


@dataclasses.dataclass(frozen=True)
class Policy:
    """What an autocast was asked for.

    Attributes:
        dtype: the half dtype.
        lists: the user's additions to the table.
        promote: "widest" or "narrowest", for operations whose operands differ.
    """

    dtype: Any
    lists: AutocastLists
    promote: str


class Scope(NamedTuple):
    """Where in the program an equation stands.

    Attributes:
        policy: the policy.
        names: the name stack of the equations around it.
    """

    policy: Policy
    names: str = ""

    def inside(self, eqn: jc.JaxprEqn) -> "Scope":
        """The scope of the programs that an equation holds."""
        names = name_stack(self, eqn)
        rule = self.policy.lists.rule_of_function(str(eqn.params.get("name", "")))
        return self._replace(names=f"{names}/{MARKERS[rule]}" if rule else names)


def name_stack(scope: Scope, eqn: jc.JaxprEqn) -> str:
    """The whole name stack of an equation."""
    return f"{scope.names}/{eqn.source_info.name_stack}"


def rule_of(scope: Scope, eqn: jc.JaxprEqn) -> Rule | None:
    """The rule for an equation; None for a primitive that no list has."""
    listed = scope.policy.lists.rule_of(eqn.primitive.name)
    region = _region_rule(scope, eqn)
    if listed is None or listed is Rule.RECORDED or region is None:
        return listed
    return Rule.MOVE if (region, listed) == (Rule.PROMOTE, Rule.MOVE) else region


def is_float32(atom: Atom) -> bool:
    """Whether the user's program has it in float32: only such values are ever cast."""
    return getattr(atom.aval, "dtype", None) == FLOAT32


def is_float(atom: Atom) -> bool:
    """Whether it is a float of any width."""
    dtype = getattr(atom.aval, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


def is_castable_eqn(eqn: jc.JaxprEqn) -> bool:
    """Whether all its floats are float32; float64 and explicit half stay as they are."""
    atoms = [*eqn.invars, *eqn.outvars]
    return all(is_float32(a) for a in atoms if is_float(a))


def _region_rule(scope: Scope, eqn: jc.JaxprEqn) -> Rule | None:
    names = name_stack(scope, eqn)
    markers = _MARKER.findall(names)
    if markers:
        return _RULES[markers[-1]]
    rules = [r for regex, r in scope.policy.lists.regions if re.search(regex, names)]
    return rules[-1] if rules else None
