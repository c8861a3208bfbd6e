"""The facts that autocast knows about each value of a jaxpr.

    y = dot_general x w     y votes half
    z = mul y 2.0           z votes half: the literal has no vote
    e = exp z               e votes float32
    s = add e y             s votes float32: the widest of two votes decides
    t = add y -1e30         t votes float32: half cannot hold the number

The *vote* of a value is the dtype that it asks for when it meets other operands: the
dtype that torch's rules would give it. `decide` chooses the dtype of the computation.
"""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.dtypes import float0
from jax.extend import core as jc

from jamp._autocast import jax_internals
from jamp._autocast.inline import inlined
from jamp._autocast.marks import Source
from jamp._autocast.origins import Origin, origin_of_unknown
from jamp._autocast.primitives import MOVES, PARTS, Rule, traits_of
from jamp._autocast.scope import (
    KEPT,
    NO_MODEL,
    Atom,
    Scope,
    array_exceeds_half,
    changes_in_half,
    dtype_of,
    exceeds_half,
    is_float,
    is_float32,
    region_rule,
    ruling,
)
from jamp._autocast.subjaxprs import Kind, subjaxprs_of
from jamp._core.dtypes import FLOAT32

_NO_SOURCE = Source(0)
_REFS = ("get", "swap")  # A Ref holds state between iterations, like a carry.
_HALF_PARAM = Source.HALF, Source.HALF | Source.STAYS
_KEPT_PARAM = Source.KEPT, Source.KEPT | Source.STAYS


class Value(NamedTuple):
    """The facts that autocast knows about a value."""

    dtype: Any  # the dtype in which it is computed
    # The dtype that it asks for. A value has no vote if it is not float32. A value that
    # is computed only from literals has no vote either, and takes the dtype of the
    # other operands.
    vote: Any = None
    out_of_range: bool = False  # whether it may hold a constant beyond half's range
    origin: Origin = Origin()  # the arrays that it is computed from
    # Whether it depends on half params, on kept params, or on other data.
    source: Source = Source.DATA
    # Whether it is an input of the whole jaxpr, or a part, a rearrangement or a
    # broadcast of inputs.
    is_input: bool = False
    is_loop_invariant: bool = False  # whether all iterations of the loop share it
    # Whether half may change a constant; None for a value that is not a constant.
    changes: bool | None = None
    # Whether it is computed elementwise from a float32 carry of a loop, or from a Ref.
    carried: bool = False

    @property
    def is_half_param(self) -> bool:
        """Whether it depends only on half params. It rounds no other value."""
        return self.source in _HALF_PARAM

    @property
    def is_kept_param(self) -> bool:
        """Whether it depends only on kept params."""
        return self.source in _KEPT_PARAM

    @property
    def outgoing(self) -> Any:
        """The dtype in which it leaves its jaxpr, by its vote."""
        return self.vote or self.dtype


def joint_source(values: Iterable[Value]) -> Source:
    """Returns all inputs that several values depend on."""
    found = _NO_SOURCE
    for value in values:
        source = value.source
        if source is not found and source is not _NO_SOURCE:
            found = found | source if found is not _NO_SOURCE else source
    return found


def one_of(values: Sequence[Value]) -> Value:
    """Returns the result of a `cond`, given each branch's."""
    if len(values) == 1:
        return values[0]
    votes = {value.vote for value in values} - {None}
    vote = FLOAT32 if len(votes) > 1 else next(iter(votes), None)
    out_of_range, carried = (
        any(getattr(value, name) for value in values)
        for name in ("out_of_range", "carried")
    )
    source, changes = joint_source(values), joint_changes(values)
    return Value(
        values[0].dtype,
        vote,
        out_of_range,
        source=source,
        changes=changes,
        carried=carried,
    )


def joint_changes(values: Iterable[Value]) -> bool | None:
    """Returns whether half may change one of several constants, see `Value.changes`."""
    changes = [value.changes for value in values]
    return None if None in changes or not changes else any(changes)


