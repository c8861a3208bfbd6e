"""Keeps a loss from saving float32 residuals for the backward pass.

    x:f32 = convert z; e = exp x; s = reduce_sum e; l = gather x y
    s l = checkpoint[jaxpr={ z y. x = convert z; ...; l = label x y }] z y

A *head* is the part of a rewritten program that reduces a large half array in float32
to small values, such as the loss of logits. Like an island, it saves only its half
inputs and its sums and maxima. If only the head reads the sum of a matmul and a bias,
the head adds the bias in float32, so that its gradient sums unrounded cotangents. The
cotangents of the logits meet inside the head in float32, and are rounded once: in half,
the sum of a label's -1 and a softmax's 0.999 would lose its digits.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast.frames import frames_of, program_of, with_equations
from jamp._autocast.islands import (
    Graph,
    inputs_of,
    is_costly,
    is_kept,
    may_be_inside,
    variables_in,
)
from jamp._autocast.jax_internals import at_place, checkpointed, conversion
from jamp._autocast.labels import labels_in, with_labels
from jamp._autocast.primitives import primitive_name
from jamp._autocast.program import dtype_of, size_of
from jamp._autocast.sums import with_bias
from jamp._core.dtypes import FLOAT32, HALF_DTYPES


def checkpoint_heads(
    jaxpr: jc.Jaxpr, programs: dict[Any, Any], loop: bool, saved: bool
) -> jc.Jaxpr:
    """Writes each head of a rewritten program as one checkpointed equation.

    `checkpoint_islands` explains `programs` and `loop`, and `Scope` explains `saved`.
    """
    sources = dict.fromkeys(v for eqn in jaxpr.eqns for v in _widened(eqn))
    if not sources or not any(map(is_costly, jaxpr.eqns)):
        return jaxpr
    labels, graph = labels_in(jaxpr, programs), Graph(jaxpr)
    for source in sources:
        if graph.eqns is not jaxpr.eqns:
            graph = Graph(jaxpr)
        if members := _head(graph, source, labels):
            if place := _place_of_bias(graph, source, programs):
                jaxpr = _with_float32_bias(graph, jaxpr, *place)
                graph, members = Graph(jaxpr), members | {place[0]}
            jaxpr = _written(graph, jaxpr, members, labels, programs, loop, saved)
    return jaxpr


def _place_of_bias(
    graph: Graph, source: jc.Var, programs: dict[Any, Any]
) -> tuple[int, int] | None:
    """Returns the places of a half sum with a bias and of the only cast that reads it.

    Returns None if `source` is not such a sum, or has other readers.
    """
    users, maker = graph.users_of(source), graph.makers.get(source)
    if maker is None or len(users) != 1 or graph.without_gradient & users:
        return None
    (cast,), eqn = users, graph.eqns[maker]
    known = [key for key in programs if isinstance(key, tuple) and key[0] is with_bias]
    sums = [program_of(programs[key]) for key in known]
    is_call = bool(frames_of(eqn)) and any(program_of(eqn) is p for p in sums)
    is_cast = graph.eqns[cast].primitive.name == "convert_element_type"
    return (maker, cast) if is_call and is_cast else None


def _with_float32_bias(
    graph: Graph, jaxpr: jc.Jaxpr, maker: int, cast: int
) -> jc.Jaxpr:
    """Returns the program with the bias added in float32."""
    call, eqns = graph.eqns[maker], list(jaxpr.eqns)
    (product,), bias = variables_in(call.invars[:1]), call.invars[1]
    eqns[maker] = begin = conversion(product, FLOAT32, call)
    (*_, add) = program_of(call).eqns
    operands, results = [begin.outvars[0], bias], graph.eqns[cast].outvars
    eqns[cast] = at_place(add.replace(invars=operands, outvars=results), call)
    return with_equations(jaxpr, eqns)


def _widened(eqn: jc.JaxprEqn) -> list[jc.Var]:
    """Returns the half values that an equation casts to float32, also in a call."""
    if all(dtype_of(v) != FLOAT32 for v in eqn.outvars):
        return []
    return [v for v in variables_in(eqn.invars) if dtype_of(v) in HALF_DTYPES]


def _is_free(eqn: jc.JaxprEqn) -> bool:
    """Returns whether a head may repeat an equation: its first cast, or a mask."""
    is_cast = primitive_name(eqn) == "convert_element_type"
    return (is_cast and bool(_widened(eqn))) or all(
        dtype_of(v) == jnp.bool_ for v in eqn.outvars
    )


def _head(graph: Graph, source: jc.Var, labels: Mapping[int, int]) -> set[int]:
    """Returns the places of the equations in the head of a half array, or no places.

    An array has no head if a large value leaves it, because JAX would save that value
    anyway. It has none either if the head would read a large float32 value.
    """
    eqns, size = graph.eqns, size_of(source)

    def is_inside(place: int) -> bool:
        return place < len(eqns) and may_be_inside(eqns[place], labels)

    begins = (i for i in graph.users_of(source) - {len(eqns)} if _widened(eqns[i]))
    members, waiting = set[int](), set(begins)
    while waiting:
        if not all(map(is_inside, waiting)):
            return set()
        members |= waiting
        near: set[int] = set()
        for eqn in [eqns[place] for place in waiting]:
            read = _large(eqn.invars, size)
            wide = [v for v in read if dtype_of(v) == FLOAT32]
            if not graph.makers.keys() >= set(wide):
                return set()
            floats = {graph.makers[v] for v in wide}
            masks = {
                graph.makers[v] for v in read if _is_mask_of_labels(v, graph, size)
            }
            users = {i for v in _large(eqn.outvars, size) for i in graph.users_of(v)}
            # A reader without a gradient may stay outside: a metric, or an output.
            users -= graph.without_gradient if _is_free(eqn) else set()
            near |= floats | masks | users
        # A head also contains the small values on a path between two of its members.
        waiting = near - members or _between(graph, members)
    costly = [eqns[place] for place in members if is_costly(eqns[place])]
    return members if any(_large(eqn.invars, size) for eqn in costly) else set()


def _large(atoms: Iterable[Any], size: int) -> list[jc.Var]:
    return [v for v in variables_in(atoms) if size_of(v) >= size]


def _is_mask_of_labels(value: jc.Var, graph: Graph, size: int) -> bool:
    """Returns whether a mask depends on small values only, so a head need not save it.

    In a scan over chunks of logits, saved masks cost 9 % more bytes on an H200.
    """
    if dtype_of(value) != jnp.bool_ or value not in graph.makers:
        return False
    maker = graph.eqns[graph.makers[value]]
    return may_be_inside(maker) and not _large(maker.invars, size)


def _between(graph: Graph, members: set[int]) -> set[int]:
    """Returns the equations outside that are on a path between two members."""

    def makers_of(place: int) -> set[int]:
        return {graph.makers[v] for v in graph.reads[place] if v in graph.makers}

    places = range(min(members), max(members) + 1)
    after, before = set(members), set(members)
    for i in places:
        if makers_of(i) & after:
            after.add(i)
    for i in reversed(places):
        if i in before:
            before |= makers_of(i)
    return (after & before) - members


def _leaves(graph: Graph, place: int, members: set[int]) -> bool:
    """Returns whether an equation outside reads a result of an equation inside."""
    return any(graph.users_of(v) - members for v in graph.eqns[place].outvars)


def _written(
    graph: Graph,
    jaxpr: jc.Jaxpr,
    members: set[int],
    labels: Mapping[int, int],
    programs: dict[Any, Any],
    loop: bool,
    saved: bool,
) -> jc.Jaxpr:
    """Returns the program with a head as one equation, at the place of its last."""
    inside = [jaxpr.eqns[i] for i in sorted(members)]
    both: set[int] = set()
    for i in sorted(members, reverse=True):
        if _is_free(jaxpr.eqns[i]) and _leaves(graph, i, members - both):
            both.add(i)
    outvars = [
        v
        for i in sorted(members - both)
        for v in jaxpr.eqns[i].outvars
        if graph.users_of(v) - (members - both)
    ]
    written = with_labels(inside, labels)
    # A barrier on the saved sums suffices to recompute the exponentials. Without one on
    # the logits, their cotangents may reuse the logits' memory. In a checkpoint that
    # saves values, JAX does not extend a tuple by these, and raises: use a bool there.
    inputs = inputs_of(inside)
    barrier = not loop and (saved or (False,) * len(inputs))
    head = checkpointed(
        written,
        inputs,
        outvars,
        is_kept,
        prevent_cse=barrier,
        programs=programs,
        around=jaxpr,
    )
    before, after, late = list[jc.JaxprEqn](), list[jc.JaxprEqn](), set(outvars)
    effects = False  # whether an equation with effects comes after the head
    for i, eqn in enumerate(jaxpr.eqns):
        if i in members - both:
            continue
        waits = late & set(variables_in(eqn.invars)) or (effects and eqn.effects)
        if i > max(members) or waits:
            after.append(eqn)
            late.update(eqn.outvars)
            effects = effects or bool(eqn.effects)
        else:
            before.append(eqn)
    return with_equations(jaxpr, [*before, head, *after])
