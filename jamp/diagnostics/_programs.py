"""How a replay goes into the operations that hold programs.

A call's program is run in its place. A loop is run as a whole first, and then, if it
gave what is not finite, iteration by iteration; a `shard_map` likewise, with all
devices' values side by side.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jamp._autocast import jax_internals
from jamp.diagnostics._causes import parents_of
from jamp.diagnostics._ranges import Array, not_finite
from jamp.diagnostics._replay import Context, Replay, Rule, Site, Value, operation

# A loop that runs longer is looked at as a whole: on rounded values it may never end.
_MOST_TRIPS = 100_000


def _call(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    return replay.run(jax_internals.program_of(site.eqn), read, site.context_inside())


def _cond(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    number = site.context.number(read.pop(0).array)
    return replay.run(site.eqn.params["branches"][number], read, site.context_inside())


def _whole_first(iterations: Callable[..., list[Value]]) -> Rule:
    """The rule of a loop: its iterations are run only if they have to be looked at.

    Args:
        iterations: takes what a rule takes, and the results of the loop as a whole, or
            None where it cannot be run so.
    """

    def rule(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
        outs = operation(replay, site, read) if site.context.whole else None
        if outs is not None and _is_explained(outs, read):
            return outs
        return iterations(replay, site, read, outs)

    return rule


@_whole_first
def _scan(
    replay: Replay, site: Site, read: list[Value], outs: list[Value] | None
) -> list[Value]:
    eqn, context = site.eqn, site.context
    consts, carries = jax_internals.scan_counts(eqn)
    fixed, carry = read[:consts], read[consts : consts + carries]
    over = read[consts + carries :]
    length, body = eqn.params["length"], jax_internals.program_of(eqn)
    rows: list[list[Value]] = [[]] * length
    for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
        here = site.context_inside(f"iteration {i} of {length} of a scan")
        slices = [_slice(v, i, context) for v in over]
        results = replay.run(body, [*fixed, *carry, *slices], here)
        carry, rows[i] = results[:carries], results[carries:]
    columns = [*([v] for v in carry), *map(list, zip(*rows, strict=True))]
    if outs is None:
        arrays = [v.array for v in carry]
        arrays += [context.joined([v.array for v in c]) for c in columns[carries:]]
        pairs = zip(arrays, columns, strict=True)
        return [replay.seen(site, x, column, "") for x, column in pairs]
    return _from_inside(replay, outs, columns)


def _slice(value: Value, i: int, context: Context) -> Value:
    array = context.item(value.array, i)
    is_bad = value.cause is not None and any(not_finite(array))
    return Value(array, value.cause if is_bad else None, value.near)


@_whole_first
def _while(
    replay: Replay, site: Site, read: list[Value], outs: list[Value] | None
) -> list[Value]:
    condition, body, of_condition, of_body = jax_internals.while_programs(site.eqn)
    consts = of_condition + of_body
    carry = read[consts:]
    for i in range(_MOST_TRIPS):
        here = site.context_inside(f"iteration {i} of a while loop")
        (goes_on,) = replay.run(condition, [*read[:of_condition], *carry], here)
        if not site.context.number(goes_on.array):
            break
        carry = replay.run(body, [*read[of_condition:consts], *carry], here)
    return carry if outs is None else _from_inside(replay, outs, zip(carry))


def _is_explained(outs: list[Value], read: list[Value]) -> bool:
    """Whether there is nothing to look for inside: all finite, or NaN came in."""
    if not any(v.cause for v in outs):
        return True
    return any(v.cause is not None and v.cause.has_nan for v in read)


def _from_inside(
    replay: Replay, outs: list[Value], inside: Iterable[Iterable[Value]]
) -> list[Value]:
    """The results of a whole, which know what was found of each of them inside."""
    results = []
    for whole, values in zip(outs, inside, strict=True):
        found = [v.cause for v in values if v.cause]
        if whole.cause is not None and found:
            parents = parents_of(whole.cause.has_nan, found)
            cause = dataclasses.replace(
                whole.cause,
                order=replay.order,
                parents=parents,
                intended=all(p.intended for p in parents),
                location=None,
            )
            whole = whole._replace(cause=cause)
        results.append(whole)
    return results


# ---- shard_map


def _shard_map(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    outs = operation(replay, site, read)
    if _is_explained(outs, read):
        return outs
    options = jax_internals.shard_map_options(site.eqn)
    mesh, axes = options["mesh"], options["axis_names"]
    devices = math.prod(mesh.shape[axis] for axis in axes)
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
        evaluate=evaluate,
        whole=False,
        item=lambda array, i: array[:, i],
        joined=lambda arrays: jnp.stack(arrays, 1),
        number=_agreed,
        lifted=lambda x: jnp.broadcast_to(x, (devices, *jnp.shape(x))),
        shape=lambda array: array.shape[1:],
    )
    parts = on_devices(lambda *xs: xs, [v.array for v in read], options["in_specs"])
    values = [v._replace(array=x) for v, x in zip(read, parts, strict=True)]
    try:
        results = replay.run(jax_internals.program_of(site.eqn), values, here)
    except _Disagreement:
        return outs
    return _from_inside(replay, outs, zip(results))


class _Disagreement(Exception):
    """Devices take different branches: then it is looked at as a whole."""


def _agreed(array: Array) -> int:
    """What all devices have."""
    first, *others = np.asarray(array).ravel().tolist()
    if any(x != first for x in others):
        raise _Disagreement
    return int(first)


def _same(replay: Replay, site: Site, read: list[Value]) -> list[Value]:
    """The rule of what hands on its operands, and is about types or schedules."""
    del replay, site
    return read


_CALLS = (
    "jit",
    "closed_call",
    jax_internals.CHECKPOINT,
    "custom_jvp_call",
    "custom_vjp_call",
)
RULES: dict[str, Rule] = dict.fromkeys(_CALLS, _call) | {
    "cond": _cond,
    "scan": _scan,
    "while": _while,
    "shard_map": _shard_map,
    "optimization_barrier": _same,
    "apart": _same,
    "pvary": _same,
    "pcast": _same,
}
