"""How a replay goes into the operations that hold programs.

A call's program is run in its place. A loop is run as a whole first, and then, if it
gave what is not finite or somebody looks on, trip by trip; a `shard_map` only in the
former case, with all devices' values side by side.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc
from jax.sharding import PartitionSpec

from jamp._autocast.frames import Kind, frames_of, program_of, shard_map_options
from jamp.diagnostics._location import Array, Cause, not_finite, parents_of
from jamp.diagnostics._replay import (
    Context,
    Observe,
    Replay,
    ReplayRule,
    Site,
    Value,
    operation,
)
from jamp.diagnostics._step import Step

# A loop that runs longer is looked at as a whole: on rounded values it may never end.
_MOST_TRIPS = 100_000
# They hand on their operands, and are about types or schedules.
_MARKS = ("optimization_barrier", "apart", "repeated", "pvary")


def replayed(step: Step, scale: float, observe: Observe | None = None) -> list[Value]:
    """The loss and the gradients of a step at a loss scale.

    Args:
        step: its program, and what that takes.
        scale: the loss scale.
        observe: sees each operation; of loops, those of each trip.
    """
    replay = Replay(_rule_of, observe)
    with jax.debug_nans(False), jax.debug_infs(False):
        given = [replay.incoming(array, path) for array, path in step.values_at(scale)]
        return replay.run(step.program, given, Context())


def _rule_of(eqn: jc.JaxprEqn) -> ReplayRule:
    if eqn.primitive.name in _MARKS:
        return lambda replay, site, read: read
    kinds = {frame.kind for frame in frames_of(eqn)} or {None}
    return _RULES[kinds.pop()]


def _call(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    frames = frames_of(site.eqn)
    number = _number(read.pop(0).array) if frames[0].kind is Kind.BRANCH else 0
    return replay.run(frames[number].program, read, site.context_inside())


def _loop(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    # JAX types a carry by the devices that it differs on: side by side, all are alike.
    outs = None if site.context.devices else operation(replay, site, read)
    if outs is not None and not replay.observe and _is_explained(outs, read):
        return outs
    *tests, body = frames_of(site.eqn)
    begin = tests[0].consts if tests else 0
    fixed, rest = read[begin : begin + body.consts], read[begin + body.consts :]
    carry, over = rest[: body.carries], rest[body.carries :]
    trips = range(_MOST_TRIPS if body.trips is None else body.trips)
    name = "a while loop" if tests else f"{len(trips)} of a scan"
    rows: dict[int, list[Value]] = {}
    for i in trips[::-1] if site.eqn.params.get("reverse") else trips:
        here = site.context_inside(f"iteration {i} of {name}")
        if tests:
            (goes_on,) = replay.run(tests[0].program, [*read[:begin], *carry], here)
            if not _number(goes_on.array):
                break
        slices = [_slice(v, i, here) for v in over]
        results = replay.run(body.program, [*fixed, *carry, *slices], here)
        carry, rows[i] = results[: body.carries], results[body.carries :]
    columns = [*zip(*(rows[i] for i in sorted(rows)), strict=True)]
    if outs is not None:
        return _from_inside(replay, outs, [*([v] for v in carry), *columns])
    axis = len(site.context.devices)
    for column in columns:
        array = jnp.stack([v.array for v in column], axis)
        carry.append(replay.seen(site, array, column, ""))
    return carry


def _slice(value: Value, i: int, context: Context) -> Value:
    array = value.array[(slice(None),) * len(context.devices) + (i,)]
    is_bad = value.cause is not None and any(not_finite(array))
    return Value(array, value.cause if is_bad else None, value.near)


def _is_explained(outs: Sequence[Value], read: Sequence[Value]) -> bool:
    """Whether there is nothing to look for inside: all finite, or NaN came in."""
    if not any(v.cause for v in outs):
        return True
    return any(v.cause is not None and v.cause.has_nan for v in read)


def _from_inside(
    replay: Replay, outs: Sequence[Value], inside: Iterable[Iterable[Value]]
) -> list[Value]:
    """The results of a whole, which know what was found of each of them inside."""
    results = []
    for whole, values in zip(outs, inside, strict=True):
        found = [v.cause for v in values if v.cause]
        if whole.cause is not None and found:
            has_nan = whole.cause.has_nan
            cause = Cause(replay.order, has_nan, parents_of(has_nan, found))
            whole = whole._replace(cause=cause)
        results.append(whole)
    return results


# ---- shard_map


def _shard_map(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    outs = operation(replay, site, read)
    if _is_explained(outs, read):
        return outs
    options = shard_map_options(site.eqn)
    mesh, axes = options["mesh"], options["axis_names"]
    stacked = PartitionSpec(tuple(a for a in mesh.axis_names if a in axes))

    def on_devices(fn, arrays, in_specs):
        """`fn` on each device's part of some arrays; results are side by side."""
        specs = {"in_specs": in_specs, "out_specs": stacked}
        mapped = jax.shard_map(
            lambda *parts: [x[None] for x in fn(*parts)], **(options | specs)
        )
        return jax.jit(mapped)(*arrays)

    def evaluate(fn, arrays):
        specs = (stacked,) * len(arrays)
        return on_devices(lambda *parts: fn(*(x[0] for x in parts)), arrays, specs)

    here = dataclasses.replace(
        site.context_inside(f"a shard_map over {', '.join(sorted(map(str, axes)))}"),
        devices=(math.prod(mesh.shape[axis] for axis in axes),),
        evaluate=evaluate,
    )
    parts = on_devices(lambda *xs: xs, [v.array for v in read], options["in_specs"])
    values = [v._replace(array=x) for v, x in zip(read, parts, strict=True)]
    try:
        results = replay.run(program_of(site.eqn), values, here)
    except _Disagreement:
        return outs
    return _from_inside(replay, outs, zip(results))


class _Disagreement(Exception):
    """Devices take different branches: then it is looked at as a whole."""


def _number(array: Array) -> int:
    """A scalar that decides where to go on, which all devices must have."""
    first, *others = np.ravel(array).tolist()
    if any(x != first for x in others):
        raise _Disagreement
    return int(first)


_RULES: dict[Kind | None, ReplayRule] = {
    Kind.CALL: _call,
    Kind.BRANCH: _call,
    Kind.LOOP: _loop,
    Kind.MAP: _shard_map,
    None: operation,
}
