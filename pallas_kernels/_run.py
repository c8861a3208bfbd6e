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
    numbers = [pack(scalars)]
    if per_leaf:
        numbers.append(jax.lax.optimization_barrier(jnp.stack([*per_leaf.values()], 1)))
    in_kernels = where != "xla"
    local = functools.partial(
        _run_local,
        job,
        where,
        (*scalars, *per_leaf),
        tags,
        in_kernels or placement.is_one_device,
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
    found = _Found(job, len(leaves), {k: {} for k in members})
    for ks in _by_kind(members, leaves, tags):
        work = _work(job, names, leaves[ks[0]], tags[ks[0]])
        fitting = [k for k in ks if where != "xla" and _launch.fits(leaves[k])]
        rest = [k for k in ks if k not in set(fitting)]
        _run_kernels(found, work, where == "interpret", fitting, leaves, packed, table)
        if job.totals and may_flatten and not (work.written or work.fresh):
            numbers = dict(zip(names, packed, strict=True))
            for group in side_by_side(leaves, rest):
                found.add_parts(reduce_group(job, tags[ks[0]], group, numbers))
        else:
            _run_leaves(found, names, tags, rest, leaves, packed, table)
    return found.done, found.reductions()


class _Found:
    """Results of leaves, and reductions over some of them, as they come in."""

    def __init__(self, job: Job, n: int, done: dict[int, Blocks]) -> None:
        self.job, self.n, self.done = job, n, done
        self.parts: dict[str, list[Array]] = {name: [] for name in job.reductions}

    def add(
        self, ks: Sequence[int], blocks: Sequence[Blocks], values: Mapping[str, Array]
    ) -> None:
        """Adds the leaves `ks`, and their reductions, one value per leaf."""
        self.done |= dict(zip(ks, blocks, strict=True))
        for name, x in values.items():
            if self.job.totals:
                x = x.sum() if self.job.reductions[name] == "sum" else x.max()
            else:
                x = jnp.zeros(self.n, x.dtype).at[jnp.array(ks)].set(x)
            self.parts[name].append(x)

    def add_parts(self, values: Mapping[str, Array]) -> None:
        """Adds reductions over several leaves, of a job that wants totals."""
        for name, x in values.items():
            self.parts[name].append(x)

    def reductions(self) -> dict[str, Array]:
        """Those over all leaves that were added."""
        how = self.job.reductions
        return {name: combine(xs, how[name]) for name, xs in self.parts.items()}


def _run_kernels(
    found: _Found,
    work: Work,
    interpret: bool,
    members: Sequence[int],
    leaves: Sequence[Leaf],
    packed: Array,
    table: Array | None,
) -> None:
    """Runs leaves of one kind in as few launches as can be."""
    if not members:
        return
    sizes = [size_of(leaves[k]) for k in members]
    for chunk in _launch.chunks(sizes, len(leaves[members[0]])):
        ks = [members[c] for c in chunk]
        rows = None if table is None else table[jnp.array(ks)]
        columns = [dict(leaves[k]) for k in ks]
        found.add(ks, *launch(work, interpret, columns, packed, rows))


def _run_leaves(
    found: _Found,
    names: Sequence[str],
    tags: Sequence[Any],
    members: Sequence[int],
    leaves: Sequence[Leaf],
    packed: Array,
    table: Array | None,
) -> None:
    """Runs leaves of one kind in XLA, which merges what it can."""
    order, blocks, values = [], [], {name: [] for name in found.job.reductions}
    for group, shared in together(leaves, members, packed):
        for k in group:
            row = () if table is None else table[k]
            numbers = dict(zip(names, [*shared, *row], strict=True))
            results, reduced = run_leaf(found.job, leaves[k], tags[k], numbers)
            order.append(k)
            blocks.append(results)
            for name, x in reduced.items():
                values[name].append(x)
    if order:
        found.add(order, blocks, {name: jnp.stack(xs) for name, xs in values.items()})


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
    formula = bind(_by_position, job, tuple(names), tag)
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
    job: Job, names: Sequence[str], tag: Any, numbers: Sequence[Any], blocks: Blocks
) -> Blocks:
    results = job.formula(dict(zip(names, numbers, strict=True)), tag, blocks)
    return job.store(tag, results)


def _derived(job: Job, dtypes: Sequence[tuple[str, Any]], results: Blocks) -> Blocks:
    return job.derived(dict(dtypes), results)
