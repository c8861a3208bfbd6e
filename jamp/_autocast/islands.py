"""Keeps float32 islands from saving float32 residuals for the backward pass.

    x:f32 = convert y; t:f32 = tanh x; z:f16 = convert t
    z:f16 = checkpoint[jaxpr={ y. x:f32 = convert y; t = tanh x; z:f16 = convert t }] y

An *island* is a set of float32 operations between half values, such as a softmax
between two matmuls, or a gelu. Its derivative would save exponentials in float32, twice
the bytes of the same model in half. So an island becomes one `jax.checkpoint`. It saves
its half inputs and its small sums and maxima, and recomputes the rest from the same
bits. Only islands with a costly operation need this: XLA itself recomputes cheap ones.

A barrier on its large inputs keeps XLA from saving the float32 values anyway. An island
also contains the bias of its input, if only it reads the sum. Then XLA saves the matmul
alone, and adds the bias in each kernel that reads it. A softmax with dropout has no
barrier, because XLA fuses its rows: a BERT with one mask for all heads would move 1.08
times the bytes.
"""

import heapq
from collections.abc import Iterable
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast.graph import (
    Graph,
    Region,
    checkpoint,
    fuses_rows,
    has_costly,
    inputs_of,
    is_costly,
    may_be_inside,
    rounds,
    variables_in,
    with_bias_sums,
)
from jamp._autocast.primitives import Shape, primitive_name, traits_of
from jamp._autocast.program import dtype_of, is_float, shape_of, size_of
from jamp._autocast.softmax import with_softmax
from jamp._core.dtypes import FLOAT32

# Recomputing these costs no memory, so they may belong to several islands.
_FREE = (Shape.SAME, Shape.REPEAT)


def checkpoint_islands(
    jaxpr: jc.Jaxpr, programs: dict[Any, Any], loop: bool
) -> jc.Jaxpr:
    """Writes each island of a rewritten program as one checkpointed equation.

    Equal islands share one of the `programs`. In a `loop`, they need no pins: the
    backward pass is a separate loop, so XLA cannot reuse float32 values of the forward
    pass.
    """
    if not has_costly(jaxpr):
        return jaxpr
    graph, written = Graph(jaxpr), []
    for end, eqn in enumerate(jaxpr.eqns):
        island = _island(graph, end) if rounds(eqn) else None
        if island is not None:
            island = with_bias_sums(graph, island, programs)
            inside = [jaxpr.eqns[i] for i in sorted(island.members)]
            eqns, has_barrier = with_softmax(inside, graph, programs)
            inputs = inputs_of(eqns)
            size = size_of(eqn.outvars[0])
            barrier = loop or has_barrier or fuses_rows(inside, size)
            large = [v for v in variables_in(inputs, size) if is_float(v)]
            pinned = () if barrier else large
            written.append(checkpoint(graph, island, eqns, pinned, programs))
    return graph.with_checkpoints(written)


def _island(graph: Graph, end: int, has_masks: bool = True) -> Region | None:
    """Returns the island that a cast to half ends, if there is one.

    A small value that is read outside stays outside. A large one, or a large float32
    input, rules out an island, because the backward pass would save it anyway. The walk
    goes backward from the end, so it knows all readers of a value when it reaches the
    value. It stops at the first large value that is read outside.

    The mask of a dropout depends on large float32 random numbers. Without `has_masks`,
    masks are inputs of the island.
    """
    (result,) = graph.eqns[end].outvars
    if len(shape_of(result)) > 4 or not graph.readers_of([result]):
        # XLA transposes the cotangents of grouped attention scores in float32. With
        # such islands, Llama moves 1.09 times the bytes on an H200.
        return None
    size, island, waiting = size_of(result), Region(set(), set()), [-end]
    while waiting:
        # The heap returns the last place first.
        if (place := -heapq.heappop(waiting)) in island.members:
            continue
        eqn = graph.eqns[place]
        readers = graph.readers_of(eqn.outvars)
        if place != end and not readers <= island.members - island.shared:
            if traits_of(primitive_name(eqn)).shape in _FREE:
                island.shared.add(place)
            elif _holds(eqn.outvars, size):
                return None
            else:
                continue
        island.members.add(place)
        for v in variables_in(eqn.invars):
            maker = graph.makers.get(v)
            is_inside = dtype_of(v) == FLOAT32 or has_masks and dtype_of(v) == jnp.bool_
            if maker is not None and is_inside and may_be_inside(graph.eqns[maker]):
                heapq.heappush(waiting, -maker)
    eqns = [graph.eqns[i] for i in island.members]
    # A costly statistic, such as a norm's `rsqrt`, is small and may be saved.
    costly = any(is_costly(e) and _holds(e.outvars, size) for e in eqns)
    if not costly:
        return None
    if not _holds(inputs_of(eqns), size):
        return island
    masks = _holds((v for e in eqns for v in e.outvars), size, jnp.bool_)
    return _island(graph, end, has_masks=False) if has_masks and masks else None


def _holds(variables: Iterable[jc.Var], size: int, dtype: DTypeLike = FLOAT32) -> bool:
    """Returns whether a variable of a dtype has at least `size` elements."""
    return any(dtype_of(v) == dtype for v in variables_in(variables, size))
