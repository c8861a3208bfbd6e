"""Rewrites a program so that each operation runs in its precision.

    y:f32 = dot_general x w      x':f16 = convert x; w':f16 = convert w
    e:f32 = exp y                y:f16 = dot_general x' w'
                                 y':f32 = convert y
                                 e:f32 = exp y'

The result is a jaxpr, so JAX can differentiate, batch and compile it like any other.
Equations keep their source lines and name stacks.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast import jax_internals
from jamp._autocast.decide import Decision, decide
from jamp._autocast.facts import Facts
from jamp._autocast.frames import Frame, frames_of, with_equations
from jamp._autocast.heads import checkpoint_heads
from jamp._autocast.hijax import with_dtypes
from jamp._autocast.islands import checkpoint_islands
from jamp._autocast.marks import Source, marked_source
from jamp._autocast.primitives import Rule, primitive_name
from jamp._autocast.program import (
    Atom,
    dtype_of,
    dtypes_of,
    is_float,
    is_float32,
    name_stack,
    recorded,
    shape_of,
)
from jamp._autocast.reasons import CAST, Note, noted, noting
from jamp._autocast.sums import broadcast, repeated, rows_of, with_bias, with_weight
from jamp._core.dtypes import FLOAT32
from jamp._core.warnings import AutocastWarning, PrecisionWarning, warn

type ProgramRule = Callable[["Rewriter", jc.JaxprEqn, list[Frame]], None]

# These parameters of equations set the dtype of the result.
_DTYPE_PARAMS = ("preferred_element_type", "new_dtype")


def rewrite(
    facts: Facts,
    in_dtypes: Sequence[Any],
    out_dtypes: Sequence[Any],
    rules: Mapping[str, ProgramRule],
    out_uses: Sequence[Any] = (),
) -> jc.Jaxpr:
    """Rewrites the program of `facts`.

    Inputs and results get the given dtypes. A result whose dtype is None gets the dtype
    that it votes for. `rules` write the equations that contain programs. `out_uses` are
    the uses of the results, for `Policy.fp8`.
    """
    # All calls of a jitted function share one program, so that JAX differentiates it
    # only once. Their rewritten programs must be shared too.
    key = (facts.key, tuple(in_dtypes), tuple(out_dtypes), tuple(out_uses))
    programs = facts.scope.written
    if key not in programs:
        written = Rewriter(facts, in_dtypes, rules, out_uses).written(out_dtypes)
        # Keep the user's program, so that no other program can reuse its `id`.
        programs[key] = facts.before, written
    return programs[key][1]


class Rewriter:
    """The new equations of one program, and the versions of each value by dtype."""

    def __init__(
        self,
        facts: Facts,
        in_dtypes: Sequence[Any],
        rules: Mapping[str, ProgramRule],
        out_uses: Sequence[Any],
    ):
        self.facts, self.scope, self.rules = facts, facts.scope, rules
        fp8 = facts.scope.policy.fp8
        self.fp8 = fp8.plan(facts, out_uses) if fp8 else None
        # The dtype in which each of the user's variables is computed.
        self.computed: dict[jc.Var, Any] = {}
        self.eqns: list[jc.JaxprEqn] = []
        # Maps the user's variables to new variables, one for each dtype in which an
        # equation reads the value. Each cast is written once, for the first reader.
        self.versions: dict[jc.Var, dict[Any, jc.Var]] = {}
        self.eqn: jc.JaxprEqn | None = None
        # Maps values to their fp8 versions and the exponents of their scales.
        self.quantized: dict[Atom, list[jc.Var]] = {}
        self.begin = 0  # the index of the first new equation for `eqn`
        self.products = 0  # the number of matmuls with a weight that all trips share
        for var in facts.jaxpr.constvars:
            self._bind(var, dtype_of(var))
        pairs = zip(facts.jaxpr.invars, in_dtypes, strict=True)
        self.invars = [self._bind(var, dtype) for var, dtype in pairs]

    def written(self, out_dtypes: Sequence[Any]) -> jc.Jaxpr:
        """Rewrites the whole program."""
        jaxpr = self.facts.jaxpr
        for eqn in jaxpr.eqns:
            self.equation(eqn)
        outvars = [
            self.read(v, self.outgoing_dtype(v) if dtype is None else dtype)
            for v, dtype in zip(jaxpr.outvars, out_dtypes, strict=True)
        ]
        written = with_equations(jaxpr, self.eqns, invars=self.invars, outvars=outvars)
        # These run last, because they find float32 regions by the casts around them.
        options = self.scope.written, self.scope.loop
        written = checkpoint_islands(written, *options)
        return checkpoint_heads(written, *options, self.scope.saved)

    # ---- values

    def read(self, atom: Atom, dtype: DTypeLike, apart: bool = False) -> Atom:
        """Returns a value, in the given dtype if it is float32 in the user's program.

        `apart` gives this reader its own cast, so that JAX rounds the reader's
        cotangent before it adds the cotangents of other readers.
        """
        if isinstance(atom, jc.Literal):
            return _literal(atom, dtype) if is_float32(atom) else atom
        computed = self.computed[atom]
        if not is_float32(atom):
            return self.versions[atom][computed]
        versions = self.versions[atom]
        if apart and dtype != computed:
            return self._convert(versions[computed], dtype)
        if dtype not in versions:
            # Casting the computed version, not another cast, rounds only once.
            versions[dtype] = self._convert(versions[computed], dtype)
        return versions[dtype]

    def computed_dtype(self, atom: Atom) -> Any:
        """Returns the dtype in which a value is computed."""
        return dtype_of(atom) if isinstance(atom, jc.Literal) else self.computed[atom]

    def outgoing_dtype(self, atom: Atom) -> Any:
        """Returns the dtype in which a value leaves its program, by its vote."""
        return self.facts[atom].vote or self.computed_dtype(atom)

    def uses_of(self, atoms: Sequence[Atom]) -> Sequence[Any]:
        """Returns the uses of values, for `Policy.fp8`."""
        return self.fp8.uses_of(atoms) if self.fp8 else ()

    def _bind(self, var: jc.Var, dtype: DTypeLike) -> jc.Var:
        """Makes the variable, in a dtype, that replaces a user's variable."""
        same = dtype == dtype_of(var)
        new = var if same else jc.Var(jax_internals.in_dtype(var.aval, dtype))
        self.computed[var], self.versions[var] = dtype, {dtype: new}
        return new

    def _convert(self, var: jc.Var, dtype: DTypeLike) -> jc.Var:
        # The cast gets the source line of `self.eqn`, the equation that reads it.
        self.eqns.append(jax_internals.conversion(var, dtype, self.eqn))
        return self.eqns[-1].outvars[0]

    # ---- equations

    def equation(self, eqn: jc.JaxprEqn) -> None:
        """Writes one equation."""
        self.eqn, self.begin = eqn, len(self.eqns)
        if frames := frames_of(eqn):
            self.rules[frames[0].holder](self, eqn, frames)
            self._note(eqn, "program")
            return
        rule, region = self.facts.ruling(eqn)
        if _rounds_kept(self.facts, eqn):
            _warn_of_kept(name_stack(self.scope, eqn))
        if rule is None and any(map(is_float, eqn.outvars)):
            _warn_of_unknown(primitive_name(eqn))
        if rule is Rule.RECORDED or rule is None or not self.facts.is_castable(eqn):
            self.emit(eqn, recorded(eqn.invars), recorded(eqn.outvars))
            why = "unknown primitive" if rule is None else "own dtype"
            if rule is Rule.RECORDED:
                why = "region" if region else "recorded"
            self._note(eqn, why, rule, region=region)
            return
        if marked_source(eqn) is not None:
            # `Facts` has read this mark. Writing it would keep a loss out of a head.
            value, same = eqn.invars[0], eqn.outvars[0]
            dtype = self.facts[same].vote
            self.read(value, dtype)
            self.computed[same] = dtype
            self.versions[same] = self.versions[value]  # pyright: ignore[reportArgumentType]
            return
        decision = decide(self.facts, eqn, rule, self.computed)
        if self.fp8 is not None and rule is Rule.HALF and not region:
            decision = self.fp8.decide(eqn, decision)
        dtype = decision.dtype
        if decision.fp8 is not None:
            self._write_in_fp8(eqn, decision)
            dtype = self.scope.policy.fp8.dtype
        elif decision.summed is not None:
            self._write_summed(eqn, decision.summed)
        elif decision.repeated is not None:
            self._write_repeated(eqn, decision.repeated)
        else:
            self._write(eqn, decision.dtype, decision.apart)
        why = "region" if region else decision.why
        self._note(eqn, why, rule, dtype, region)

    def emit(
        self,
        eqn: jc.JaxprEqn,
        in_dtypes: Sequence[Any],
        out_dtypes: Sequence[Any],
        params: dict[str, Any] | None = None,
        apart: bool = False,
    ) -> None:
        """Writes an equation whose operands and results have the given dtypes."""
        pairs = zip(eqn.invars, in_dtypes, strict=True)
        invars = [self.read(v, d, apart) for v, d in pairs]
        outvars = [
            self._bind(v, d) for v, d in zip(eqn.outvars, out_dtypes, strict=True)
        ]
        params = eqn.params if params is None else params
        if eqn.primitive.name == "convert_element_type" and is_float32(eqn.outvars[0]):
            # The operand is the half version of the result, so no cast is needed.
            (operand,) = invars
            if isinstance(operand, jc.Var):
                self.versions[eqn.outvars[0]].setdefault(dtype_of(operand), operand)
        new = eqn.replace(invars=invars, outvars=outvars, params=params)
        if eqn.primitive.name in jax_internals.UNSHARDED:
            new = jax_internals.apart_if_sharded(new)
        self.eqns.append(new)

    def _write(self, eqn: jc.JaxprEqn, dtype: DTypeLike, apart: bool = False) -> None:
        """Writes an equation whose float32 values get another dtype."""
        params = dict(eqn.params)
        for name in _DTYPE_PARAMS:
            # jax.numpy requests a float32 result of each matmul. XLA would store it in
            # float32, and each half reader would cast it again.
            if params.get(name) == FLOAT32:
                params[name] = dtype
        ins, outs = (
            [dtype if is_float32(v) else dtype_of(v) for v in atoms]
            for atoms in (eqn.invars, eqn.outvars)
        )
        if params.get("update_jaxpr") is not None and is_float32(eqn.outvars[0]):
            update = jax_internals.in_scalars(params["update_jaxpr"], dtype)
            params["update_jaxpr"] = update
        if "_prim" in params:
            params["_prim"] = with_dtypes(params["_prim"], ins, outs)
        self.emit(eqn, ins, outs, params, apart)

    def _write_summed(self, eqn: jc.JaxprEqn, var: jc.Var) -> None:
        """Writes an equation so that the gradient of its operand `var` sums in float32.

        `var` is a bias of a matmul, a weight, or a table of rows.
        """
        half, (out,), first = self.scope.policy.dtype, eqn.outvars, eqn.invars[0] is var
        operands = [self.read(eqn.invars[first], half), self.read(var, FLOAT32)]
        function = with_bias
        if eqn.primitive.name != "add":
            operands.append(self.read(var, half))
        if eqn.primitive.name == "gather":
            function = rows_of(tuple(sorted(eqn.params.items())))
        if eqn.primitive.name == "dot_general":
            numbers = eqn.params["dimension_numbers"]
            function = with_weight(numbers, first, self.products)
            self.products += 1
        results, known = [self._bind(out, half)], self.scope.written
        written = jax_internals.call(function, operands, results, eqn, known)
        if written is not None:
            self.eqns.append(written)
        elif eqn.primitive.name == "gather":
            self._write(eqn, FLOAT32)
        else:
            self._write(eqn, half)

    def _write_repeated(self, eqn: jc.JaxprEqn, var: jc.Var) -> None:
        """Writes a float32 sum of a half array and the broadcast array `var`."""
        (out,), wide = eqn.outvars, self.read(var, FLOAT32)
        functions = [repeated(self.scope.policy.dtype)]
        if shape_of(var) != shape_of(out):
            functions.insert(0, broadcast(shape_of(out)))
        for function in functions:
            operands, results = [wide], [jc.Var(out.aval)]
            known = self.scope.written
            written = jax_internals.call(function, operands, results, eqn, known)
            if written is None:
                self._write(eqn, FLOAT32)
                return
            self.eqns.append(written)
            (wide,) = results
        operands = [wide if v is var else self.read(v, FLOAT32) for v in eqn.invars]
        self.eqns.append(
            eqn.replace(invars=operands, outvars=[self._bind(out, FLOAT32)])
        )

    def _write_in_fp8(self, eqn: jc.JaxprEqn, decision: Decision) -> None:
        """Writes a matmul in fp8, by `Policy.fp8`."""
        half, fp8 = self.scope.policy.dtype, self.scope.policy.fp8
        function, operands = fp8.call(self, eqn, decision.fp8, decision.summed)
        results = [self._bind(eqn.outvars[0], half)]
        written = jax_internals.call(function, operands, results, eqn, varying=True)
        if written is None:
            self._write(eqn, half)
        else:
            self.eqns.append(written)

    def _note(
        self,
        eqn: jc.JaxprEqn,
        why: str,
        rule: Rule | None = None,
        dtype: Any = "",
        region: str = "",
    ) -> None:
        """Adds a note for `jamp.explain` to the new equations of an equation."""
        if not noting.value:
            return
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


@functools.cache
def _warn_of_unknown(name: str) -> None:
    warn(
        f"autocast does not know the primitive {name!r}, so it runs in the dtypes of "
        "your program. Cast its operands to run it in half. To keep its dtypes, pass "
        f"lists=jamp.AutocastLists().with_primitive({name!r}, 'recorded').",
        AutocastWarning,
    )


def _rounds_kept(facts: Facts, eqn: jc.JaxprEqn) -> bool:
    """Returns whether the user's program itself casts a kept param to half."""
    if eqn.primitive.name != "convert_element_type" or not facts.scope.policy.of_model:
        return False
    kept = facts.params_in(eqn.invars[0]) == Source.KEPT
    return kept and dtype_of(eqn.outvars[0]) == facts.half


@functools.cache
def _warn_of_kept(names: str) -> None:
    where = "/".join(filter(None, names.split("/")))
    warn(
        "The program casts a param that keep_fp32 keeps in float32 to half in "
        f"{where!r}. Remove the cast, such as a layer's `dtype=`. The opt level "
        "decides which operations run in half.",
        PrecisionWarning,
    )
