"""Keeps the float32 of a loss out of memory between the forward and the backward pass.

    x:f32 = convert z; e = exp x; s = reduce_sum e; l = gather x y
    s l = checkpoint[jaxpr={ z y. x = convert z; ...; l = label x y }] z y

A *head* is the part of a rewritten program that reduces a large half array in float32
to small values: the loss of logits. As for an island, its half inputs are kept, and its
sums and maxima. A bias whose sum with a product only the head reads is added in it, in
float32: its gradient then needs no rounded cotangent. The cotangents of all that read
the logits meet inside, in float32, and are rounded once: a label's -1 and a softmax's
0.999 would lose their digits in half.
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

    `programs` and `loop` are as for islands; `saved` is as of a `Scope`.
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
    """Returns the places of a half sum with a bias and of the one cast that reads it.

    Returns None if `source` is another value, or has other readers.
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
    """The half values of which it makes float32: by a cast, alone or in a call."""
    if all(dtype_of(v) != FLOAT32 for v in eqn.outvars):
        return []
    return [v for v in variables_in(eqn.invars) if dtype_of(v) in HALF_DTYPES]


def _is_free(eqn: jc.JaxprEqn) -> bool:
    """Whether it may be inside and outside: a cast that begins a head, or a mask."""
    is_cast = primitive_name(eqn) == "convert_element_type"
    return (is_cast and bool(_widened(eqn))) or all(
        dtype_of(v) == jnp.bool_ for v in eqn.outvars
    )


def _head(graph: Graph, source: jc.Var, labels: Mapping[int, int]) -> set[int]:
    """The places of the equations of the head of a half array; none if it has none.

    It is none if something large leaves it, which would be kept anyway, or if it reads
    something large in float32 that is not made inside.
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
            # What gives no gradient may stay outside: a metric, and what is returned.
            users -= graph.without_gradient if _is_free(eqn) else set()
            near |= floats | masks | users
        # Small values on a path from one member to another are inside as well.
        waiting = near - members or _between(graph, members)
    costly = [eqns[place] for place in members if is_costly(eqns[place])]
    return members if any(_large(eqn.invars, size) for eqn in costly) else set()


def _large(atoms: Iterable[Any], size: int) -> list[jc.Var]:
    return [v for v in variables_in(atoms) if size_of(v) >= size]


def _is_mask_of_labels(value: jc.Var, graph: Graph, size: int) -> bool:
    """Whether a mask is made of nothing large: inside, it need not be kept.

    In a scan over parts of the logits, kept masks cost an H200 9 % more bytes.
    """
    if dtype_of(value) != jnp.bool_ or value not in graph.makers:
        return False
    maker = graph.eqns[graph.makers[value]]
    return may_be_inside(maker) and not _large(maker.invars, size)


def _between(graph: Graph, members: set[int]) -> set[int]:
    """The equations outside that are on a path from one member to another."""

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
    """Whether something outside reads the results of an equation inside."""
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
    """The program with a head as one equation, in the place of its last one."""
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
    # A barrier before the sums that are kept is enough for exponentials not to be, and
    # the cotangents of logits may go where these are. In a checkpoint that keeps values
    # JAX does not extend a tuple by them, and raises.
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
    effects = False  # whether something that has some comes after the head
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
