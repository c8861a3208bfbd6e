"""Keeps float32 islands from saving float32 residuals for the backward pass.

    x:f32 = convert y; t:f32 = tanh x; z:f16 = convert t
    z:f16 = checkpoint[jaxpr={ y. x:f32 = convert y; t = tanh x; z:f16 = convert t }] y

An *island* is a set of float32 operations between half values, such as a softmax
between two matmuls, or a gelu. Its derivative would save exponentials in float32, twice
the bytes of the same model in half. So an island becomes one `jax.checkpoint`. It saves
its half inputs and its small sums and maxima, and recomputes the rest from the same
bits. Only islands with a costly operation need this: XLA itself recomputes cheap ones.
"""

import functools
import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast.frames import Kind, frames_of, with_equations
from jamp._autocast.jax_internals import checkpointed
from jamp._autocast.primitives import Shape, primitive_name, traits_of
from jamp._autocast.program import Atom, dtype_of, is_float, shape_of, size_of
from jamp._autocast.softmax import rounds_softmax, with_softmax
from jamp._core.dtypes import FLOAT32, HALF_DTYPES

# The backward pass may recompute these, because they have no effects.
_INSIDE = (Shape.ELEMENTWISE, Shape.SAME, Shape.RESHAPE, Shape.REPEAT, Shape.REDUCE)
# Recomputing these costs no memory, so they may belong to several islands.
_FREE = (Shape.SAME, Shape.REPEAT)


def checkpoint_islands(
    jaxpr: jc.Jaxpr, programs: dict[Any, Any], loop: bool
) -> jc.Jaxpr:
    """Writes each island of a rewritten program as one checkpointed equation.

    Equal islands share one of the `programs`. In a `loop` they need no barrier: the
    backward pass is a separate loop, so XLA cannot reuse float32 values of the forward.
    """
    if not any(map(is_costly, jaxpr.eqns)):
        return jaxpr
    program = Graph(jaxpr)
    # All islands are found before the first is written.
    islands = [program.island(i) for i in range(len(jaxpr.eqns))]
    eqns: list[jc.JaxprEqn | None] = list(jaxpr.eqns)
    for end, (members, shared) in enumerate(islands):
        for i in members - shared:
            eqns[i] = None
        if members:
            # The checkpoint replaces the last equation: all inputs of the island exist
            # by then, and no earlier equation reads its result.
            inside = [jaxpr.eqns[i] for i in sorted(members)]
            written = with_softmax(inside, program.users, programs)
            barrier = not (loop or rounds_softmax(written, inside))
            eqns[end] = checkpointed(
                written,
                inputs_of(written),
                jaxpr.eqns[end].outvars,
                is_kept,
                prevent_cse=barrier,
                programs=programs,
                around=jaxpr,
            )
    return with_equations(jaxpr, [eqn for eqn in eqns if eqn is not None])


