"""Keeps the float32 of a loss out of memory between the forward and the backward pass.

    x:f32 = convert z; e = exp x; s = reduce_sum e; l = gather x y
    s l = checkpoint[jaxpr={ z y. x = convert z; ...; l = label x y }] z y

A *head* is what a rewritten program computes in float32 from a large half array down to
what is small: the loss of logits. As for an island, its half inputs are kept, and its
sums and maxima. The cotangents of all that read the logits meet inside, in float32, and
are rounded once: a label's -1 and a softmax's 0.999 would lose their digits in half.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast.frames import with_equations
from jamp._autocast.hijax import primitive_name
from jamp._autocast.islands import (
    Graph,
    holds,
    inputs_of,
    is_costly,
    is_kept,
    may_be_inside,
    variables_in,
)
from jamp._autocast.jax_internals import checkpointed
from jamp._autocast.labels import labels_in, with_labels
from jamp._autocast.program import dtype_of, size_of
from jamp._core.dtypes import FLOAT32, HALF_DTYPES


def checkpoint_heads(jaxpr: jc.Jaxpr, programs: dict[Any, Any], loop: bool) -> jc.Jaxpr:
    """Writes each head of a rewritten program as one checkpointed equation.

    `programs` and `loop` are as for islands.
    """
    begins = [eqn for eqn in jaxpr.eqns if _begins_head(eqn)]
    if not begins or not any(map(is_costly, jaxpr.eqns)):
        return jaxpr
    labels, graph = labels_in(jaxpr), Graph(jaxpr)
    for eqn in begins:
        begin = graph.makers.get(eqn.outvars[0])  # None if it went into another head
        if begin is not None and (members := _head(graph, begin, labels)):
            jaxpr = _written(graph, jaxpr, members, labels, programs, not loop)
            graph = Graph(jaxpr)
    return jaxpr


def _begins_head(eqn: jc.JaxprEqn) -> bool:
    """Whether it is a cast from half to float32."""
    if primitive_name(eqn) != "convert_element_type":
        return False
    (source,), (result,) = eqn.invars, eqn.outvars
    return dtype_of(source) in HALF_DTYPES and dtype_of(result) == FLOAT32


def _head(graph: Graph, begin: int, labels: Mapping[int, int]) -> set[int]:
    """The equations of the head that a cast begins; none if it is none.

    It is none if something large leaves it, which would be kept anyway, or if it reads
    something large in float32.
    """
    eqns = graph.eqns
    size = size_of(eqns[begin].outvars[0])
    members, waiting = {begin}, [begin]
    while waiting:
        while waiting:
            near = _near(graph, waiting.pop(), size, begin)
            if near is None or not all(
                i < len(eqns) and may_be_inside(eqns[i], labels) for i in near - members
            ):
                return set()
            waiting += near - members
            members |= near
        # What is small on the way from one of them to another one is inside as well.
        waiting = list(_between(graph, members))
        if not all(may_be_inside(eqns[i], labels) for i in waiting):
            return set()
        members.update(waiting)
    costly = (i for i in members if is_costly(eqns[i]))
    reads_large = any(holds(variables_in(eqns[i].invars), size) for i in costly)
    return members if reads_large else set()


def _near(graph: Graph, place: int, size: int, begin: int) -> set[int] | None:
    """The equations that make and use the large values of one; None if it is an input.

    Beside what uses the cast that begins a head, and may not be inside: that casts
    for itself.
    """
    eqn, found = graph.eqns[place], set[int]()
    for v in variables_in(eqn.invars):
        if size_of(v) >= size and dtype_of(v) in (FLOAT32, jnp.bool_):
            if v in graph.makers:
                found.add(graph.makers[v])
            elif dtype_of(v) == FLOAT32:
                return None
    for v in eqn.outvars:
        if size_of(v) >= size:
            found |= graph.users.get(v, set())
    return found


def _between(graph: Graph, members: set[int]) -> set[int]:
    """The equations that are no members, on a way from one of them to another one."""
    first, last = min(members), max(members)
    after: set[int] = set()
    for i in range(first, last):
        makers = (graph.makers.get(v) for v in variables_in(graph.eqns[i].invars))
        if i not in members and any(m in members or m in after for m in makers):
            after.add(i)
    before: set[int] = set()
    for i in range(last, first, -1):
        if i in members or i in before:
            read = variables_in(graph.eqns[i].invars)
            before |= {graph.makers[v] for v in read if v in graph.makers}
    return after & before


def _written(
    graph: Graph,
    jaxpr: jc.Jaxpr,
    members: set[int],
    labels: Mapping[int, int],
    programs: dict[Any, Any],
    barrier: bool,
) -> jc.Jaxpr:
    """The program with a head as one equation, in the place of its last one."""
    inside = [jaxpr.eqns[i] for i in sorted(members)]
    outvars = [
        v for e in inside for v in e.outvars if graph.users.get(v, set()) - members
    ]
    begins = {i for i in members if _begins_head(jaxpr.eqns[i])}
    outvars = [v for v in outvars if graph.makers[v] not in begins]
    head = checkpointed(
        with_labels(inside, labels),
        inputs_of(inside),
        outvars,
        is_kept,
        barrier,
        programs,
        jaxpr,
    )
    before, after, made = list[jc.JaxprEqn](), list[jc.JaxprEqn](), set(outvars)
    for i, eqn in enumerate(jaxpr.eqns):
        # Free to compute, a cast that others read too is in both.
        used = any(graph.users.get(v, set()) - members for v in eqn.outvars)
        if i in members and not (i in begins and used):
            continue
        late = i > max(members) or made & set(variables_in(eqn.invars))
        (after if late else before).append(eqn)
        if late:
            made.update(eqn.outvars)
    return with_equations(jaxpr, [*before, head, *after])
