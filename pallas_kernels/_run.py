"""Runs one formula over many leaves: in Mosaic GPU kernels where they fit, else in XLA.

A formula is a plain function of float32 blocks. A result that is named as a column
replaces it, one named in `reductions` is reduced over its leaf, and any other is a new
array.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from pallas_kernels import _launch
from pallas_kernels._backend import resolve
from pallas_kernels._dtypes import widened_dtype
from pallas_kernels._launch import Work, launch
from pallas_kernels._shard import combine, on_each_device, placement_of
from pallas_kernels._xla import (
    Blocks,
    Job,
    Leaf,
    bind,
    pack,
    reduce_group,
    run_leaf,
    side_by_side,
    size_of,
    together,
)


class Results(NamedTuple):
    """What a formula gave.

    Attributes:
        leaves: per leaf, its written columns and new arrays.
        reductions: by name, one value per leaf; with `totals` one value.
    """

    leaves: list[Blocks]
    reductions: dict[str, Float[Array, " n"] | Float[Array, ""]]


def run(
    job: Job,
    leaves: Sequence[Leaf],
    *,
    scalars: Mapping[str, ArrayLike] | None = None,
    per_leaf: Mapping[str, Float[Array, " n"]] | None = None,
    tags: Sequence[Any] | None = None,
    skip: Bool[Array, ""] | None = None,
    backend: str = "auto",
    shardings: Sequence[Any] | None = None,
) -> Results:
    """Runs `job` over leaves, each a dict of arrays of one shape.

    Args:
        job: what to do.
        leaves: what to work on; leaves may have different columns and dtypes.
        scalars: numbers for the formula by name, as float32.
        per_leaf: further numbers, one per leaf.
        tags: per leaf, something static for the formula.
        skip: if true, all columns keep their bits, and new arrays are zero. Reductions
            are made regardless.
        backend: where to run.
        shardings: the sharding of each leaf, where tracing cannot know it: on a mesh
            with Auto axes.
    """
    scalars = dict(scalars or {}) if skip is None else {"skip": skip, **(scalars or {})}
    tags = [None] * len(leaves) if tags is None else list(tags)
    per_leaf = dict(per_leaf or {})
    arrays = [x for leaf in leaves for x in leaf.values()]
    where = resolve(backend, arrays)
    placement = placement_of(leaves, shardings)
    if where != "xla" and not placement.is_known:
        placement.require_known(backend)
        where = "xla"
    if not leaves:
        shape = () if job.totals else (0,)
        return Results([], dict.fromkeys(job.reductions, jnp.zeros(shape, jnp.float32)))
    names = (*scalars, *per_leaf)
    numbers = [pack(scalars)]
    if per_leaf:
        numbers.append(jax.lax.optimization_barrier(jnp.stack([*per_leaf.values()], 1)))
    in_kernels = where != "xla"
    local = functools.partial(
        _run_local, job, where, names, tags, in_kernels or placement.is_one_device
    )
    if in_kernels and placement.mesh is not None:
        done, reduced = on_each_device(
            local, job.reductions, placement, leaves, *numbers
        )
    else:
        done, reduced = local(range(len(leaves)), leaves, *numbers)
    return Results([done[k] for k in range(len(leaves))], reduced)


def _run_local(
    job: Job,
    where: str,
    names: Sequence[str],
    tags: Sequence[Any],
    may_flatten: bool,
    members: Sequence[int],
    leaves: Sequence[Leaf],
    packed: Float[Array, " s"],
    table: Float[Array, "n p"] | None = None,
) -> tuple[dict[int, Blocks], dict[str, Array]]:
    """Runs the leaves `members` on one device, or what of them each device holds.

    Returns:
        By leaf, its results; by name, the reductions over these members: one value, or
        a vector over all leaves that is zero for others.
    """
    done: dict[int, Blocks] = {k: {} for k in members}
    parts: dict[str, list[Array]] = {name: [] for name in job.reductions}

    def reduce(ks: Sequence[int], values: Mapping[str, Float[Array, " k"]]) -> None:
        for name, x in values.items():
            if job.totals:
                x = x.sum() if job.reductions[name] == "sum" else x.max()
            else:
                x = jnp.zeros(len(leaves), x.dtype).at[jnp.array(ks)].set(x)
            parts[name].append(x)

    for ks in _by_kind(members, leaves, tags):
        work = _work(job, names, leaves[ks[0]], tags[ks[0]])
        in_kernels = [k for k in ks if where != "xla" and _launch.fits(leaves[k])]
        sizes = [size_of(leaves[k]) for k in in_kernels]
        for chunk in _launch.chunks(sizes, len(leaves[ks[0]])):
            batch = [in_kernels[c] for c in chunk]
            rows = None if table is None else table[jnp.array(batch)]
            columns = [dict(leaves[k]) for k in batch]
            results, values = launch(work, where == "interpret", columns, packed, rows)
            done |= dict(zip(batch, results, strict=True))
            reduce(batch, values)

        rest = [k for k in ks if k not in set(in_kernels)]
        if job.totals and may_flatten and not (work.written or work.fresh):
            numbers = dict(zip(names, packed, strict=True))
            for group in side_by_side(leaves, rest):
                values = reduce_group(job, tags[ks[0]], group, numbers)
                for name, x in values.items():
                    parts[name].append(x)
            continue
        order, values = [], {name: [] for name in job.reductions}
        for group, shared in together(leaves, rest, packed):
            for k in group:
                row = () if table is None else table[k]
                numbers = dict(zip(names, [*shared, *row], strict=True))
                done[k], reduced = run_leaf(job, leaves[k], tags[k], numbers)
                order.append(k)
                for name, x in reduced.items():
                    values[name].append(x)
        if order:
            reduce(order, {name: jnp.stack(xs) for name, xs in values.items()})
    return done, {name: combine(xs, job.reductions[name]) for name, xs in parts.items()}


def _by_kind(
    members: Sequence[int], leaves: Sequence[Leaf], tags: Sequence[Any]
) -> list[list[int]]:
    """Leaves with the same columns, dtypes and tag: those that one kernel can take."""
    kinds: dict[Any, list[int]] = {}
    for k in members:
        columns = tuple((name, x.dtype) for name, x in leaves[k].items())
        kinds.setdefault((tags[k], columns), []).append(k)
    return list(kinds.values())


def _work(job: Job, names: Sequence[str], leaf: Leaf, tag: Any) -> Work:
    """The job on leaves of one kind."""
    formula = bind(_by_position, job.formula, tuple(names), tag)
    numbers = [jax.ShapeDtypeStruct((), jnp.float32) for _ in names]
    blocks = {
        c: jax.ShapeDtypeStruct((_launch.WARPGROUP,), widened_dtype(x.dtype))
        for c, x in leaf.items()
        if c not in job.unread
    }
    results = jax.eval_shape(formula, numbers, blocks)
    stored = {c: x.dtype for c, x in results.items() if c not in job.reductions}
    return Work(
        formula=formula,
        derive=bind(_derived, job, tuple((c, x.dtype) for c, x in leaf.items())),
        reductions=job.reductions,
        fresh={c: dtype for c, dtype in stored.items() if c not in leaf},
        written=tuple(c for c in leaf if c in stored or c in job.unread),
        unread=tuple(c for c in leaf if c in job.unread),
        has_skip="skip" in names,
    )


def _by_position(
    formula: Any, names: Sequence[str], tag: Any, numbers: Sequence[Any], blocks: Blocks
) -> Blocks:
    return formula(dict(zip(names, numbers, strict=True)), tag, blocks)


def _derived(job: Job, dtypes: Sequence[tuple[str, Any]], results: Blocks) -> Blocks:
    return job.derived(dict(dtypes), results)