class Graph:
    """A program, with the places of the equations that make and use each value."""

    def __init__(self, jaxpr: jc.Jaxpr):
        self.eqns = jaxpr.eqns
        self.makers = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        # An imaginary last equation, outside of all islands, uses the outputs.
        atoms = [*(eqn.invars for eqn in jaxpr.eqns), jaxpr.outvars]
        self.reads = list(map(variables_in, atoms))
        self.users: dict[jc.Var, set[int]] = {}
        for i, read in enumerate(self.reads):
            for v in read:
                self.users.setdefault(v, set()).add(i)

    @functools.cached_property
    def without_gradient(self) -> set[int]:
        """The places of the equations without float results, and of the outputs."""
        found = {
            i for i, e in enumerate(self.eqns) if not any(map(is_float, e.outvars))
        }
        return found | {len(self.eqns)}

    def users_of(self, var: jc.Var) -> set[int]:
        """Returns the places of the equations that read a value."""
        return self.users.get(var, set())

    def island(self, end: int) -> tuple[set[int], set[int]]:
        """Returns the equations of the island that a cast to half ends, or empty sets.

        The second set has the members that equations outside of the island also read.
        Recomputing these is free, so they are written inside and outside.

        A small value that is read outside stays outside. A large one, or a large
        float32 input, rules out an island, because the backward pass would save it
        anyway. The walk goes backward from the end, so it knows all readers of a value
        when it reaches the value. It stops at the first large value read outside.
        """
        none = set[int](), set[int]()
        if not _ends_island(self.eqns[end]):
            return none
        size = size_of(self.eqns[end].outvars[0])
        members, shared, waiting = set[int](), set[int](), [-end]
        while waiting:
            i = -heapq.heappop(waiting)
            if i in members:
                continue
            users = set().union(*map(self.users_of, self.eqns[i].outvars))
            if i != end and (users - members or users & shared):
                if _shape_of(self.eqns[i]) not in _FREE:
                    if holds(self.eqns[i].outvars, size):
                        return none
                    continue
                shared.add(i)
            members.add(i)
            for v in self.reads[i]:
                maker = self.makers.get(v)
                is_inside = dtype_of(v) in (FLOAT32, jnp.bool_)
                if maker is not None and is_inside and may_be_inside(self.eqns[maker]):
                    heapq.heappush(waiting, -maker)
        eqns = [self.eqns[i] for i in members]
        # A costly statistic, such as a norm's `rsqrt`, is small and may be saved.
        costly = any(is_costly(e) and holds(e.outvars, size) for e in eqns)
        if len(shape_of(self.eqns[end].outvars[0])) > 4:
            # XLA transposes the cotangents of grouped attention scores in float32. With
            # such islands, Llama moves 1.09 times the bytes on an H200.
            return none
        is_island = costly and not holds(inputs_of(eqns), size)
        return (members, shared) if is_island else none


def _ends_island(eqn: jc.JaxprEqn) -> bool:
    """Returns whether an equation is a cast from float32 to half."""
    if eqn.primitive.name != "convert_element_type":
        return False
    (source,), (result,) = eqn.invars, eqn.outvars
    return dtype_of(source) == FLOAT32 and dtype_of(result) in HALF_DTYPES


def _shape_of(eqn: jc.JaxprEqn) -> Shape:
    return traits_of(primitive_name(eqn)).shape


def is_kept(primitive: str) -> bool:
    """Returns whether to save a result. A reduction's is small but costly to redo."""
    # `softmax` gives a name to the value that it saves.
    return primitive == "name" or traits_of(primitive).shape is Shape.REDUCE


def may_be_inside(eqn: jc.JaxprEqn, labels: Mapping[int, int] = {}) -> bool:
    """Returns whether the backward pass may recompute an equation and its programs."""
    for frame in frames_of(eqn):
        is_plain = frame.kind is Kind.CALL and frame.is_open and not frame.own_residuals
        return is_plain and all(may_be_inside(e, labels) for e in frame.program.eqns)
    if id(eqn) in labels:
        return True
    traits = traits_of(primitive_name(eqn))
    return traits.shape in _INSIDE and not traits.slow and not _ends_island(eqn)


def is_costly(eqn: jc.JaxprEqn) -> bool:
    frames = frames_of(eqn)
    if frames:
        return any(map(is_costly, frames[0].program.eqns))
    return traits_of(primitive_name(eqn)).costly


def inputs_of(eqns: Sequence[jc.JaxprEqn]) -> list[jc.Var]:
    """Returns the variables that equations read but do not make, in reading order."""
    made = {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in variables_in(eqn.invars))
    return [v for v in read if v not in made]


def holds(variables: Iterable[jc.Var], size: int) -> bool:
    """Returns whether a float32 variable has at least `size` elements."""
    return any(dtype_of(v) == FLOAT32 and size_of(v) >= size for v in variables)


def variables_in(atoms: Iterable[Atom]) -> list[jc.Var]:
    return [v for v in atoms if not isinstance(v, jc.Literal)]
