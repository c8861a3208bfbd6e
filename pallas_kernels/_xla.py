"""Jobs, and their run in XLA: leaf by leaf, or reduced over several leaves at once."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt32

from pallas_kernels._rounding import Noise, numbers_like, strides_of

type Blocks = dict[str, Array]
type Leaf = Mapping[str, Array]
type Numbers = Mapping[str, Array]
# The written columns and new arrays of each leaf, by its number; and reductions by
# name, with one value per leaf, or one for all if the job has `totals`.
type Results = tuple[dict[int, Blocks], dict[str, Array]]
type Formula = Callable[[Numbers, Any, Blocks], Blocks]

# Concatenated small leaves reduce in one kernel. XLA fuses a concatenation of up to 96
# operands.
SMALL = 2**14
_PER_BUCKET = 75
_PER_SUM = 8  # large leaves of one shape

JOIN = {"sum": jnp.add, "max": jnp.maximum}


def widen(x: Array) -> Array:
    """Casts floats of less than 32 bits to float32; other arrays stay."""
    dtype: Any = getattr(x, "dtype", None)
    if dtype is None or dtype.itemsize >= 4 or not jnp.issubdtype(dtype, jnp.floating):
        return x
    return x.astype(jnp.float32)


def saturate(x: Array, dtype: DTypeLike) -> Array:
    """Clamps `x` to the finite range of a half dtype, and keeps NaN."""
    if jnp.dtype(dtype).itemsize > 2:
        return x
    limit = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -limit, limit)


# Stops XLA on a CPU from computing arrays again in each fusion that reads them. Two
# fusions can round differently, one with a fused multiply-add and one without, so the
# halves of a split would not match. A GPU has one fusion, and a barrier would split it.
computed_once = functools.partial(
    jax.lax.platform_dependent,
    cpu=jax.lax.optimization_barrier,
    default=lambda x: x,
)


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """A formula, and the form of its results. JAX compiles each object once.

    Attributes:
        formula: `(numbers, tag, columns) -> results`, in float32.
        copies: columns that the job writes and does not read, each with the column from
            which it is rounded. A leaf without that column has no copies.
        reductions: results to reduce over each leaf with "sum", or with "max" if they
            are not negative.
        totals: whether to reduce over all leaves, and return nothing else.
        stored: `(tag, results, noise) -> results`, which converts results before they
            are written, such as to two halves. `noise` is for stochastic rounding.
    """

    formula: Formula
    copies: Mapping[str, str] = dataclasses.field(default_factory=dict)
    reductions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    totals: bool = False
    stored: Callable[[Any, Blocks, Noise | None], Blocks] | None = None

    def read(self, leaf: Leaf) -> Blocks:
        """Returns the columns that the formula reads, with half columns in float32."""
        return {c: widen(x) for c, x in leaf.items() if self.copies.get(c) not in leaf}

    def copied(self, leaf: Leaf, results: Blocks) -> Blocks:
        """Returns the copies of a leaf, rounded from float32 results."""
        return {
            c: saturate(results[source], leaf[c].dtype).astype(leaf[c].dtype)
            for c, source in self.copies.items()
            if c in leaf and source in leaf
        }


def combined(job: Job, parts: Sequence[Results]) -> Results:
    """Joins parts, with leaves in order."""
    leaves = {k: blocks for part, _ in parts for k, blocks in part.items()}
    reductions = {}
    for name, how in job.reductions.items():
        values = [part[name] for _, part in parts]
        if job.totals:
            reductions[name] = functools.reduce(JOIN[how], values)
        else:
            reductions[name] = jnp.concatenate(values)[np.argsort(list(leaves))]
    return {k: leaves[k] for k in sorted(leaves)}, reductions


def size_of(leaf: Leaf) -> int:
    """Returns the number of elements in each column of a leaf."""
    return next(iter(leaf.values())).size


def kinds(
    members: Sequence[int], leaves: Sequence[Leaf], tags: Sequence[Any]
) -> list[list[int]]:
    """Groups leaves that one kernel can process: same columns, dtypes and tag."""
    found: dict[Any, list[int]] = {}
    for k in members:
        columns = tuple([(name, x.dtype) for name, x in leaves[k].items()])
        found.setdefault((tags[k], columns), []).append(k)
    return list(found.values())


def run_in_xla(
    job: Job,
    names: Sequence[str],
    tags: Sequence[Any],
    flattens: bool,
    members: Sequence[int],
    leaves: Sequence[Leaf],
    packed: Float[Array, " s"],
    table: Float[Array, "n p"] | None,
    keys: UInt32[Array, " n"] | None,
    strides: Sequence[tuple[int, ...]] | None = None,
) -> Results:
    """Runs the leaves `members`, in order.

    Each leaf has its own kernel. A kernel for several small leaves would wait for the
    last of their gradients, and XLA would keep the operands of the others until then.

    `names` are the names of the numbers in `packed`, which all leaves share, and then
    of a row of `table`. `flattens` lets totals concatenate leaves. `keys` are for
    stochastic rounding. `strides` say which part of a whole array a leaf is.
    """
    dtype = packed.dtype
    if job.totals:
        groups = kinds(members, leaves, tags)
        numbers = dict(zip(names, packed, strict=True))
        totals = [
            reduce_group(job, tags[ks[0]], batch, numbers)
            for ks in groups
            for batch in _groups_to_reduce(ks, leaves, flattens)
        ]
        whole = {
            name: functools.reduce(JOIN[how], [x[name].astype(dtype) for x in totals])
            for name, how in job.reductions.items()
        }
        return dict.fromkeys(members, {}), whole
    done, shared = {}, list(packed)
    for k in members:
        row = () if table is None else table[k]
        numbers = dict(zip(names, [*shared, *row], strict=True))
        key = None if keys is None else keys[k]
        whole = None if strides is None else strides[k]
        done[k] = run_leaf(job, leaves[k], tags[k], whole, numbers, key)
    reduced = {
        name: jnp.stack([done[k][1][name].astype(dtype) for k in members])
        for name in job.reductions
    }
    return {k: done[k][0] for k in members}, reduced


@functools.partial(jax.jit, static_argnums=(0, 2, 3))
def run_leaf(
    job: Job,
    leaf: Leaf,
    tag: Hashable,
    strides: tuple[int, ...] | None,
    numbers: Numbers,
    key: UInt32[Array, ""] | None,
) -> tuple[Blocks, dict[str, Array]]:
    """Returns a leaf's written columns and new arrays, and its reductions."""
    results = job.formula(numbers, tag, job.read(leaf))
    if job.stored is not None:
        noise = None
        if key is not None:
            x = next(iter(leaf.values()))
            whole = strides_of(x.shape) if strides is None else strides
            noise = Noise(key, numbers_like(x, whole))
        results = job.stored(tag, computed_once(results), noise)
    skip = numbers["skip"] != 0 if "skip" in numbers else None
    reduced, written = {}, {}
    for name, x in results.items():
        if name in job.reductions:
            reduced[name] = _reduce(x, job.reductions[name])
            continue
        old = leaf.get(name)
        x = x if old is None else x.astype(old.dtype)
        if skip is not None:
            x = jnp.where(skip, jnp.zeros_like(x) if old is None else old, x)
        written[name] = x
    # Copy after the select: before it, the copies would also read the old column.
    kept = {name: widen(x) for name, x in written.items()}
    return written | job.copied(leaf, kept), reduced


