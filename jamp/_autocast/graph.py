"""Replaces each region of a jaxpr with one checkpoint.

    0: x:f32 = convert y    read by 1 and 2
    1: t:f32 = mul x x      needs 0
    2: z:f16 = convert t    Region({0, 1, 2}) reads y and returns z

    z:f16 = checkpoint[jaxpr={ y. x = convert y; t = mul x x; z = convert t }] y

`islands` and `heads` find the regions, only by dtypes. The graph knows which equations
make and read a value, which results other equations read, and where to put the
checkpoint of a region.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

from jax.extend import core as jc

from jamp._autocast.barriers import is_kept, is_reduction, with_barriers, with_kept_sums
from jamp._autocast.calls import checkpointed
from jamp._autocast.primitives import (
    RECOMPUTABLE,
    Shape,
    primitive_name,
    traits_of,
)
from jamp._autocast.scope import (
    Atom,
    dtype_of,
    is_float,
    shape_of,
    size_of,
    size_of_shape,
)
from jamp._autocast.subjaxprs import (
    Kind,
    once_per_jaxpr,
    subjaxprs_of,
    with_equations,
)
from jamp._autocast.sums import with_bias
from jamp._core.dtypes import FLOAT32, HALF_DTYPES


class Region(NamedTuple):
    """The places of equations that one checkpoint replaces."""

    members: set[int]
    # Equations outside read these members too. Recomputing them is free, so they are
    # written inside and outside.
    shared: set[int]


class Graph:
    """A jaxpr, with the places of the equations that make and read each value."""

    def __init__(self, jaxpr: jc.Jaxpr):
        self.jaxpr, self.eqns = jaxpr, jaxpr.eqns
        self.makers = {v: i for i, e in enumerate(jaxpr.eqns) for v in e.outvars}
        # The places that an equation needs: they make its operands, or have effects.
        self.needs: list[set[int]] = []
        self._readers: dict[jc.Var, set[int]] = {}
        effects = set[int]()
        for i, eqn in enumerate(jaxpr.eqns):
            read = variables_in(eqn.invars)
            self.needs.append({self.makers[v] for v in read if v in self.makers})
            if eqn.effects:
                self.needs[i] |= effects
                effects = {i}
            for v in read:
                self._readers.setdefault(v, set()).add(i)
        # An imaginary last equation, outside of all regions, reads the outputs.
        for v in variables_in(jaxpr.outvars):
            self._readers.setdefault(v, set()).add(len(jaxpr.eqns))

    def readers_of(self, variables: Iterable[jc.Var]) -> set[int]:
        """Returns the places of the equations that read one of the variables."""
        return set().union(*(self._readers.get(v, ()) for v in variables))

    def has_gradient(self, place: int) -> bool:
        """Returns whether a place is an equation with a float result."""
        in_program = place < len(self.eqns)
        return in_program and any(map(is_float, self.eqns[place].outvars))

    def ancestors(self, atoms: Iterable[Atom]) -> set[int]:
        """Returns the places of the equations from which values are computed."""
        found = set[int]()
        waiting = {self.makers[v] for v in variables_in(atoms) if v in self.makers}
        while waiting:
            found |= waiting
            waiting = set().union(*(self.needs[i] for i in waiting)) - found
        return found

    def results_of(self, region: Region) -> list[jc.Var]:
        """Returns the values of a region that equations outside read."""
        gone = region.members - region.shared
        made = (v for i in sorted(gone) for v in self.eqns[i].outvars)
        return [v for v in made if self.readers_of([v]) - gone]

    def between(self, members: set[int]) -> set[int]:
        """Returns the places outside that are on a path between two members."""
        after, before = set(members), set(members)
        places = range(min(members), max(members) + 1)
        for i in places:
            if self.needs[i] & after:
                after.add(i)
        for i in reversed(places):
            if i in before:
                before |= self.needs[i]
        return (after & before) - members

    def with_checkpoints(
        self, regions: Sequence[tuple[Region, jc.JaxprEqn]]
    ) -> jc.Jaxpr:
        """Returns the jaxpr with one equation in place of each region.

        The equation is at the end of the region. An earlier equation that needs a
        result of the region moves after it.
        """
        ends = {max(region.members): (region, new) for region, new in regions}
        gone = set().union(*(r.members - r.shared for r, _ in regions))
        late, waiting, eqns = set(gone), list[int](), list[jc.JaxprEqn]()

        def write_or_wait(places: Iterable[int]) -> None:
            for j in places:
                if self.needs[j] & late:
                    late.add(j)
                    waiting.append(j)
                else:
                    eqns.append(self.eqns[j])
                    late.discard(j)

        for i in range(len(self.eqns)):
            if i not in gone:
                write_or_wait([i])
            if i in ends:
                region, new = ends[i]
                eqns.append(new)
                late -= region.members
                waited, waiting = waiting, []
                write_or_wait(waited)
        return with_equations(self.jaxpr, eqns)


def checkpoint(
    graph: Graph,
    region: Region,
    eqns: Sequence[jc.JaxprEqn],
    guarded: Collection[jc.Var],
    in_rows: bool,
    jaxprs: dict[Any, Any],
) -> tuple[Region, jc.JaxprEqn]:
    """Returns a region and its checkpoint, which contains `eqns` instead.

    The backward pass recomputes what depends on the `guarded` variables, and the sums
    if they are `in_rows`. Equal checkpoints share one of the `jaxprs`.
    """
    inside = with_barriers(with_kept_sums(eqns, in_rows, jaxprs), guarded)
    outvars = graph.results_of(region)
    new = checkpointed(inside, inputs_of(eqns), outvars, is_kept, jaxprs, graph.jaxpr)
    return region, new


def with_bias_sums(graph: Graph, region: Region, jaxprs: dict[Any, Any]) -> Region:
    """Returns a region with the sums of a matmul and a bias that only it reads."""
    inside = region.members - region.shared
    read = inputs_of([graph.eqns[i] for i in sorted(region.members)])
    alone = [v for v in read if graph.readers_of([v]) <= inside]
    sums = {graph.makers[v] for v in alone if v in graph.makers}
    sums = {i for i in sums if is_bias_sum(graph.eqns[i], jaxprs)}
    return Region(region.members | sums, region.shared)


def is_bias_sum(eqn: jc.JaxprEqn, jaxprs: dict[Any, Any]) -> bool:
    """Returns whether an equation adds a bias to a half matmul."""
    calls = [new.eqns[0] for key, new in jaxprs.items() if key[0] is with_bias]
    sums = [sub.jaxpr for call in calls for sub in subjaxprs_of(call)]
    return any(sub.jaxpr is x for sub in subjaxprs_of(eqn) for x in sums)


def fuses_rows(eqns: Sequence[jc.JaxprEqn], size: int) -> bool:
    """Returns whether a large array depends on a sum of exponentials, as in a softmax.

    XLA for GPUs computes such rows in one kernel, from the maximum, on which the
    exponentials depend, to the result or to the cotangents.
    """
    return _ROW in _steps(eqns, size).values()


_ROW = 4  # the last step


def _steps(eqns: Sequence[jc.JaxprEqn], size: int) -> dict[Atom, int]:
    """Returns the step of each value: a maximum, a costly array, its sum, a row."""
    steps: dict[Atom, int] = {}
    for eqn in eqns:
        step = max([steps.get(v, 0) for v in variables_in(eqn.invars)], default=0)
        is_large = bool(variables_in(eqn.outvars, size))
        if is_large and step == _ROW - 1:
            step = _ROW
        elif step in (0, 2) and is_reduction(eqn):
            step += 1
        elif step == 1 and is_large and is_costly(eqn):
            step = 2
        steps.update(dict.fromkeys(eqn.outvars, step))
    return steps


# XLA computes longer rows in several kernels. With 20,480 scores and recomputed sums,
# dropout moves 1.12 times the bytes on an H200, and with saved sums 1.00 times.
_LONGEST = 16_384


def fit_one_kernel(eqns: Sequence[jc.JaxprEqn], result: jc.Var) -> bool:
    """Returns whether XLA for GPUs computes rows in one kernel in both passes.

    Such rows are along the last axis. The gradient of a scale that differs along the
    rows reads them in a second kernel. So XLA would store the exponentials in float32.
    """
    size, shape = size_of(result), shape_of(result)
    steps = _steps(eqns, size)

    def is_row(v: jc.Var) -> bool:
        return len(shape_of(v)) == len(shape) and shape_of(v)[-1] != 1

    small = [v for v in inputs_of(eqns) if is_float(v) and size_of(v) < size]
    differ = {v: is_row(v) for v in small}  # whether they differ along the rows
    for eqn in eqns:
        read, traits = variables_in(eqn.invars), traits_of(primitive_name(eqn))
        if read and differ.keys() >= set(read):
            along = any(differ[v] for v in read)
            if eqn.primitive.name == "broadcast_in_dim":
                axis, *_ = eqn.params["broadcast_dimensions"][-1:] or (-1,)
                ends = axis == len(shape_of(eqn.outvars[0])) - 1
                along = ends and shape_of(read[0])[-1] != 1
            elif traits.shape is Shape.RESHAPE:
                along = is_row(eqn.outvars[0])
            differ.update(dict.fromkeys(eqn.outvars, along))
        elif traits.reads_operands and any(differ.get(v) for v in read):
            if _ROW in [steps.get(v) for v in read]:
                return False
        if is_reduction(eqn) and variables_in(eqn.invars, size):
            if eqn.params.get("axes") != (len(shape) - 1,):
                return False
    return _ROW in steps.values() and size_of_shape(shape[-1:]) <= _LONGEST


def may_be_inside(eqn: jc.JaxprEqn) -> bool:
    """Returns whether the backward pass may recompute an equation and its jaxprs."""
    for sub in subjaxprs_of(eqn):
        is_plain = sub.kind is Kind.CALL and sub.is_open and not sub.own_residuals
        return is_plain and _all_may_be_inside(sub.jaxpr)
    traits = traits_of(primitive_name(eqn))
    return traits.shape in RECOMPUTABLE and not traits.slow and not rounds(eqn)


@once_per_jaxpr
def _all_may_be_inside(jaxpr: jc.Jaxpr) -> bool:
    return all(map(may_be_inside, jaxpr.eqns))


def rounds(eqn: jc.JaxprEqn) -> bool:
    """Returns whether an equation is a cast from float32 to half."""
    if eqn.primitive.name != "convert_element_type":
        return False
    (source,), (result,) = eqn.invars, eqn.outvars
    return dtype_of(source) == FLOAT32 and dtype_of(result) in HALF_DTYPES


def is_costly(eqn: jc.JaxprEqn) -> bool:
    """Returns whether XLA keeps a result of an equation instead of recomputing it."""
    if subs := subjaxprs_of(eqn):
        return has_costly(subs[0].jaxpr)
    return traits_of(primitive_name(eqn)).costly


@once_per_jaxpr
def has_costly(jaxpr: jc.Jaxpr) -> bool:
    """Returns whether a jaxpr contains a costly equation, see `is_costly`."""
    return any(map(is_costly, jaxpr.eqns))


def inputs_of(eqns: Sequence[jc.JaxprEqn]) -> list[jc.Var]:
    """Returns the variables that equations read but do not make, in reading order."""
    made = {v for eqn in eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in eqns for v in variables_in(eqn.invars))
    return [v for v in read if v not in made]


def variables_in(atoms: Iterable[Atom], size: int = 0) -> list[jc.Var]:
    """Returns the variables that have at least `size` elements."""
    return [v for v in atoms if not isinstance(v, jc.Literal) and size_of(v) >= size]
