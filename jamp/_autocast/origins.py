"""Finds the arrays, statistics and matmuls from which a value is computed.

    p:f32[8,4] = dot_general x w      roots {p}, a matmul with 4 features
    m:f32[8] = reduce_max p           roots {m}, a statistic of {p}
    n:f32[8,4] = broadcast_in_dim m   varies along axis 0, a statistic of {p}
    q:f32[8,4] = sub p n              roots {p}, normalized

The origin of a value answers three questions. Does a sum add a bias to a matmul? Do
the value's own statistics normalize it? Does recomputing the value cost only one read,
because it has one root?
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend import core as jc

from jamp._autocast.jax_internals import conv_features
from jamp._autocast.primitives import (
    HANDS_ON,
    IN_PLACE,
    Rule,
    primitive_name,
    traits_of,
)
from jamp._autocast.scope import Atom, is_float32, shape_of, size_of


class Matmul(NamedTuple):
    """The sizes and axes that the bias of a matmul can have."""

    features: frozenset[int]  # the numbers of elements that it may have
    trailing: bool  # whether it must vary only along the last axes


class Origin(NamedTuple):
    """The values from which a value is computed.

    Arrays are in the order of the jaxpr. The order of a set would depend on their
    addresses, and so would the numbers of `numbered` and the text of the jaxpr.
    """

    # The arrays from which it is computed elementwise, or the value itself.
    roots: tuple[Atom, ...] = ()
    joins: bool = False  # whether it has two or more roots
    # The axes along which a broadcast value varies; None if it was not broadcast.
    varies: tuple[int, ...] | None = None
    matmul: Matmul | None = None  # set if it is the result of a matmul
    # The roots of the values from which it is reduced.
    statistic_of: tuple[Atom, ...] = ()
    normalized: bool = False  # whether its own statistic was applied to it

    def numbered(self, numbers: dict[Any, int]) -> "Origin":
        """Replaces arrays with numbers, so that two jaxprs can have equal origins."""

        def numbers_of(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple([numbers.setdefault(x, len(numbers)) for x in arrays])

        return self._replace(
            roots=numbers_of(self.roots), statistic_of=numbers_of(self.statistic_of)
        )

    def returned(self, known: dict[Any, Any], result: Atom) -> "Origin":
        """Returns the origin of a call's result, whose roots outside are numbers."""
        is_known = all([i in known for i in self.roots])
        roots = union([(known[i],) for i in self.roots]) if is_known else (result,)
        statistics = union([(known[x],) for x in self.statistic_of if x in known])
        return self._replace(roots=roots, statistic_of=statistics)


def origin_of_unknown(atom: Atom) -> Origin:
    """Returns the origin of a value about which nothing is known."""
    return Origin() if isinstance(atom, jc.Literal) else Origin((atom,))


def is_bias(bias: Atom, origin: Origin, of_matmul: Origin, result: Atom) -> bool:
    """Returns whether a value has the form of a bias for the matmul it is added to.

    A bias has fewer elements than the `result`. A vector that has as many is one number
    for each example, such as the last value of a series.
    """
    matmul, shape = of_matmul.matmul, shape_of(bias)
    if matmul is None or origin.matmul is not None:
        return False
    if meet(origin.roots, of_matmul.roots):
        return False  # a gelu adds `0.04 * x**3` to `x`, which may have one row
    axes = [i for i, n in enumerate(shape) if n != 1]
    if origin.varies is not None:
        axes = [i for i in axes if i in origin.varies]
    size = math.prod(shape[i] for i in axes)
    if size not in matmul.features or size == size_of(result):
        return False
    trailing = list(range(len(shape) - len(axes), len(shape)))
    return axes == trailing or not matmul.trailing


def is_normalized(full: Sequence[Origin], small: Sequence[Origin]) -> bool:
    """Returns whether large values are, or were, combined with their own statistics."""
    roots = union([origin.roots for origin in full])
    own = any([meet(roots, origin.statistic_of) for origin in small])
    return own or any([origin.normalized for origin in full])