def _groups_to_reduce(
    members: Sequence[int], leaves: Sequence[Leaf], flattens: bool
) -> list[list[Leaf]]:
    """Groups leaves of one kind that one kernel can reduce.

    On one device, these are leaves of one shape, and concatenations of small leaves.
    """
    if not flattens:
        return [[leaves[k]] for k in members]
    large = [leaves[k] for k in members if size_of(leaves[k]) > SMALL]
    small = [leaves[k] for k in members if size_of(leaves[k]) <= SMALL]
    groups: list[list[Leaf]] = [
        [{c: jnp.concatenate([x[c].reshape(-1) for x in xs]) for c in xs[0]}]
        for xs in itertools.batched(small, _PER_BUCKET)
    ]
    shapes: dict[tuple[int, ...], list[Leaf]] = {}
    for leaf in large:
        shapes.setdefault(next(iter(leaf.values())).shape, []).append(leaf)
    for shape in sorted(shapes):
        groups += map(list, itertools.batched(shapes[shape], _PER_SUM))
    return groups


@functools.partial(jax.jit, static_argnums=(0, 1))
def reduce_group(
    job: Job, tag: Hashable, leaves: Sequence[Leaf], numbers: Numbers
) -> dict[str, Array]:
    """Reduces leaves of one shape, and joins them element by element."""
    results = [job.formula(numbers, tag, job.read(leaf)) for leaf in leaves]
    return {
        name: _reduce(functools.reduce(JOIN[how], [r[name] for r in results]), how)
        for name, how in job.reductions.items()
    }


def _reduce(x: Array, how: str) -> Array:
    if how == "sum":
        return jnp.sum(x)
    # XLA's maximum on a CPU loses NaN. The sum of |x| is NaN only if an x is NaN.
    return jnp.where(jnp.isnan(jnp.sum(x)), jnp.nan, jnp.max(x, initial=0))
