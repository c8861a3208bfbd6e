"""The same formulas as plain JAX: on one leaf, or on small leaves side by side."""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from pallas_kernels._dtypes import widen
from pallas_kernels._once import computed_once

type Blocks = dict[str, Array]
type Leaf = Mapping[str, Array]
type Formula = Callable[[Mapping[str, Any], Any, Blocks], Blocks]

# Concatenated, small leaves reduce in one kernel, and XLA fuses the concatenation, up
# to 96 operands.
SMALL = 2**14
_PER_BUCKET = 75
_PER_SUM = 8  # large leaves of one shape
_PER_KERNEL = 11  # of four arrays read and four written, in 96 operands

JOIN = {"sum": jnp.add, "max": jnp.maximum}


@dataclasses.dataclass(frozen=True)
class Bound:
    """A function and its first arguments; equal, unlike a partial, if these are.

    What is equal is traced and compiled once.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __call__(self, *rest: Any) -> Any:
        return self.function(*self.args, *rest)


def bind(function: Callable[..., Any], *args: Any) -> Bound:
    """`functools.partial` of hashable arguments, by value."""
    return Bound(function, args)


class Job(NamedTuple):
    """What to run, but for the arrays and the numbers.

    Attributes:
        formula: `(numbers, tag, columns) -> results`, in float32.
        unread: columns that are written and never read, each as a function of the
            results, and the dtype that it is rounded to.
        reductions: results to reduce over each leaf: "sum", or "max" of what is not
            negative.
        totals: whether to reduce over all leaves.
        stored: `(tag, results) -> results`: how results are stored, such as in two
            halves, that must be of one value.
    """

    formula: Formula
    unread: Mapping[str, Callable[[Blocks, Any], Array]] = {}
    reductions: Mapping[str, str] = {}
    totals: bool = False
    stored: Callable[[Any, Blocks], Blocks] | None = None

    def __hash__(self) -> int:
        parts = (self.unread.items(), self.reductions.items())
        return hash((self.formula, *map(tuple, parts), self.totals, self.stored))

    def results(self, leaf: Leaf, tag: Any, numbers: Mapping[str, Any]) -> Blocks:
        """What the formula gives on the columns that it reads."""
        read = {c: widen(x) for c, x in leaf.items() if c not in self.unread}
        return self.formula(numbers, tag, read)

    def store(self, tag: Any, results: Blocks) -> Blocks:
        """The results as they are stored."""
        return results if self.stored is None else self.stored(tag, results)

    def derived(self, dtypes: Mapping[str, Any], results: Blocks) -> Blocks:
        """The columns that depend on the results, of those that a leaf has.

        Args:
            dtypes: of the leaf's columns.
            results: those that were written.
        """
        return {
            c: derive(results, dtypes[c]).astype(dtypes[c])
            for c, derive in self.unread.items()
            if c in dtypes
        }


def pack(numbers: Mapping[str, ArrayLike]) -> Float[Array, " s"]:
    """The numbers in one vector."""
    values = [jnp.asarray(x, jnp.float32) for x in numbers.values()]
    return jnp.stack(values) if values else jnp.zeros(0, jnp.float32)


def together(
    leaves: Sequence[Leaf], members: Sequence[int], packed: Float[Array, " s"]
) -> Iterator[tuple[list[int], list[Array]]]:
    """Groups leaves that XLA shall update in one kernel, each with the numbers.

    XLA merges fusions of equal size that share an operand which is no scalar, as many
    as fit. So small leaves read their numbers from one vector per group: behind a
    barrier, or XLA would see through it. A leaf on its own reads scalars, which a CPU
    keeps in registers; large ones gain nothing from company, and eleven in one kernel
    would take all registers of a GPU.
    """
    groups = []
    size = lambda k: size_of(leaves[k])  # noqa: E731
    small = sorted((k for k in members if size(k) <= SMALL), key=size)
    for _, run in itertools.groupby(small, key=size):
        groups += [list(ks) for ks in itertools.batched(run, _PER_KERNEL)]
    padded = jnp.pad(packed, (0, max(0, 2 - packed.size)))
    vectors = jax.lax.optimization_barrier([padded] * len(groups))
    for group, vector in zip(groups, vectors, strict=True):
        numbers = padded if len(group) == 1 else vector
        yield group, [numbers[j] for j in range(packed.size)]
    scalars = list(packed)
    yield from (([k], scalars) for k in members if size(k) > SMALL)


@functools.partial(jax.jit, static_argnums=(0, 2))
def run_leaf(
    job: Job, leaf: Leaf, tag: Any, numbers: Mapping[str, Any]
) -> tuple[Blocks, dict[str, Array]]:
    """Runs `job` on one leaf.

    Returns:
        Its written columns and new arrays; its reductions.
    """
    results = job.results(leaf, tag, numbers)
    if job.stored is not None:
        results = job.store(tag, computed_once(results))
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
    # Of what was selected: the other way round it would read the old column too.
    kept = {name: widen(x) for name, x in written.items()}
    dtypes = {c: x.dtype for c, x in leaf.items()}
    return written | job.derived(dtypes, kept), reduced


def side_by_side(leaves: Sequence[Leaf], members: Sequence[int]) -> list[list[Leaf]]:
    """Leaves of one kind in groups that one kernel can reduce.

    For reductions over all leaves, which need not know what is whose, on one device:
    leaves of one shape together, and small ones of any shape concatenated.
    """
    large = [k for k in members if size_of(leaves[k]) > SMALL]
    small = [k for k in members if size_of(leaves[k]) <= SMALL]
    names = list(leaves[members[0]]) if members else []
    groups: list[list[Leaf]] = [
        [{c: jnp.concatenate([leaves[k][c].reshape(-1) for k in ks]) for c in names}]
        for ks in itertools.batched(small, _PER_BUCKET)
    ]
    shape_of = lambda k: leaves[k][names[0]].shape  # noqa: E731
    for _, run in itertools.groupby(sorted(large, key=shape_of), key=shape_of):
        groups += [[leaves[k] for k in ks] for ks in itertools.batched(run, _PER_SUM)]
    return groups


@functools.partial(jax.jit, static_argnums=(0, 1))
def reduce_group(
    job: Job, tag: Any, leaves: Sequence[Leaf], numbers: Mapping[str, Any]
) -> dict[str, Array]:
    """The reductions over leaves of one shape, which are joined element by element."""
    results = [job.results(leaf, tag, numbers) for leaf in leaves]
    return {
        name: _reduce(functools.reduce(JOIN[how], [r[name] for r in results]), how)
        for name, how in job.reductions.items()
    }


def size_of(leaf: Leaf) -> int:
    """Elements of each of its columns."""
    return next(iter(leaf.values())).size


def _reduce(x: Array, how: str) -> Array:
    return jnp.sum(x) if how == "sum" else jnp.max(x, initial=0)
