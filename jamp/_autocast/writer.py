"""Writes the new equations of one jaxpr, and keeps the versions of each value.

    y:f32 = dot_general x w      x':f16 = convert x; w':f16 = convert w
    e:f32 = exp y                y:f16 = dot_general x' w'
                                 y':f32 = convert y
                                 e:f32 = exp y'

The writer makes no decisions. Its caller chooses the dtypes. Equations keep their
source lines and name stacks.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast import jax_internals
from jamp._autocast.calls import Replacement, apart_if_sharded, call
from jamp._autocast.primitives import Rule, primitive_name
from jamp._autocast.reasons import CAST, Note, noted, noting
from jamp._autocast.scope import Atom, dtype_of, dtypes_of, is_float32, recorded
from jamp._autocast.subjaxprs import with_equations
from jamp._autocast.values import Value, Values
from jamp._core.dtypes import FLOAT32


class Writer:
    """The new equations of one jaxpr, and the versions of each value by dtype."""

    def __init__(self, values: Values):
        self.values = values
        self.eqns: list[jc.JaxprEqn] = []
        # Maps the user's variables to new variables, one for each dtype in which an
        # equation reads the value. Each cast is written once, for the first reader.
        self.versions: dict[jc.Var, dict[Any, jc.Var]] = {}
        self.eqn: jc.JaxprEqn | None = None
        self.begin = 0  # the index of the first new equation for `eqn`
        self._noting = noting.value
        for v in values.jaxpr.constvars:
            self._bind(v, values[v])
        self._invars = [self._bind(v, values[v]) for v in values.jaxpr.invars]

    def finished(self, dtypes: Sequence[Any]) -> jc.Jaxpr:
        """Returns the jaxpr so far, with results in the given dtypes."""
        jaxpr, end, versions = self.values.jaxpr, len(self.eqns), self.versions
        self.versions = {v: dict(versions[v]) for v in self.values.results}
        pairs = zip(jaxpr.outvars, dtypes, strict=True)
        outvars = [self.read(v, dtype) for v, dtype in pairs]
        written = with_equations(jaxpr, self.eqns, invars=self._invars, outvars=outvars)
        # The casts at its end are not part of the jaxpr with other results.
        self.versions = versions
        del self.eqns[end:]
        return written

    def read(self, atom: Atom, dtype: DTypeLike, own_casts: bool = False) -> Atom:
        """Returns a value, in the given dtype if it is float32 in the user's program.

        `own_casts` gives this reader its own cast, so that JAX rounds the reader's
        cotangent before it adds the cotangents of other readers.
        """
        if isinstance(atom, jc.Literal):
            return _literal(atom, dtype) if is_float32(atom) else atom
        versions = self.versions[atom]
        if dtype in versions and not own_casts:
            return versions[dtype]
        computed = self.values.known[atom].dtype
        if dtype == computed or not is_float32(atom):
            return versions[computed]
        # A cast of the computed version, and not of another cast, rounds only once.
        # The cast gets the source line of `self.eqn`, the equation that reads it.
        cast = jax_internals.conversion(versions[computed], dtype, self.eqn)
        self.eqns.append(cast)
        (new,) = cast.outvars
        if not own_casts:
            versions[dtype] = new
        return new

    def _bind(self, var: jc.Var, value: Value) -> jc.Var:
        """Makes the variable that replaces a user's variable."""
        same = value.dtype == dtype_of(var)
        new = var if same else jc.Var(jax_internals.in_dtype(var.aval, value.dtype))
        self.values.known[var], self.versions[var] = value, {value.dtype: new}
        return new

    def emit(
        self,
        eqn: jc.JaxprEqn,
        in_dtypes: Sequence[Any],
        results: Sequence[Value],
        params: dict[str, Any] | None = None,
        own_casts: bool = False,
    ) -> None:
        """Writes an equation whose operands have the given dtypes."""
        pairs = zip(eqn.invars, in_dtypes, strict=True)
        invars = [self.read(v, d, own_casts) for v, d in pairs]
        pairs = zip(eqn.outvars, results, strict=True)
        outvars = [self._bind(v, value) for v, value in pairs]
        params = eqn.params if params is None else params
        if eqn.primitive.name == "convert_element_type" and is_float32(eqn.outvars[0]):
            # The operand is the half version of the result, so no cast is needed.
            (operand,) = invars
            if isinstance(operand, jc.Var):
                self.versions[eqn.outvars[0]].setdefault(dtype_of(operand), operand)
        new = eqn.replace(invars=invars, outvars=outvars, params=params)
        self.eqns.append(apart_if_sharded(new))

    def emit_recorded(
        self,
        eqn: jc.JaxprEqn,
        params: dict[str, Any] | None = None,
        is_data: bool = False,
    ) -> None:
        """Writes an equation whose operands and results keep the user's dtypes."""
        results = self.values.recorded(eqn, is_data)
        self.emit(eqn, recorded(eqn.invars), results, params)

    def replace(
        self, eqn: jc.JaxprEqn, replacement: Replacement, results: Sequence[Value]
    ) -> bool:
        """Writes a call instead of an equation. Returns whether the types agree."""
        function, read, passes = replacement
        operands = [self.read(v, dtype) for v, dtype in read]
        pairs = zip(eqn.outvars, results, strict=True)
        outvars = [self._bind(v, value) for v, value in pairs]
        passed = [jc.Var(operands[0].aval)] if passes else []
        known = self.values.scope.cache
        written = call(function, operands, [*outvars, *passed], eqn, known)
        self.eqns += written
        (first, dtype), *_ = read
        # A result of the jaxpr that is an input stays the input.
        if written and passed and first not in self.values.results:
            (self.versions[first][dtype],) = passed
        return bool(written)

    def emit_function(
        self,
        eqn: jc.JaxprEqn,
        function: Callable[..., Any],
        in_dtypes: Sequence[Any],
        results: Sequence[Value],
    ) -> None:
        """Writes JAX's equation of a function with custom derivatives, for `eqn`."""
        pairs = zip(eqn.invars, in_dtypes, strict=True)
        operands = [self.read(v, dtype) for v, dtype in pairs]
        (new,) = call(function, operands, None, eqn, self.values.scope.cache)
        pairs = zip(eqn.outvars, results, strict=True)
        outvars = [self._bind(v, value) for v, value in pairs]
        # Effects refer to the user's variables, so the equation keeps them.
        self.eqns.append(new.replace(outvars=outvars, effects=eqn.effects))

    def _note(
        self,
        eqn: jc.JaxprEqn,
        why: str,
        rule: Rule | None = None,
        dtype: Any = "",
        region: str = "",
    ) -> None:
        """Adds a note for `jamp.explain` to the new equations of an equation."""
        if why != "program" and not any(map(is_float32, (*eqn.invars, *eqn.outvars))):
            why, dtype, region = "no float32", "", ""
        name, operands = primitive_name(eqn), " ".join(dtypes_of(eqn.invars))
        rule_name = rule.value if rule else ""
        note = Note(name, why, rule_name, str(dtype), region, operands)
        *casts, last = self.eqns[self.begin :]
        if why != "program":
            casts = [noted(cast, note._replace(operands=CAST)) for cast in casts]
        self.eqns[self.begin :] = [*casts, noted(last, note)]


def _literal(literal: jc.Literal, dtype: DTypeLike) -> jc.Literal:
    if dtype == FLOAT32:
        return literal
    # A literal that half cannot hold is cast only if the user requested half.
    with np.errstate(over="ignore"):
        value = np.asarray(literal.val, dtype)
    return jc.Literal(value, jax_internals.in_dtype(literal.aval, dtype))
