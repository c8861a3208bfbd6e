"""Finds carries that a loop adds to, and conditions that depend on a half matmul.

    scan { w c. y = tanh (dot_general c w); d = add c y }    the loop adds to c
    scan { c w. y = tanh (dot_general c w); d = add c y }    layers: the loop slices w
    scan { w c. f = ...; y = ...; d = add (mul f c) y }      a gate, as in an LSTM
    scan { w c. f = add 1 (dot_general c w); d = mul f c }   the loop scales c

A loop that adds small steps to its carry integrates; in half, rounding would lose the
steps. A loop over layers also adds to its carry, but it has few iterations, and each
iteration has other weights.
"""

import enum
from collections.abc import Callable, Sequence, Set
from typing import Any

from jax.extend import core as jc

from jamp._autocast.frames import Frame, frames_of, while_programs
from jamp._autocast.primitives import Shape, is_matmul, primitive_name, traits_of
from jamp._autocast.program import Atom, dtype_of, is_float, size_of

type Tags = frozenset[Any]
type TagRule = Callable[[jc.JaxprEqn, list[Tags]], Tags]


class On(enum.Enum):
    """Tags of a value in the body of a loop: the value depends on these."""

    CARRY = "carry"  # the result of the last iteration
    WEIGHT = "weight"  # a weight of this iteration: sliced, or indexed by a counter
    DATA = "data"  # other data of this iteration
    NUMBER = "number"  # a single number of this iteration, such as its time
    LAYER = "layer"  # a matmul of a carry and a weight of this iteration
    HALF = "half"  # a matmul in half


# A carry, or a sum with one, also has a pair as a tag: the position of the carry, and
# whether something was added. `_SCALED` replaces the latter after a multiplication by a
# value that depends on a carry.
_SCALED = "scaled"
_ADD = ("add", "sub", "add_any")
_CHOOSE = ("select_n", "max", "min", "clamp", "neg")
_MOVE = (
    *(Shape.SAME, Shape.MARK, Shape.RESHAPE),
    *(Shape.REARRANGE, Shape.REPEAT, Shape.PART, Shape.MOVE),
)


def flow(program: jc.Jaxpr, given: Sequence[Tags], rule: TagRule) -> list[Tags]:
    """Returns the tags of a program's results, given the tags of its inputs.

    The `rule` maps an equation and the tags of its operands to the tags of its results.
    It reads an inner loop once, as if each carry depended on all operands of the loop.
    """
    known: dict[Atom, Tags] = dict(zip(program.invars, given, strict=True))

    def tags_of(atom: Atom) -> Tags:
        return known.get(atom, frozenset()) if isinstance(atom, jc.Var) else frozenset()

    for eqn in program.eqns:
        frames = frames_of(eqn)
        if not frames:
            tags = rule(eqn, list(map(tags_of, eqn.invars)))
            known.update(dict.fromkeys(eqn.outvars, tags))
        for frame in frames:
            inside = list(map(tags_of, frame.operands))
            begin, end = frame.consts, frame.consts + frame.carries
            inside[begin:end] = _with_all(inside[begin:end], inside)
            outs = flow(frame.program, inside, rule)
            outs[: frame.carries] = _with_all(outs[: frame.carries], outs)
            for var, tags in zip(frame.results, outs, strict=False):
                known[var] = tags_of(var) | tags
    return list(map(tags_of, program.outvars))


def _with_all(carries: Sequence[Tags], values: Sequence[Tags]) -> list[Tags]:
    """Adds the tags of all values to each carry, for any number of iterations."""
    shared = {tag for tags in values for tag in tags if not isinstance(tag, tuple)}
    return [tags | shared for tags in carries]


def added_carries(frame: Frame, are_weights: Sequence[bool]) -> set[int]:
    """Returns the carries that a loop adds to with the same weights in all iterations.

    `are_weights` states whether each array that the loop slices may be a weight. A
    carried integer is a counter, and an array that it indexes may also be a weight.
    """
    given: list[Tags] = [frozenset()] * frame.consts
    for i, v in enumerate(frame.program.invars[frame.consts :]):
        if i < frame.carries:
            tags = (On.CARRY, (i, False)) if is_float(v) else (On.WEIGHT,)
        elif _is_number(v):
            tags = (On.NUMBER,)
        else:
            tags = (On.WEIGHT if are_weights[i - frame.carries] else On.DATA,)
        given.append(frozenset(tags))
    found = flow(frame.program, given, _added)[: frame.carries]
    pairs = [{tag for tag in tags if isinstance(tag, tuple)} for tags in found]
    while True:
        further = [_next_iteration(tags, pairs) for tags in pairs]
        if further == pairs:
            break
        pairs = further
    grows = [{(i, True), (i, _SCALED)} & pairs[i] for i in range(len(found))]
    layers = [On.LAYER in tags for tags in found]
    return {i for i, new in enumerate(grows) if new and not layers[i]}


def _next_iteration(tags: Set[Any], pairs: Sequence[Set[Any]]) -> set[Any]:
    """Follows pairs for one more iteration, since a loop may exchange its carries.

    scan { w a b. y = dot_general b w; d = add a y } returns b d: d adds to a
    """
    steps = {(at, add or more) for place, add in tags for at, more in pairs[place]}
    return {*tags, *steps}


def _is_number(atom: Atom) -> bool:
    return is_float(atom) and size_of(atom) == 1


_NUMBER = frozenset((On.NUMBER,))


def _added(eqn: jc.JaxprEqn, given: list[Tags]) -> Tags:
    name, union = primitive_name(eqn), frozenset[Any]().union(*given)
    if union and On.CARRY not in union and all(map(_is_number, eqn.outvars)):
        return _NUMBER
    on = frozenset(tag for tag in union if isinstance(tag, On))
    if is_matmul(eqn):
        rest = [tags for tags in given[:2] if On.CARRY not in tags]
        layer = On.CARRY in on and any(On.WEIGHT in tags for tags in rest)
        return on | {On.LAYER} if layer else on
    if name in _ADD:
        # A sum with a gated carry is also gated.
        return on | {(place, True) for place, how in union - on if how != _SCALED}
    if name in _CHOOSE or traits_of(name).shape in _MOVE:
        return union
    if name in ("mul", "div"):
        # A single number and a constant of the loop are not gates.
        first, second = given
        if second <= _NUMBER:
            return on | first
        if name == "mul" and first <= _NUMBER:
            return on | second
        return on | {(place, _SCALED) for place, _ in union - on}
    return on


def waits_for_half(eqn: jc.JaxprEqn) -> bool:
    """Returns whether the condition of a while loop depends on a half matmul in it."""
    test, body, first, second = while_programs(eqn)
    carries: list[Tags] = [frozenset()] * (len(eqn.invars) - first - second)
    while True:
        found = flow(body, [frozenset()] * second + carries, _in_half)
        if found == carries:
            (result,) = flow(test, [frozenset()] * first + carries, _in_half)
            return On.HALF in result
        carries = [a | b for a, b in zip(carries, found, strict=True)]


def _in_half(eqn: jc.JaxprEqn, given: list[Tags]) -> Tags:
    bits = [dtype_of(v).itemsize * 8 for v in eqn.invars if is_float(v)]
    is_half = is_matmul(eqn) and any(n <= 16 for n in bits)
    return frozenset((On.HALF,)) if is_half else frozenset().union(*given)
