"""Replay rules for equations that hold programs.

A call's program replaces the call. A loop runs as a whole first; if its results are not
finite, it runs again trip by trip. So does a `shard_map`, with the values of all
devices side by side.
"""

import dataclasses
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core as jc
from jax.sharding import PartitionSpec

from jamp._autocast.frames import Kind, frames_of, program_of, shard_map_options
from jamp.diagnostics._location import Array
from jamp.diagnostics._replay import (
    Context,
    Replay,
    ReplayRule,
    Site,
    Value,
    not_finite,
    run_operation,
)
from jamp.diagnostics._step import Step

_MOST_TRIPS = 100_000  # on unfused values, a while loop may never end
# Equations that return their operands; they carry types or schedules.
_MARKS = ("optimization_barrier", "apart", "repeated", "pvary")


def replay_step(step: Step, scale: float) -> list[Value]:
    """The loss and the gradients of a step at a loss scale."""
    replay = Replay(_rule_of)
    with jax.debug_nans(False), jax.debug_infs(False):
        given = [replay.incoming(array, path) for array, path in step.inputs_at(scale)]
        return replay.run(step.program, given, Context())


def _rule_of(eqn: jc.JaxprEqn) -> ReplayRule:
    if eqn.primitive.name in _MARKS:
        return lambda replay, site, read: read
    kinds = {frame.kind for frame in frames_of(eqn)} or {None}
    return _RULES[kinds.pop()]


def _run_call(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    frames = frames_of(site.eqn)
    number = _scalar(read.pop(0).array) if frames[0].kind is Kind.BRANCH else 0
    return replay.run(frames[number].program, read, site.inside())


def _run_loop(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    # Under shard_map, JAX types a carry by the devices that it differs on.
    outs = None if site.context.devices else run_operation(replay, site, read)
    if outs is not None and _is_explained(outs, read):
        return outs
    *tests, body = frames_of(site.eqn)
    begin = tests[0].consts if tests else 0
    fixed, rest = read[begin : begin + body.consts], read[begin + body.consts :]
    carry, over = rest[: body.carries], rest[body.carries :]
    trips = range(_MOST_TRIPS if body.trips is None else body.trips)
    name = "a while loop" if tests else f"{len(trips)} of a scan"
    rows: dict[int, list[Value]] = {}
    for i in trips[::-1] if site.eqn.params.get("reverse") else trips:
        here = site.inside(f"iteration {i} of {name}")
        if tests:
            (goes_on,) = replay.run(tests[0].program, [*read[:begin], *carry], here)
            if not _scalar(goes_on.array):
                break
        slices = [_slice(v, i, here) for v in over]
        results = replay.run(body.program, [*fixed, *carry, *slices], here)
        carry, rows[i] = results[: body.carries], results[body.carries :]
    axis = len(site.context.devices)
    for column in zip(*(rows[i] for i in sorted(rows)), strict=True):
        array = jnp.stack([v.array for v in column], axis)
        carry.append(replay.result(site, array, column, ""))
    return carry if outs is None else _with_causes(outs, carry)


def _slice(value: Value, i: int, context: Context) -> Value:
    array = value.array[(slice(None),) * len(context.devices) + (i,)]
    is_bad = value.cause is not None and any(not_finite(array))
    return Value(array, value.cause if is_bad else None, value.near)


def _is_explained(outs: Sequence[Value], read: Sequence[Value]) -> bool:
    """Whether all results are finite, or an operand was NaN."""
    if not any(v.cause for v in outs):
        return True
    return any(v.cause is not None and v.cause.has_nan for v in read)


def _with_causes(outs: Sequence[Value], inside: Sequence[Value]) -> list[Value]:
    """The results of a whole, with the causes that a replay of its parts found."""
    pairs = zip(outs, inside, strict=True)
    return [
        whole._replace(cause=found.cause) if whole.cause and found.cause else whole
        for whole, found in pairs
    ]


def _run_shard_map(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    outs = run_operation(replay, site, read)
    if _is_explained(outs, read):
        return outs
    options = shard_map_options(site.eqn)
    mesh, axes = options["mesh"], options["axis_names"]
    stacked = PartitionSpec(tuple(a for a in mesh.axis_names if a in axes))

    def on_devices(fn, arrays, in_specs):
        """Runs `fn` on each device's part of some arrays, and stacks the results."""
        specs = {"in_specs": in_specs, "out_specs": stacked}
        stack = lambda *parts: [x[None] for x in fn(*parts)]  # noqa: E731
        return jax.jit(jax.shard_map(stack, **(options | specs)))(*arrays)

    def evaluate(fn, arrays):
        specs = (stacked,) * len(arrays)
        return on_devices(lambda *parts: fn(*(x[0] for x in parts)), arrays, specs)

    here = dataclasses.replace(
        site.inside(f"a shard_map over {', '.join(sorted(map(str, axes)))}"),
        devices=(math.prod(mesh.shape[axis] for axis in axes),),
        evaluate=evaluate,
    )
    parts = on_devices(lambda *xs: xs, [v.array for v in read], options["in_specs"])
    values = [v._replace(array=x) for v, x in zip(read, parts, strict=True)]
    try:
        return _with_causes(outs, replay.run(program_of(site.eqn), values, here))
    except _DevicesDiffer:
        return outs


class _DevicesDiffer(Exception):
    """Devices take different branches, so the replay cannot run them together."""


def _scalar(array: Array) -> int:
    """A scalar that decides a branch, equal on all devices."""
    first, *others = np.ravel(array).tolist()
    if any(x != first for x in others):
        raise _DevicesDiffer
    return int(first)


_RULES: dict[Kind | None, ReplayRule] = {
    Kind.CALL: _run_call,
    Kind.BRANCH: _run_call,
    Kind.LOOP: _run_loop,
    Kind.MAP: _run_shard_map,
    None: run_operation,
}
