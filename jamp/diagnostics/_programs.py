"""Replay rules for equations that hold programs.

A call's program replaces the call. A loop runs as a whole first; if its results are not
finite, it runs again trip by trip. A `shard_map` is one operation.
"""

import jax
import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast.frames import Kind, frames_of
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
    number = int(read.pop(0).array) if frames[0].kind is Kind.BRANCH else 0
    return replay.run(frames[number].program, read, site.inside())


def _run_loop(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    outs = run_operation(replay, site, read)
    if not any(v.cause for v in outs) or any(v.cause and v.cause.has_nan for v in read):
        return outs  # all is finite, or NaN came in
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
            if not goes_on.array:
                break
        slices = [_slice(v, i) for v in over]
        results = replay.run(body.program, [*fixed, *carry, *slices], here)
        carry, rows[i] = results[: body.carries], results[body.carries :]
    for column in zip(*(rows[i] for i in sorted(rows)), strict=True):
        array = jnp.stack([v.array for v in column])
        carry.append(replay.result(site, array, column, ""))
    # The whole may round otherwise than its parts: keep its values.
    return [
        whole._replace(cause=found.cause) if whole.cause and found.cause else whole
        for whole, found in zip(outs, carry, strict=True)
    ]


def _slice(value: Value, i: int) -> Value:
    array = value.array[i]
    is_bad = value.cause is not None and any(not_finite(array))
    return Value(array, value.cause if is_bad else None, value.near)


_RULES: dict[Kind | None, ReplayRule] = {
    Kind.CALL: _run_call,
    Kind.BRANCH: _run_call,
    Kind.LOOP: _run_loop,
    Kind.MAP: run_operation,
    None: run_operation,
}
