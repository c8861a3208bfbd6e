"""Keeps a loss from saving float32 residuals for the backward pass.

    x:f32 = convert z; e = exp x; s = reduce_sum e; l = gather x y
    s l = checkpoint[jaxpr={ z y. x = convert z; ...; l = label x y }] z y

A *head* is the part of a rewritten jaxpr that reduces a large half array in float32
to small values, such as the loss of logits. Like an island, it saves only its half
inputs and its sums and maxima. The cotangents of the logits meet inside the head in
float32, and are rounded once. In half, the sum of a label's -1 and a softmax's 0.999
would lose its digits.

The backward pass needs the half logits and the sums that it divides by. XLA for GPUs
saves float32 values of the forward pass too, if the backward pass reads the same
residuals. A barrier on a residual prevents this, and also ends a fusion. So a head has
a barrier where its passes over the logits are separate kernels in any case:

- If the loss has no softmax, as a sigmoid's loss, one pass reduces the logits, and a
  second one computes the cotangents. The head guards the logits by a barrier, as an
  island does.
- If the head picks a label's logit, the gather ends the fusion of a softmax. The head
  guards its sums and maxima, which suffice to recompute the exponentials.
- XLA fuses the rows of any other softmax, from its maximum to the cotangents. With
  barriers, an entropy would move 1.9 times the bytes, and a KL divergence 1.3 times. If
  a GPU recomputed its sums, as in an island, an entropy of 8,192 words would move .85
  times the bytes, but one of 32,000 words, whose rows are too long, 1.15 times.

A head that guards a residual also contains the bias of its logits, if only the head
reads the sum: the matmul is what XLA stores. Beside a label, it adds the bias in
float32. XLA then sums the bias's gradient in the kernel that writes the cotangents.
"""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast.barriers import is_reduction
from jamp._autocast.graph import (
    Graph,
    Region,
    checkpoint,
    fuses_rows,
    has_costly,
    inputs_of,
    is_bias_sum,
    is_costly,
    may_be_inside,
    variables_in,
)
from jamp._autocast.jax_internals import at_source, conversion
from jamp._autocast.labels import labels_in
from jamp._autocast.primitives import Shape, primitive_name, traits_of
from jamp._autocast.scope import dtype_of, is_float32, size_of
from jamp._autocast.subjaxprs import subjaxprs_of, with_equations
from jamp._core.dtypes import FLOAT32, HALF_DTYPES

type Labels = Mapping[jc.Var, jc.JaxprEqn]


def checkpoint_heads(jaxpr: jc.Jaxpr, jaxprs: dict[Any, Any], loop: bool) -> jc.Jaxpr:
    """Writes each head of a rewritten jaxpr as one checkpointed equation.

    `checkpoint_islands` explains `jaxprs` and `loop`.
    """
    sources = dict.fromkeys([v for eqn in jaxpr.eqns for v in _widened(eqn)])
    graph = Graph(jaxpr)
    labels = labels_in(graph) if sources else {}
    if not sources or not (labels or has_costly(jaxpr)):
        return jaxpr
    for source in sources:
        if members := _head(graph, source, labels):
            size = size_of(source)
            picks = any(v in labels for i in members for v in graph.eqns[i].outvars)
            inside = [graph.eqns[i] for i in sorted(members)]
            is_one_pass = not picks and not fuses_rows(inside, size)
            place = _place_of_bias(graph, source, jaxprs)
            if place is not None and (picks or is_one_pass):
                graph = _with_float32_bias(graph, *place) if picks else graph
                members = members | {place[0]}
            inside = (graph.eqns[i] for i in sorted(members))
            eqns = [labels.get(eqn.outvars[0], eqn) for eqn in inside]
            guarded: list[jc.Var] = []
            # In a loop, the backward pass is a separate loop.
            if picks and not loop:
                # Without a barrier on the logits, their cotangents may reuse the
                # logits' memory.
                guarded = [v for e in eqns if is_reduction(e) for v in e.outvars]
            elif is_one_pass and not loop:
                large = variables_in(inputs_of(eqns), size)
                guarded = large if all(_is_stored(v, graph) for v in large) else []
            region = Region(members, _shared(graph, members))
            head = checkpoint(graph, region, eqns, guarded, False, jaxprs)
            graph = Graph(graph.with_checkpoints([head]))
            # The checkpoint returns these labels, but must stay a checkpoint.
            labels = {v: eqn for v, eqn in labels.items() if v not in head[1].outvars}
    return graph.jaxpr


def _is_stored(value: jc.Var, graph: Graph) -> bool:
    """Returns whether XLA writes a value to memory in any case, such as a matmul."""
    place = graph.makers.get(value)
    if place is None:
        return True
    eqn = graph.eqns[place]
    if traits_of(primitive_name(eqn)).shape is Shape.RESHAPE:
        return all(_is_stored(v, graph) for v in variables_in(eqn.invars))
    return not may_be_inside(eqn)


