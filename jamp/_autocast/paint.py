"""Reads a program forward, and writes it anew with each operation in its precision.

The result is a jaxpr: equations keep their source lines and name stacks, and what JAX
does with a program (derivatives, batching, jit) it does with this one.
"""

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc
from jax.extend.core import primitives

from jamp._autocast.demand import Demand, Want, demand
from jamp._autocast.islands import checkpoint_islands
from jamp._autocast.lists import Rule
from jamp._autocast.program import (
    Atom,
    Decision,
    Scope,
    dtype_of,
    is_castable_eqn,
    is_float32,
    name_stack,
    ruling,
    size_of,
)
from jamp._core.dtypes import FLOAT32
from jamp._core.warnings import AutocastWarning

type SubProgramRule = Callable[["Painter", jc.JaxprEqn], None]

# Parameters of equations that name the dtype of the result.
_DTYPE_PARAMS = ("preferred_element_type", "new_dtype")


def paint(
    jaxpr: jc.Jaxpr,
    in_dtypes: Sequence[Any],
    out_dtypes: Sequence[Any],
    out_wants: Sequence[Want],
    scope: Scope,
    rules: Mapping[str, SubProgramRule],
    neutral: Sequence[bool] = (),
) -> jc.Jaxpr:
    """Writes a program anew.

    Args:
        jaxpr: the user's program.
        in_dtypes: what comes in; None is what the program says.
        out_dtypes: what must go out; None is whatever is at hand.
        out_wants: for outputs that are free, whether float32 is wanted of them.
        scope: policy and place.
        rules: how to write each primitive that holds programs.
        neutral: which inputs come from literals alone, and do not vote.

    Returns:
        A program with the same inputs and outputs, but for their dtypes.
    """
    painter = Painter(jaxpr, in_dtypes, demand(jaxpr, out_wants, scope), scope, rules)
    painter.neutral.update(jaxpr.invars[i] for i, flag in enumerate(neutral) if flag)
    for eqn in jaxpr.eqns:
        painter.equation(eqn)
    outvars = [
        painter.read(v, painter.handed(v) if dtype is None else dtype)
        for v, dtype in zip(jaxpr.outvars, out_dtypes, strict=True)
    ]
    painted = jaxpr.replace(invars=painter.invars, outvars=outvars, eqns=painter.eqns)
    return checkpoint_islands(painted)