def in_dtypes(values: Iterable[Value], dtypes: Sequence[Any]) -> list[Value]:
    """Returns values that are computed in other dtypes."""
    pairs = zip(values, dtypes, strict=True)
    return [value._replace(dtype=dtype) for value, dtype in pairs]


def input_of(atom: Atom) -> Value:
    """Returns an input of the whole function, which is data unless it has a mark."""
    dtype, is_weak = dtype_of(atom), jax_internals.is_weak_scalar(atom)
    if dtype != FLOAT32:
        return Value(dtype, is_input=True)
    vote, origin = None if is_weak else FLOAT32, origin_of_unknown(atom)
    return Value(dtype, vote, origin=origin, is_input=True)


class Values:
    """The values of one jaxpr, up to the equation that autocast reads.

    `given` holds the jaxpr's inputs. It is empty if nothing is known about these,
    such as the inputs of a user's derivative rule.
    """

    def __init__(self, jaxpr: jc.Jaxpr, given: Sequence[Value], scope: Scope):
        policy, self.scope = scope.policy, scope
        self.jaxpr = jaxpr = inlined(jaxpr, scope)
        self.half, self.widest = policy.dtype, policy.promote == "widest"
        self.results = {v for v in jaxpr.outvars if isinstance(v, jc.Var)}
        self.summed = 0  # the matmuls with a weight that all iterations share
        self._stack: Any = None  # the name stack of the last equation
        self._region: tuple[Rule | None, str] | None = None  # its region
        self.known = {
            v: self.unknown(v)._replace(
                out_of_range=is_float32(v) and array_exceeds_half(const, self.half),
                is_input=True,
                changes=is_float32(v) or None,
            )
            for v, const in zip(jaxpr.constvars, jaxpr.consts, strict=True)
        }
        given = given or list(map(self.unknown, jaxpr.invars))
        self.known.update(zip(jaxpr.invars, given, strict=True))

    def __getitem__(self, atom: Atom) -> Value:
        """Returns the facts about a value."""
        if not isinstance(atom, jc.Literal):
            return self.known[atom]
        dtype, number = dtype_of(atom), atom.val
        if dtype == float0 or jnp.iscomplexobj(number):
            return Value(dtype, source=_NO_SOURCE)
        # JAX converts the integer of `where(mask, x, 0)` in the jaxpr.
        out_of_range = exceeds_half(float(number), self.half)
        changes = changes_in_half(float(number), self.half)
        vote = FLOAT32 if out_of_range and dtype == FLOAT32 else None
        return Value(dtype, vote, out_of_range, source=_NO_SOURCE, changes=changes)

    def unknown(self, atom: Atom) -> Value:
        """Returns a value about which nothing is known, in the user's dtype."""
        scope, dtype = self.scope, dtype_of(atom)
        if dtype != FLOAT32:
            # A half constant counts as a half param. The function closes over it.
            source = Source.HALF if dtype == self.half else scope.within
            return Value(dtype, source=source)
        known = {"source": scope.within, "carried": scope.carried}
        return input_of(atom)._replace(is_input=False, **known)

    def is_weight(self, atom: Atom) -> bool:
        """Returns whether a value depends only on params of the model's dtype."""
        value = self[atom]
        is_half = self.scope.policy.of_model
        return value.is_half_param if is_half else value.is_kept_param

    def depends_on_params(self, atom: Atom) -> bool:
        """Returns whether a value depends on a param. It may depend on data too."""
        return bool(self[atom].source & (Source.HALF | Source.KEPT))

    def closed(
        self, operands: Sequence[Atom], carries: Sequence[int] = ()
    ) -> list[Value]:
        """Returns the operands of a jaxpr that takes them in the user's dtypes.

        After several iterations, the operands at `carries` may depend on all operands.
        """
        given = [self[v] for v in operands]
        closed = [
            self.unknown(v)._replace(
                out_of_range=value.out_of_range,
                source=value.source,
                carried=value.carried,
                is_input=value.is_input,
                changes=value.changes,
            )
            for v, value in zip(operands, given, strict=True)
        ]
        for i in carries:
            source = joint_source(given)
            closed[i] = closed[i]._replace(source=source, is_input=False, changes=None)
        return closed

    def recorded(self, eqn: jc.JaxprEqn, is_data: bool = False) -> list[Value]:
        """Returns the results of an equation that keeps the user's dtypes."""
        given = [self[v] for v in eqn.invars]
        source = Source.DATA if is_data else joint_source(given)
        is_input, changes = self.is_input(eqn), self.changes(eqn, given)
        carried = self.scope.carried or eqn.primitive.name in _REFS
        out_of_range, has_vote = False, True
        if eqn.primitive.name == "convert_element_type":
            # A mask is exact in any dtype, so it has no vote. A number has none either.
            is_mask = dtype_of(eqn.invars[0]) == np.bool_
            out_of_range = given[0].out_of_range and changes is not None
            has_vote = out_of_range or not is_mask and changes is None
        return [
            self.unknown(v)._replace(
                vote=FLOAT32 if has_vote and is_float32(v) else None,
                out_of_range=out_of_range,
                source=source,
                is_input=is_input,
                changes=changes,
                carried=carried,
            )
            for v in eqn.outvars
        ]

    def is_input(self, eqn: jc.JaxprEqn) -> bool:
        """Returns whether the results of an equation are inputs, see `Value`."""
        if traits_of(eqn.primitive.name).shape not in PARTS:
            return False
        return all([self[v].is_input for v in eqn.invars if is_float(v)])

    def changes(self, eqn: jc.JaxprEqn, given: Sequence[Value]) -> bool | None:
        """Returns the field of `Value` for the results of an equation."""
        # A mask or an index may choose among constants.
        pairs = zip(eqn.invars, given, strict=True)
        floats = [value for v, value in pairs if is_float(v)] or given
        changes, name = joint_changes(floats), eqn.primitive.name
        moves = traits_of(name).shape in MOVES or name == "select_n"
        return changes if moves or changes is None else True

    def ruling(
        self, eqn: jc.JaxprEqn, name: str, given: Sequence[Value]
    ) -> tuple[Rule | None, str]:
        """Returns `scope.ruling`, unless a half model's params require float32."""
        stack = jax_internals.scopes(eqn)
        # Most neighbors share the region, unless a list of the user sets it.
        if stack is not self._stack or self.scope.policy.lists.rules:
            self._stack, self._region = stack, region_rule(self.scope, eqn, name)
        rule, region = ruling(self.scope, eqn, name, self._region)
        if rule is not Rule.HALF or region or not self.scope.policy.of_model:
            return rule, region
        if any(value.is_kept_param for value in given):
            return Rule.FLOAT32, KEPT
        of_model = any(Source.HALF in value.source for value in given)
        return (rule, region) if of_model else (Rule.FLOAT32, NO_MODEL)

    def scope_inside(self, eqn: jc.JaxprEqn) -> Scope:
        """Returns the scope of the jaxprs that an equation holds.

        A closed jaxpr does not know the sources of its inputs, so all inherit the
        equation's. If an operand is a kept weight, they all count as data, so that a
        matmul inside runs in float32, like a matmul of this weight.
        """
        given = [self[v] for v in eqn.invars]
        of_model = self.scope.policy.of_model
        weighted = of_model and any(value.is_kept_param for value in given)
        within = Source.DATA if weighted else joint_source(given)
        subs = subjaxprs_of(eqn)
        closed = not subs or subs[0].kind is Kind.CALL and not subs[0].is_open
        carried = closed and any(value.carried for value in given)
        scope = self.scope.scope_inside(eqn)
        return scope._replace(within=within or Source.DATA, carried=carried)