def _place_of_bias(
    graph: Graph, source: jc.Var, jaxprs: dict[Any, Any]
) -> tuple[int, int] | None:
    """Returns the places of a half sum with a bias and of the only cast that reads it.

    Returns None if `source` is not such a sum, or has other readers.
    """
    readers, maker = graph.readers_of([source]), graph.makers.get(source)
    if maker is None or len(readers) != 1 or not all(map(graph.has_gradient, readers)):
        return None
    (cast,), eqn = readers, graph.eqns[maker]
    is_call = is_bias_sum(eqn, jaxprs)
    is_cast = graph.eqns[cast].primitive.name == "convert_element_type"
    return (maker, cast) if is_call and is_cast else None


def _with_float32_bias(graph: Graph, maker: int, cast: int) -> Graph:
    """Returns the jaxpr with the bias added in float32."""
    call, eqns = graph.eqns[maker], list(graph.eqns)
    (matmul,), bias = variables_in(call.invars[:1]), call.invars[1]
    eqns[maker] = begin = conversion(matmul, FLOAT32, call)
    (*_, add) = subjaxprs_of(call)[0].jaxpr.eqns
    operands, results = [begin.outvars[0], bias], graph.eqns[cast].outvars
    eqns[cast] = at_source(add.replace(invars=operands, outvars=results), call)
    return Graph(with_equations(graph.jaxpr, eqns))


def _widened(eqn: jc.JaxprEqn) -> list[jc.Var]:
    """Returns the half values that an equation casts to float32, even in a call."""
    if not any(map(is_float32, eqn.outvars)):
        return []
    return [v for v in variables_in(eqn.invars) if dtype_of(v) in HALF_DTYPES]


def _is_free(eqn: jc.JaxprEqn) -> bool:
    """Returns whether a head may repeat an equation: its first cast, or a mask."""
    is_cast = primitive_name(eqn) == "convert_element_type"
    return (is_cast and bool(_widened(eqn))) or all(
        dtype_of(v) == jnp.bool_ for v in eqn.outvars
    )


def _shared(graph: Graph, members: set[int]) -> set[int]:
    """Returns the members to repeat, because equations outside read them too."""
    shared = set[int]()
    for i in sorted(members, reverse=True):
        eqn = graph.eqns[i]
        if _is_free(eqn) and graph.readers_of(eqn.outvars) - (members - shared):
            shared.add(i)
    return shared


def _head(graph: Graph, source: jc.Var, labels: Labels) -> set[int]:
    """Returns the places of the equations in the head of a half array, or no places.

    An array has no head if equations outside would read a large value of the head,
    because JAX would save that value anyway. It also has no head if the head would read
    a large float32 value.
    """
    eqns, size = graph.eqns, size_of(source)

    def is_label(eqn: jc.JaxprEqn) -> bool:
        return any(v in labels for v in eqn.outvars)

    def is_inside(place: int) -> bool:
        if place == len(eqns):
            return False
        return is_label(eqns[place]) or may_be_inside(eqns[place])

    readers = graph.readers_of([source]) - {len(eqns)}
    members, waiting = set[int](), {i for i in readers if _widened(eqns[i])}
    while waiting:
        if not all(map(is_inside, waiting)):
            return set()
        members |= waiting
        near: set[int] = set()
        for eqn in [eqns[place] for place in waiting]:
            read = variables_in(eqn.invars, size)
            wide = {v for v in read if dtype_of(v) == FLOAT32}
            if not graph.makers.keys() >= wide:
                return set()
            wide |= {v for v in read if _is_mask_of_labels(v, graph, size)}
            readers = graph.readers_of(variables_in(eqn.outvars, size))
            if _is_free(eqn):
                # A reader without a gradient may stay outside: a metric, or an output.
                readers = set(filter(graph.has_gradient, readers))
            near |= readers | {graph.makers[v] for v in wide}
        # A head also contains the small values on a path between two of its members.
        waiting = near - members or graph.between(members)
    found = [eqns[i] for i in members if is_costly(eqns[i]) or is_label(eqns[i])]
    return members if any(variables_in(eqn.invars, size) for eqn in found) else set()


def _is_mask_of_labels(value: jc.Var, graph: Graph, size: int) -> bool:
    """Returns whether a mask depends on small values only, so a head need not save it.

    In a scan over chunks of logits, saved masks cost 9 % more bytes on an H200.
    """
    if dtype_of(value) != jnp.bool_ or value not in graph.makers:
        return False
    maker = graph.eqns[graph.makers[value]]
    return may_be_inside(maker) and not variables_in(maker.invars, size)