class Painter:
    """The state of one pass: the new equations, and each value in the dtypes it has.

    A value's *home* is the dtype it was computed in. Values that come from literals
    alone have none that counts: they take the dtype of what they meet.

    A value's *rank* is the dtype that it stands for in a promotion. It differs from the
    home where a half value met a smaller float32 one that was spread over it, such as a
    statistic, a weight or a bias. That is computed in float32 but is no wider than the
    half value: a norm gives back its input's dtype, a layer with a bias its product's.
    """

    def __init__(
        self,
        jaxpr: jc.Jaxpr,
        in_dtypes: Sequence[Any],
        demand: Demand,
        scope: Scope,
        rules: Mapping[str, SubProgramRule],
    ):
        self.scope, self.rules, self.demand = scope, rules, demand
        self.half = scope.policy.dtype
        self.eqns: list[jc.JaxprEqn] = []
        self.home: dict[jc.Var, Any] = {}
        self.versions: dict[jc.Var, dict[Any, jc.Var]] = {}
        self.rank: dict[jc.Var, Any] = {}
        self.neutral: set[jc.Var] = set()
        self.spread: set[jc.Var] = set()
        self.eqn: jc.JaxprEqn | None = None
        self.programs: list[list[Decision]] = []  # inside of `eqn`
        for var in jaxpr.constvars:
            self._bind(var, dtype_of(var))
        self.invars = [
            self._bind(var, dtype if dtype is not None else dtype_of(var))
            for var, dtype in zip(jaxpr.invars, in_dtypes, strict=True)
        ]

    # ---- values

    def home_of(self, atom: Atom) -> Any:
        """The dtype that a value is in, without a cast."""
        return dtype_of(atom) if isinstance(atom, jc.Literal) else self.home[atom]

    def rank_of(self, atom: Atom) -> Any:
        """The dtype that a value stands for."""
        home = self.home_of(atom)
        return home if isinstance(atom, jc.Literal) else self.rank.get(atom, home)

    def handed(self, atom: Atom) -> Any:
        """The dtype in which a value goes to consumers of which nothing is known."""
        wanted = self.demand.wants_float32(atom)
        return self.home_of(atom) if wanted else self.rank_of(atom)

    def read(self, atom: Atom, dtype: Any) -> Atom:
        """A value in a dtype, if it is one that the user's program has in float32."""
        if not is_float32(atom):
            return atom if isinstance(atom, jc.Literal) else self._at_home(atom)
        if isinstance(atom, jc.Literal):
            if dtype == FLOAT32:
                return atom
            with np.errstate(over="ignore"):  # in a region that is to run in half
                value = np.asarray(atom.val, dtype)
            return jc.Literal(value, _with_dtype(atom.aval, dtype))
        versions = self.versions[atom]
        if dtype not in versions:
            versions[dtype] = self._convert(versions[self.home[atom]], dtype)
        return versions[dtype]

    def is_neutral(self, atom: Atom) -> bool:
        """Whether a float32 comes from literals that half can hold: it has no say."""
        if isinstance(atom, jc.Literal):
            return is_float32(atom) and not self._exceeds_half(atom)
        return atom in self.neutral

    def vote(self, atom: Atom) -> Any:
        """The dtype that an operand stands for; None if it does not vote."""
        if not is_float32(atom) or self.is_neutral(atom):
            return None
        if isinstance(atom, jc.Literal):
            return FLOAT32
        return self.half if atom in self.demand.halved else self.rank_of(atom)

    def _exceeds_half(self, literal: jc.Literal) -> bool:
        """Such as a mask's -1e30, or the 1e-8 in a denominator: inf or 0 in float16."""
        value, limits = abs(float(literal.val)), jnp.finfo(self.half)
        return float(limits.max) < value < np.inf or 0 < value < float(limits.tiny)

    def _at_home(self, var: jc.Var) -> jc.Var:
        return self.versions[var][self.home[var]]

    def _bind(self, var: jc.Var, dtype: Any) -> jc.Var:
        new = var if dtype == dtype_of(var) else jc.Var(_with_dtype(var.aval, dtype))
        self.home[var], self.versions[var] = dtype, {dtype: new}
        return new

    def _convert(self, var: jc.Var, dtype: Any) -> jc.Var:
        new = jc.Var(_with_dtype(var.aval, dtype))
        params = {"new_dtype": dtype, "weak_type": False, "sharding": None}
        here = {}
        if self.eqn is not None:  # the line of the user that needs the cast
            here = {"source_info": self.eqn.source_info, "ctx": self.eqn.ctx}
        self.eqns.append(
            jc.new_jaxpr_eqn(
                [var], [new], primitives.convert_element_type_p, params, set(), **here
            )
        )
        return new

    # ---- equations

    def equation(self, eqn: jc.JaxprEqn) -> None:
        """Writes one equation."""
        self.eqn, self.programs = eqn, []
        inside = self.rules.get(eqn.primitive.name)
        if inside is not None:
            inside(self, eqn)
            self._note(eqn, None, None, "program")
            return
        rule, region = ruling(self.scope, eqn)
        if rule is None:
            _warn_once(eqn.primitive.name)
        if rule is Rule.RECORDED or rule is None or not is_castable_eqn(eqn):
            self.as_recorded(eqn)
            self._note(eqn, rule, None, _why_recorded(eqn, rule, region), region)
            return
        rank, why = self._choose(eqn, rule)
        dtype = self._computed_in(eqn, rule, rank)
        if dtype != rank:
            why = "smaller operand" if rule is Rule.PROMOTE else "feeder"
        self._write(eqn, dtype)
        self._remember(eqn, rule, rank)
        self._note(eqn, rule, dtype, "region" if region else why, region)

    def as_recorded(self, eqn: jc.JaxprEqn) -> None:
        """Writes an equation with the dtypes of the user's program."""
        self.emit(
            eqn, [dtype_of(v) for v in eqn.invars], [dtype_of(v) for v in eqn.outvars]
        )
        if eqn.primitive is primitives.convert_element_type_p:
            # A mask is exact in any dtype.
            if dtype_of(eqn.invars[0]) == jnp.bool_ and is_float32(eqn.outvars[0]):
                self.neutral.add(eqn.outvars[0])

    def emit(
        self,
        eqn: jc.JaxprEqn,
        in_dtypes: Sequence[Any],
        out_dtypes: Sequence[Any],
        params: dict[str, Any] | None = None,
    ) -> None:
        """Writes an equation with operands and results in given dtypes."""
        invars = [self.read(v, d) for v, d in zip(eqn.invars, in_dtypes, strict=True)]
        outvars = [
            v
            if type(v).__name__ == "DropVar" and d == dtype_of(v)
            else self._bind(v, d)
            for v, d in zip(eqn.outvars, out_dtypes, strict=True)
        ]
        params = eqn.params if params is None else params
        self.eqns.append(eqn.replace(invars=invars, outvars=outvars, params=params))

    def _choose(self, eqn: jc.JaxprEqn, rule: Rule) -> tuple[Any, str]:
        """The dtype that an equation's results stand for, and why."""
        if rule is Rule.HALF:
            return self.half, "list"
        if rule is Rule.FLOAT32:
            return FLOAT32, "list"
        if rule is Rule.PROMOTE and _feeds_float32(eqn, self.demand):
            return FLOAT32, "feeder"
        if any(isinstance(v, jc.Literal) and self.vote(v) for v in eqn.invars):
            return FLOAT32, "literal"
        if not any(is_float32(v) for v in eqn.outvars):
            # A comparison: of a shared copy, `w > 0` would differ for tiny `w`.
            homes = {self.home_of(v) for v in eqn.invars if self.vote(v) is not None}
            return self.half if homes == {self.half} else FLOAT32, "operands"
        full = self._full(eqn) if rule is Rule.PROMOTE else eqn.invars
        votes = {self.vote(v) for v in full} - {None}
        votes = votes or {self.vote(v) for v in eqn.invars} - {None}
        if not votes:
            return FLOAT32, "no vote"
        if len(votes) > 1:
            promote = self.scope.policy.promote
            return self.half if promote == "narrowest" else FLOAT32, promote
        (dtype,) = votes
        shared = any(self.vote(v) not in (None, self.rank_of(v)) for v in eqn.invars)
        return dtype, "shared copy" if shared else "operands"

    def _computed_in(self, eqn: jc.JaxprEqn, rule: Rule, rank: Any) -> Any:
        """Its results' rank; float32 where that costs nothing and keeps digits."""
        if rank == FLOAT32:
            return FLOAT32
        if rule is Rule.PROMOTE:
            full = self._full(eqn)
            smaller = [self.vote(v) for v in eqn.invars if v not in full]
            return FLOAT32 if FLOAT32 in smaller else rank
        if rule is Rule.MOVE and _feeds_float32(eqn, self.demand):
            homes = {self.home_of(v) for v in eqn.invars if self.vote(v) is not None}
            return FLOAT32 if homes == {FLOAT32} else rank
        return rank

    def _full(self, eqn: jc.JaxprEqn) -> list[Atom]:
        """The operands that are as large as the result, and not by being spread."""
        atoms = eqn.invars
        size = max(size_of(v) for v in [*atoms, *eqn.outvars])
        return [
            v
            for v in atoms
            if size_of(v) == size
            and (isinstance(v, jc.Literal) or v not in self.spread)
        ]

    def _write(self, eqn: jc.JaxprEqn, dtype: Any) -> None:
        params = dict(eqn.params)
        for name in _DTYPE_PARAMS:
            if params.get(name) == FLOAT32:
                params[name] = dtype
        outs = [dtype if is_float32(v) else dtype_of(v) for v in eqn.outvars]
        self.emit(eqn, [dtype] * len(eqn.invars), outs, params)

    def _note(
        self,
        eqn: jc.JaxprEqn,
        rule: Rule | None,
        dtype: Any,
        why: str,
        region: str = "",
    ) -> None:
        """For `jamp.explain`."""
        if self.scope.decisions is not None:
            names, programs = name_stack(self.scope, eqn), tuple(self.programs)
            self.scope.decisions.append(
                Decision(eqn, names, rule, dtype, why, region, programs)
            )

    def _remember(self, eqn: jc.JaxprEqn, rule: Rule, rank: Any) -> None:
        """What the equations that follow should know of the results."""
        outs = [v for v in eqn.outvars if is_float32(v)]
        self.rank |= dict.fromkeys(outs, rank)
        if rule is Rule.MOVE and all(self.vote(v) is None for v in eqn.invars):
            self.neutral.update(outs)
        if _spreads(eqn) or self._is_spread(eqn, outs):
            self.spread.update(outs)

    def _is_spread(self, eqn: jc.JaxprEqn, outs: Sequence[jc.Var]) -> bool:
        """Whether the results are spread because all operands are."""
        atoms = [v for v in eqn.invars if not isinstance(v, jc.Literal)]
        sizes = {size_of(v) for v in [*atoms, *outs]}
        return bool(atoms) and len(sizes) == 1 and self.spread.issuperset(atoms)

    # ---- for the rules of primitives that hold programs

    def paint(
        self,
        eqn: jc.JaxprEqn,
        jaxpr: jc.Jaxpr,
        in_dtypes: Sequence[Any],
        out_dtypes: Sequence[Any],
        out_wants: Sequence[Want] | None = None,
        neutral: Sequence[bool] = (),
    ) -> jc.Jaxpr:
        """Writes a program that an equation holds."""
        wants = [None] * len(jaxpr.outvars) if out_wants is None else out_wants
        scope = self.scope.inside(eqn)
        if scope.decisions is not None:
            self.programs.append(scope.decisions)
        return paint(jaxpr, in_dtypes, out_dtypes, wants, scope, self.rules, neutral)

    def passed(self, atoms: Sequence[Atom]) -> list[Any]:
        """In what dtype to hand values to a program: half where it is read so there."""
        return [
            self.half
            if is_float32(a)
            and not isinstance(a, jc.Literal)
            and a in self.demand.halved
            else self.handed(a)
            for a in atoms
        ]


@functools.cache
def _warn_once(name: str) -> None:
    warnings.warn(
        f"autocast cannot look into {name!r}: it runs with the dtypes of the float32 "
        "program. Cast its operands yourself to run it in half; to accept it, pass "
        f"lists=jamp.AutocastLists().with_primitive({name!r}, 'recorded').",
        AutocastWarning,
        stacklevel=2,
    )


def _spreads(eqn: jc.JaxprEqn) -> bool:
    """Whether it repeats a value along an axis."""
    if eqn.primitive is not primitives.broadcast_in_dim_p:
        return False
    return size_of(eqn.invars[0]) < size_of(eqn.outvars[0])


def _feeds_float32(eqn: jc.JaxprEqn, demand: Demand) -> bool:
    return any(is_float32(v) for v in eqn.outvars) and all(
        demand.wants.get(v) is True for v in eqn.outvars if is_float32(v)
    )


def _why_recorded(eqn: jc.JaxprEqn, rule: Rule | None, region: str) -> str:
    if rule is None:
        return "unknown primitive"
    if rule is Rule.RECORDED:
        return "region" if region else "recorded"
    return "own dtype"


def _with_dtype(aval: Any, dtype: Any) -> Any:
    return aval.update(dtype=dtype, weak_type=False)
