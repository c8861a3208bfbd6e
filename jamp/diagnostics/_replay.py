"""Replays a step one operation at a time.

It runs the program of a call in place of the call, and a `shard_map` as one operation.
It frees a value after its last reader.
"""

import dataclasses
from collections.abc import Generator, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc

from jamp._autocast import jax_internals
from jamp._autocast.subjaxprs import Kind, subjaxprs_of
from jamp._core.dtypes import is_differentiable
from jamp.diagnostics._source import Context, Site, moves
from jamp.diagnostics._step import Step

type Array = jax.Array | np.ndarray

# Without XLA's fusions, values round differently, and a while loop may never end.
_MOST_TRIPS = 100_000
# Equations that return their operands, and only set types or schedules.
_MARKS = (
    "optimization_barrier",
    "jamp_apart",
    "jamp_residual",
    "jamp_kept",
    "jamp_sum",
    "jamp_repeated",
    "jamp_row_major",
    "jamp_made",
    "pvary",
)


@dataclasses.dataclass(eq=False, slots=True)
class Value:
    """A value of the program."""

    array: Array
    path: str = ""  # the tree path of an argument
    # The operation that computed it, before casts and moves; None for an argument.
    maker: Site | None = None
    note: Any = None  # for the reader of the events


class Event(NamedTuple):
    """An operation that ran. The last event of a step reads the results of the step."""

    site: Site | None
    read: list[Value]
    outs: list[Value]
    moves: bool = False  # whether the result has the numbers of one operand


type _Run = Generator[Event, None, list[Value]]


def replay(step: Step, scale: float, *, whole_loops: bool) -> Iterator[Event]:
    """Runs a step at a loss scale, and yields its operations as they ran.

    With `whole_loops`, a loop is one operation if its results are finite.
    """
    given = [Value(array, path) for array, path in step.inputs_at(scale)]
    outs = yield from _run(step.program, given, Context(), whole_loops)
    yield Event(None, outs, [])


def not_finite(x: object) -> tuple[bool, bool]:
    """Returns whether an array has NaN, and whether it has infinities."""
    if not is_differentiable(x):
        return False, False
    array = np.asarray(x)
    return bool(np.isnan(array).any()), bool(np.isinf(array).any())


def _run(program: jc.Jaxpr, values: list[Value], context: Context, whole: bool) -> _Run:
    """Returns the results of a program. Empties `values` to free memory."""
    env = dict(zip(program.invars, values, strict=True))
    env |= zip(program.constvars, map(Value, program.consts), strict=True)
    values.clear()

    def read(atom: Any) -> Value:
        if isinstance(atom, jc.Literal):
            return Value(np.asarray(atom.val, atom.aval.dtype))  # pyright: ignore[reportAttributeAccessIssue]
        return env[atom]

    readers = [(id(v), i) for i, eqn in enumerate(program.eqns) for v in eqn.invars]
    last = dict(readers) | dict.fromkeys(map(id, program.outvars), -1)
    for i, eqn in enumerate(program.eqns):
        operands = [read(v) for v in eqn.invars]
        for var in eqn.invars:
            if last[id(var)] == i and isinstance(var, jc.Var):
                env.pop(var, None)
        if eqn.primitive.name in _MARKS:
            outs = operands[: len(eqn.outvars)]
        else:
            outs = yield from _run_equation(
                Site(eqn, program, context), operands, whole
            )
        env |= zip(eqn.outvars, outs, strict=True)
    return [read(v) for v in program.outvars]


def _run_equation(site: Site, read: list[Value], whole: bool) -> _Run:
    subs = subjaxprs_of(site.eqn)
    kind = subs[0].kind if subs else Kind.MAP
    if kind is Kind.MAP or subs[-1].trips == 0:
        is_move = moves(site.eqn) and bool(read)
        outs = _results(site, read, read[0].maker if is_move else site)
        yield Event(site, read, outs, is_move)
        return outs
    if kind is Kind.LOOP:
        return (yield from _run_loop(site, read, whole))
    number = int(read.pop(0).array) if kind is Kind.BRANCH else 0
    return (yield from _run(subs[number].jaxpr, read, site.inside(), whole))


def _results(site: Site, read: list[Value], maker: Site | None) -> list[Value]:
    fn = jc.jaxpr_as_fun(jax_internals.program_around(site.eqn, site.program))
    return [Value(x, maker=maker) for x in fn(*(v.array for v in read))]


def _run_loop(site: Site, read: list[Value], whole: bool) -> _Run:
    """Runs a loop by iterations, and yields its slices and stacks as events."""
    if whole:
        outs = _results(site, read, site)
        is_finite = not any(any(not_finite(v.array)) for v in outs)
        if is_finite or any(not_finite(v.array)[0] for v in read):  # NaN from outside
            yield Event(site, read, outs)
            return outs
    *tests, body = subjaxprs_of(site.eqn)
    begin = tests[0].consts if tests else 0
    fixed, rest = read[begin : begin + body.consts], read[begin + body.consts :]
    carry, over = rest[: body.carries], rest[body.carries :]
    trips = range(_MOST_TRIPS if body.trips is None else body.trips)
    name = "a while loop" if tests else f"{len(trips)} of a scan"
    rows: dict[int, list[Value]] = {}
    for i in trips[::-1] if site.eqn.params.get("reverse") else trips:
        here = site.inside(f"iteration {i} of {name}")
        if tests:
            given = [*read[:begin], *carry]
            (goes_on,) = yield from _run(tests[0].jaxpr, given, here, whole)
            if not goes_on.array:
                break
        slices = []
        for v in over:
            slices.append(Value(v.array[i], maker=v.maker))
            yield Event(site, [v], slices[-1:])
        given = [*fixed, *carry, *slices]
        results = yield from _run(body.jaxpr, given, here, whole)
        carry, rows[i] = results[: body.carries], results[body.carries :]
    for column in zip(*(rows[i] for i in sorted(rows)), strict=True):
        carry.append(Value(jnp.stack([v.array for v in column]), maker=site))
        yield Event(site, [*column], carry[-1:])
    return carry
