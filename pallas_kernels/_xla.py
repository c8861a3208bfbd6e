"""The same formulas as plain JAX: on one leaf, or on small leaves side by side."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Float

from pallas_kernels._dtypes import widen

type Blocks = dict[str, Array]
type Leaf = Mapping[str, Array]
type Formula = Callable[[Mapping[str, Any], Any, Blocks], Blocks]

# Concatenated, small leaves reduce in one kernel, and XLA fuses the concatenation, up
# to 96 operands.
SMALL = 2**14
_PER_BUCKET = 75
_PER_KERNEL = 11  # of four arrays read and four written, in 96 operands


class Job(NamedTuple):
    """What to run, but for the arrays and the numbers.

    Attributes:
        formula: `(numbers, tag, columns) -> results`, in float32.
        unread: columns that are written and never read, each as a function of the
            results, and the dtype that it is rounded to.
        reductions: results to reduce over each leaf: "sum", or "max" of what is not
            negative.
        totals: whether to reduce over all leaves.
    """

    formula: Formula
    unread: Mapping[str, Callable[[Blocks, Any], Array]] = {}
    reductions: Mapping[str, str] = {}
    totals: bool = False

    def results(self, leaf: Leaf, tag: Any, numbers: Mapping[str, Any]) -> Blocks:
        """What the formula gives on the columns that it reads."""
        read = {c: widen(x) for c, x in leaf.items() if c not in self.unread}
        return self.formula(numbers, tag, read)

    def derived(self, leaf: Leaf, results: Blocks) -> Blocks:
        """The columns that depend on the results, of those that the leaf has."""
        return {
            c: derive(results, leaf[c].dtype)
            for c, derive in self.unread.items()
            if c in leaf
        }


def pack(numbers: Mapping[str, ArrayLike]) -> Float[Array, " s"]:
    """The numbers in one vector."""
    values = [jnp.asarray(x, jnp.float32) for x in numbers.values()]
    return jnp.stack(values) if values else jnp.zeros(0)


def together(
    leaves: Sequence[Leaf], batch: Sequence[int | Leaf], packed: Float[Array, " s"]
) -> Iterator[tuple[list[Any], list[Array]]]:
    """Groups leaves that XLA shall update in one kernel, each with the numbers.

    XLA merges fusions of equal size that share an operand which is no scalar, as many
    as fit. So small leaves read their numbers from one vector per group: behind a
    barrier, or XLA would see that all are one. Large leaves gain nothing from it, and
    eleven in one kernel would take all registers.
    """
    sized = [(size_of(leaves[k] if isinstance(k, int) else k), k) for k in batch]
    groups: list[list[Any]] = [[k] for n, k in sized if n > SMALL]
    small = sorted(
        (pair for pair in sized if pair[0] <= SMALL), key=lambda pair: pair[0]
    )
    for _, run in itertools.groupby(small, key=lambda pair: pair[0]):
        members = [k for _, k in run]
        groups += [list(g) for g in itertools.batched(members, _PER_KERNEL)]
    padded = jnp.pad(packed, (0, max(0, 2 - packed.size)))
    vectors = jax.lax.optimization_barrier([padded] * len(groups))
    for group, vector in zip(groups, vectors, strict=True):
        yield group, [vector[j] for j in range(packed.size)]


def run_leaf(
    job: Job, leaf: Leaf, tag: Any, numbers: Mapping[str, Any]
) -> tuple[Blocks, dict[str, Array]]:
    """Runs `job` on one leaf.

    Returns:
        Its written columns and new arrays; its reductions.
    """
    results = job.results(leaf, tag, numbers)
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
    derived = job.derived(leaf, kept)
    return written | {c: x.astype(leaf[c].dtype) for c, x in derived.items()}, reduced


def bucketed(leaves: Sequence[Leaf], members: Sequence[int]) -> Sequence[int | Leaf]:
    """Leaves of one kind, by number; the small ones concatenated, in a few new leaves.

    For reductions over all leaves, which need not know what is whose.
    """
    large = [k for k in members if size_of(leaves[k]) > SMALL]
    small = [k for k in members if size_of(leaves[k]) <= SMALL]
    return large + [
        {
            c: jnp.concatenate([leaves[k][c].reshape(-1) for k in batch])
            for c in leaves[batch[0]]
        }
        for batch in itertools.batched(small, _PER_BUCKET)
    ]


def size_of(leaf: Leaf) -> int:
    """Elements of each of its columns."""
    return next(iter(leaf.values())).size


def _reduce(x: Array, how: str) -> Array:
    return jnp.sum(x) if how == "sum" else jnp.max(x, initial=0)