def union(sets: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    """Returns the arrays of several tuples, each once and in order."""
    found: tuple[Any, ...] = ()
    for each in sets:
        if each and each is not found:
            found = tuple(dict.fromkeys(found + each)) if found else each
    return found


def meet(first: tuple[Any, ...], second: tuple[Any, ...]) -> bool:
    """Returns whether two tuples have a common array."""
    return any([x in second for x in first])


def origin_of_result(
    eqn: jc.JaxprEqn, out: jc.Var, rule: Rule, given: Sequence[Origin]
) -> Origin:
    """Returns the origin of a result of an equation."""
    if rule is Rule.HALF:
        return origin_of_unknown(out)._replace(matmul=_matmul(eqn))
    sizes, size = [size_of(v) for v in eqn.invars], size_of(out)
    floats = [g for v, g in zip(eqn.invars, given, strict=True) if is_float32(v)]
    statistics = union([g.statistic_of for g in floats])
    if sizes and size < max(sizes):
        # The equation is a sum, a maximum or a slice.
        if primitive_name(eqn) not in ("reduce_max", "reduce_min"):
            statistics = union([statistics, *[g.roots for g in floats]])
        return origin_of_unknown(out)._replace(statistic_of=statistics)
    varies = _varies(eqn, out, given)
    if varies is not None:
        return Origin(varies=varies, statistic_of=statistics)
    shape = traits_of(primitive_name(eqn)).shape
    if shape not in IN_PLACE or len(eqn.outvars) > 1:
        return origin_of_unknown(out)._replace(statistic_of=statistics)
    full, small = [], []
    for v, g, n in zip(eqn.invars, given, sizes, strict=True):
        if is_float32(v) and not isinstance(v, jc.Literal):
            (full if n == size and g.varies is None else small).append(g)
    roots = union([g.roots for g in full])
    joins = len(roots) > 1
    reshaped = shape in HANDS_ON and len(full) == 1
    return Origin(
        (out,) if joins or not roots else roots,
        joins,
        None,
        full[0].matmul if reshaped else None,
        statistics,
        not joins and is_normalized(full, small),
    )


def _varies(
    eqn: jc.JaxprEqn, out: jc.Var, given: Sequence[Origin]
) -> tuple[int, ...] | None:
    """Returns the axes along which a result varies, if it is broadcast; else None."""
    name = eqn.primitive.name
    if name == "broadcast_in_dim":
        first, places = eqn.invars[0], eqn.params["broadcast_dimensions"]
        if size_of(first) == size_of(out):
            return None
        axes = given[0].varies
        axes = range(len(shape_of(first))) if axes is None else axes
        return tuple(places[i] for i in axes if shape_of(first)[i] != 1)
    pairs = zip(eqn.invars, given, strict=True)
    found = [(v, g.varies) for v, g in pairs if not isinstance(v, jc.Literal)]
    axes = [axes for _, axes in found if axes is not None]
    if not found or len(axes) < len(found):
        return None
    if any(size_of(v) != size_of(out) for v, _ in found):
        return None
    if name == "transpose":
        return tuple(map(eqn.params["permutation"].index, axes[0]))
    if shape_of(found[0][0]) != shape_of(out):
        return ()  # after a reshape, the axes are unknown
    return tuple(sorted(frozenset().union(*axes)))


def _matmul(eqn: jc.JaxprEqn) -> Matmul:
    """Returns the sizes of a bias: it has the free axes of one side of a matmul."""
    if eqn.primitive.name == "conv_general_dilated":
        return Matmul(frozenset((conv_features(eqn),)), trailing=False)
    sides = eqn.params.get("dimension_numbers")
    if eqn.primitive.name != "dot_general" or sides is None:
        return Matmul(frozenset(), trailing=True)
    contracted, batch = sides
    free = []
    for side, atom in enumerate(eqn.invars[:2]):
        used = {*contracted[side], *batch[side]}
        shape = enumerate(shape_of(atom))
        free.append(math.prod(n for i, n in shape if i not in used))
    return Matmul(frozenset(free) - {1}, trailing=True)
