"""Rewrites a jaxpr so that each operation runs in its precision.

    y:f32 = dot_general x w      x':f16 = convert x; w':f16 = convert w
    e:f32 = exp y                y:f16 = dot_general x' w'
                                 y':f32 = convert y
                                 e:f32 = exp y'

The result is a jaxpr, so JAX can differentiate, batch and compile it like any other.
Equations keep their source lines and name stacks.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast import jax_internals
from jamp._autocast.borders import with_rounded_results
from jamp._autocast.case import Case
from jamp._autocast.decide import decide
from jamp._autocast.heads import checkpoint_heads
from jamp._autocast.hijax import with_dtypes
from jamp._autocast.islands import checkpoint_islands
from jamp._autocast.marks import SOURCES, Source
from jamp._autocast.origins import origin_of_unknown
from jamp._autocast.primitives import NO_HALF_KERNEL, Rule, primitive_name
from jamp._autocast.scope import (
    KEPT,
    NO_MODEL,
    Atom,
    Scope,
    dtype_of,
    is_castable_eqn,
    is_float,
    is_float32,
    name_stack,
)
from jamp._autocast.subjaxprs import Subjaxpr, subjaxprs_of
from jamp._autocast.values import Value, Values
from jamp._autocast.writer import Writer
from jamp._core.dtypes import FLOAT32
from jamp._core.warnings import AutocastWarning, PrecisionWarning, warn

type SubjaxprRule = Callable[["Rewriter", jc.JaxprEqn, list[Subjaxpr]], None]

# These parameters of equations set the dtype of the result.
_DTYPE_PARAMS = ("preferred_element_type", "new_dtype")


def rewritten(
    jaxpr: jc.Jaxpr,
    given: Sequence[Value],
    scope: Scope,
    rules: Mapping[str, SubjaxprRule],
    out_uses: Sequence[Any] = (),
) -> "Rewriter":
    """Reads a jaxpr once, and rewrites all of it except the casts of its results.

    It takes its inputs in the dtypes of `given`, or by default in the user's dtypes.
    `rules` write the equations that contain jaxprs. `out_uses` are the uses of the
    results, for `Policy.fp8`.
    """
    # All calls of a jitted function share one jaxpr, so that JAX differentiates it
    # only once. Their rewritten jaxprs must be shared too.
    key = jaxpr, tuple(given), scope.key, tuple(out_uses)
    if key not in scope.cache:
        rewriter = Rewriter(Values(jaxpr, given, scope), rules, out_uses)
        rewriter.write_equations()
        scope.cache[key] = rewriter
    return scope.cache[key]


class Rewriter(Writer):
    """Reads a jaxpr, decides on it and writes it, one equation at a time."""

    def __init__(
        self, values: Values, rules: Mapping[str, SubjaxprRule], out_uses: Sequence[Any]
    ):
        super().__init__(values)
        self.scope, self.rules = values.scope, rules
        fp8 = self.scope.policy.fp8
        self.fp8: Any = fp8.plan(values, out_uses) if fp8 else None
        # Maps values to their fp8 versions and the exponents of their scales.
        self.quantized: dict[Atom, list[jc.Var]] = {}
        self._widened = set[Atom]()  # the values that the jaxpr casts to float64
        # Maps the first result of an open call to the jaxprs that the call holds.
        self.calls: dict[jc.Var, list[Rewriter]] = {}
        self.results: Sequence[Value] = ()  # known once all equations are written
        self._returning: dict[Any, jc.Jaxpr] = {}

    def write_equations(self) -> None:
        """Decides on all equations of the jaxpr, and writes them."""
        for eqn in self.values.jaxpr.eqns:
            self.equation(eqn)
        self.results = [self.values[v] for v in self.values.jaxpr.outvars]

    def returning(self, out_dtypes: Sequence[Any] | None = None) -> jc.Jaxpr:
        """Returns the rewritten jaxpr.

        Without `out_dtypes`, each result has the dtype that it votes for.
        """
        if out_dtypes is None:
            out_dtypes = [value.outgoing for value in self.results]
        key = tuple(out_dtypes)
        if key not in self._returning:
            written = with_rounded_results(self.finished(key), self.calls)
            # These find float32 regions by the casts around them, so they run last.
            options = self.scope.cache, self.scope.loop
            written = checkpoint_islands(written, *options)
            self._returning[key] = checkpoint_heads(written, *options)
        return self._returning[key]

    def uses_of(self, atoms: Sequence[Atom]) -> Sequence[Any]:
        """Returns the uses of values, for `Policy.fp8`."""
        return self.fp8.uses_of(atoms) if self.fp8 else ()

    def equation(self, eqn: jc.JaxprEqn) -> None:
        """Decides on an equation, and writes it."""
        self.eqn, self.begin = eqn, len(self.eqns)
        if subs := subjaxprs_of(eqn):
            self.rules[subs[0].primitive](self, eqn, subs)
            if self._noting:
                self._note(eqn, "program")
            return
        values = self.values
        given = [values[v] for v in eqn.invars]
        name = primitive_name(eqn)
        if name == "name" and self._reads_mark(eqn):
            return
        rule, region = values.ruling(eqn, name, given)
        self._warn_of_dtypes(eqn, name, rule, given)
        stays = rule is Rule.RECORDED or not is_castable_eqn(eqn, rule, values.half)
        if rule is None or stays:
            self.emit_recorded(eqn, is_data=region in (KEPT, NO_MODEL))
            why = "unknown primitive" if rule is None else "own dtype"
            if rule is Rule.RECORDED:
                why = "region" if region else "recorded"
            if self._noting:
                self._note(eqn, why, rule, region=region)
            return
        case = Case(values, eqn, name, rule, given)
        decision = decide(case)
        if self.fp8 is not None and rule is Rule.HALF and not region:
            decision = self.scope.policy.fp8.decide(self, eqn, decision)
        # A matmul in fp8 returns half.
        dtype = FLOAT32 if decision.dtype == FLOAT32 else values.half
        results, replacement = case.results(dtype, region), decision.replacement
        if region and dtype == values.half and name in NO_HALF_KERNEL:
            raise TypeError(_NO_KERNEL.format(region=region, name=name, dtype=dtype))
        if replacement is None or not self.replace(eqn, replacement, results):
            self._write(eqn, dtype, results, decision.own_casts)
        if self._noting:
            why = "region" if region else decision.why
            self._note(eqn, why, rule, decision.dtype, region)

    def _warn(self, message: str, category: type[Warning]) -> None:
        """Warns once in a call of `autocast`, as often as Python's filters allow."""
        key = "warned", message
        if key not in self.scope.cache:
            self.scope.cache[key] = None
            warn(message, category)

    def _warn_of_dtypes(
        self, eqn: jc.JaxprEqn, name: str, rule: Rule | None, given: Sequence[Value]
    ) -> None:
        """Warns about dtypes that the user probably did not intend.

        An unknown primitive keeps them, the jaxpr may cast a kept param to half, and
        a matmul may read a float32 operand in float64.
        """
        if rule is None and any(map(is_float, eqn.outvars)):
            self._warn(_UNKNOWN.format(name=name), AutocastWarning)
        is_cast, half = name == "convert_element_type", self.values.half
        dtype = dtype_of(eqn.outvars[0]) if eqn.outvars else None
        if is_cast and dtype == half and self.scope.policy.of_model:
            if given[0].is_kept_param:
                where = "/".join(filter(None, name_stack(self.scope, eqn).split("/")))
                self._warn(_ROUNDED.format(where=where), PrecisionWarning)
        if dtype != np.float64:
            return
        read = [v for v in eqn.invars if isinstance(v, jc.Var)]
        if is_cast and is_float32(eqn.invars[0]):
            self._widened.add(eqn.outvars[0])
        elif rule is Rule.HALF and any(dtype_of(v) == np.float64 for v in read):
            if any(is_float32(v) or v in self._widened for v in read):
                self._warn(_FLOAT64, PrecisionWarning)

    def _reads_mark(self, eqn: jc.JaxprEqn) -> bool:
        """Reads the mark of a param or of a boundary, which it does not write.

        The mark would keep a loss out of a head.
        """
        source = SOURCES.get(eqn.params["name"])
        if source is None:
            return False
        (operand,), (same,) = eqn.invars, eqn.outvars
        dtype = self.values.half if Source.HALF in source else FLOAT32
        out_of_range, origin = (
            self.values[operand].out_of_range,
            origin_of_unknown(same),
        )
        is_input = self.values[operand].is_input
        self.values.known[same] = Value(
            dtype, dtype, out_of_range, origin, source, is_input
        )
        version = self.read(operand, dtype)
        known: Any = {} if isinstance(operand, jc.Literal) else self.versions[operand]
        self.versions[same] = known | {dtype: version}
        return True

    def _write(
        self,
        eqn: jc.JaxprEqn,
        dtype: DTypeLike,
        results: Sequence[Value],
        own_casts: bool = False,
    ) -> None:
        """Writes an equation whose float32 values get another dtype."""
        params = eqn.params
        ins = [dtype if is_float32(v) else dtype_of(v) for v in eqn.invars]
        changed: dict[str, Any] = {
            name: dtype for name in _DTYPE_PARAMS if params.get(name) == FLOAT32
        }
        if dtype != FLOAT32:
            changed |= jax_internals.combining_in(params, dtype)
        if "_prim" in params:
            outs = [value.dtype for value in results]
            changed["_prim"] = with_dtypes(params["_prim"], ins, outs)
        self.emit(eqn, ins, results, params | changed if changed else params, own_casts)


_UNKNOWN = (
    "autocast does not know the primitive {name!r}, so it runs in the dtypes of "
    "your program. Cast its operands to run it in half. To keep its dtypes, pass "
    "lists=jamp.AutocastLists().with_primitive({name!r}, 'recorded')."
)
_ROUNDED = (
    "The program casts a param that keep_fp32 keeps in float32 to half in "
    "{where!r}. Remove the cast, such as a layer's `dtype=`. The opt level "
    "decides which operations run in half."
)
_FLOAT64 = (
    "A matmul of a float64 and a float32 operand runs in float64, as in JAX, so "
    "autocast does not cast it. If the batch is a NumPy array, pass "
    "`x.astype(np.float32)`."
)
_NO_KERNEL = (
    "{region!r} asks for {dtype}, and JAX has no kernel for {name!r} in {dtype}. Call "
    "the function that contains it through `jamp.float_function`."
)
