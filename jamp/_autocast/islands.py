"""Keeps float32 islands from saving float32 residuals for the backward pass.

    x:f32 = convert y; t:f32 = tanh x; z:f16 = convert t
    z:f16 = checkpoint[jaxpr={ y. x:f32 = convert y; t = tanh x; z:f16 = convert t }] y

An *island* is a set of float32 operations between half values, such as a softmax
between two matmuls, or a gelu. Its derivative would save exponentials in float32, twice
the bytes of the same model in half. So an island becomes one `jax.checkpoint`. The
backward pass reads only its half inputs, and recomputes the rest from the same bits.
Only islands with a costly operation need this: XLA itself recomputes cheap ones. In a
loop, an island may also read and return float32 carries, which the loop stores anyway.

A barrier on its large inputs keeps XLA from saving the float32 values anyway. An island
also contains the bias of its input, if only it reads the sum. Then XLA saves the matmul
alone, and adds the bias in each kernel that reads it.

The backward pass reads saved sums and maxima, which are small. But XLA for GPUs
computes the rows of a softmax in one kernel, from the scores to the result, and with
dropout, a cap or a bias too. With saved sums, it would read the scores three times. So
a GPU recomputes the sums of rows that fit such a kernel.
"""

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast.calls import followed
from jamp._autocast.graph import (
    Graph,
    Region,
    checkpoint,
    fit_one_kernel,
    has_costly,
    inputs_of,
    is_costly,
    may_be_inside,
    rounds,
    variables_in,
    with_bias_sums,
)
from jamp._autocast.primitives import FREE, follows_operands, primitive_name, traits_of
from jamp._autocast.scope import dtype_of, is_float, shape_of, size_of
from jamp._autocast.softmax import with_softmax
from jamp._autocast.sums import joined
from jamp._core.dtypes import FLOAT32, HALF_DTYPES


def checkpoint_islands(jaxpr: jc.Jaxpr, jaxprs: dict[Any, Any], loop: bool) -> jc.Jaxpr:
    """Writes each island of a rewritten jaxpr as one checkpointed equation.

    Equal islands share one of the `jaxprs`. In a `loop`, they need no barriers: the
    backward pass is a separate loop, so XLA cannot reuse float32 values of the forward
    pass.
    """
    if not has_costly(jaxpr):
        return jaxpr
    graph, written, taken = Graph(jaxpr), [], set[int]()
    for end in reversed(range(len(jaxpr.eqns))):
        island = None if end in taken else _island(graph, end, loop)
        if island is not None:
            taken |= island.members
            island = with_bias_sums(graph, island, jaxprs)
            eqns = [jaxpr.eqns[i] for i in sorted(island.members)]
            (result,) = jaxpr.eqns[end].outvars
            large = filter(is_float, variables_in(inputs_of(eqns), size_of(result)))
            in_rows = fit_one_kernel(eqns, result)
            has_barrier = False
            if dtype_of(result) in HALF_DTYPES:
                eqns, has_barrier = with_softmax(eqns, graph, jaxprs)
                eqns = _with_rounded(eqns, result, jaxprs)
            guarded = [] if loop or has_barrier else list(large)
            new = checkpoint(graph, island, eqns, guarded, in_rows, jaxprs)
            written.append(new)
    return graph.with_checkpoints(written)


def _island(
    graph: Graph, end: int, loop: bool, has_masks: bool = True
) -> Region | None:
    """Returns the island that ends at a place, if there is one.

    A small value that is read outside stays outside. A large one, or a large float32
    input, rules out an island, because the backward pass would save it anyway. The walk
    goes backward from the end, so it knows all readers of a value when it reaches the
    value. It stops at the first large value that is read outside.

    A loop stores its carries and stacks in any case. So its islands may also end with
    float32 results of the jaxpr, return them, and read its inputs.

    The mask of a dropout depends on large float32 random numbers. Without `has_masks`,
    masks are inputs of the island.
    """
    eqns = graph.eqns
    if not rounds(eqns[end]) and not (loop and _is_carried(graph, end)):
        return None
    (result,) = eqns[end].outvars
    if len(shape_of(result)) > 4 or not graph.readers_of([result]):
        # XLA transposes the cotangents of grouped attention scores in float32. With
        # such islands, Llama moves 1.09 times the bytes on an H200.
        return None
    size, island, waiting = size_of(result), Region(set(), set()), [-end]
    while waiting:
        # The heap returns the last place first.
        if (place := -heapq.heappop(waiting)) in island.members:
            continue
        eqn = eqns[place]
        readers = graph.readers_of(eqn.outvars) - ({len(eqns)} if loop else set())
        if place != end and not readers <= island.members - island.shared:
            if traits_of(primitive_name(eqn)).shape in FREE:
                island.shared.add(place)
            elif _holds(eqn.outvars, size):
                return None
            else:
                continue
        island.members.add(place)
        for v in variables_in(eqn.invars):
            maker = graph.makers.get(v)
            is_inside = dtype_of(v) == FLOAT32 or has_masks and dtype_of(v) == jnp.bool_
            if maker is not None and is_inside and may_be_inside(eqns[maker]):
                heapq.heappush(waiting, -maker)
    inside = [eqns[i] for i in island.members]
    # A costly statistic, such as a norm's `rsqrt`, is small and may be saved.
    if not any(is_costly(e) and _holds(e.outvars, size) for e in inside):
        return None
    stored = set(graph.jaxpr.invars if loop else ())
    if not _holds(set(inputs_of(inside)) - stored, size):
        return island
    masks = _holds((v for e in inside for v in e.outvars), size, jnp.bool_)
    return _island(graph, end, loop, has_masks=False) if has_masks and masks else None


def _is_carried(graph: Graph, place: int) -> bool:
    """Returns whether an equation computes a float32 result of the jaxpr."""
    eqn, end = graph.eqns[place], len(graph.eqns)
    returned = [end in graph.readers_of([v]) for v in eqn.outvars]
    in_float32 = all([dtype_of(v) == FLOAT32 for v in eqn.outvars])
    # JAX may leave a `jit` without results.
    return returned != [] and all(returned) and in_float32 and may_be_inside(eqn)


def _with_rounded(
    eqns: Sequence[jc.JaxprEqn], result: jc.Var, jaxprs: dict[Any, Any]
) -> list[jc.JaxprEqn]:
    """Rounds the cotangents of half values that an island joins with small inputs.

    The gradient of a small input, such as a bias of scores, is a sum over such a
    cotangent. XLA would store it in float32 for the sum, and in half for the half
    value. After an exponential or a sum, a value is float32 and its cotangent may be
    beyond half's range.
    """
    size, rounding, written = size_of(result), joined(dtype_of(result)), []
    inputs = inputs_of(eqns)
    small = {v for v in inputs if size_of(v) < size}
    half = {v for v in inputs if dtype_of(v) in HALF_DTYPES} - small
    for eqn in eqns:
        read, name = variables_in(eqn.invars), primitive_name(eqn)
        added = [v for v in read if v in small and dtype_of(v) == FLOAT32]
        others = [v for v in read if v not in small]
        if read and not others:
            small.update(eqn.outvars)
        elif half.issuperset(others) and follows_operands(name):
            if added:
                written += followed(eqn, rounding, added, jaxprs)
                continue
            half.update(eqn.outvars)
        written.append(eqn)
    return written


def _holds(variables: Iterable[jc.Var], size: int, dtype: DTypeLike = FLOAT32) -> bool:
    """Returns whether a variable of a dtype has at least `size` elements."""
    return any(dtype_of(v) == dtype for v in variables_in(variables, size))
