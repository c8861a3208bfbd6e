"""Runs one formula over many leaves: in Mosaic GPU kernels where they fit, else in XLA.

A formula is a plain function of float32 blocks. A result that is named as a column
replaces it, one named in `reductions` is reduced over its leaf, and any other is a new
array.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, ArrayLike, Bool, Float

from pallas_kernels._backend import BackendError, resolve
from pallas_kernels._placement import Placement, Sharding, placement_of
from pallas_kernels._xla import (
    Blocks,
    Job,
    Leaf,
    run_in_xla,
)


class Options(NamedTuple):
    """What all operations take.

    Attributes:
        unscale: what gradients are multiplied by, shape (), float32; None for 1.
        skip: if true, nothing changes, shape (), bool; None for never.
        only_updates: whether to return what to add to the weights, in float32, and
            leave the weights.
        backend: where to run, one of `BACKENDS`.
        shardings: per leaf a NamedSharding, where tracing cannot know it: on a mesh of
            Auto axes.
    """

    unscale: Float[Array, ""] | None = None
    skip: Bool[Array, ""] | None = None
    only_updates: bool = False
    backend: str = "auto"
    shardings: Sequence[Sharding] | None = None


DEFAULTS = Options()


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
    options: Options = DEFAULTS,
    *,
    scalars: Mapping[str, ArrayLike] | None = None,
    per_leaf: Mapping[str, ArrayLike] | None = None,
    tags: Sequence[Any] | None = None,
) -> Results:
    """Runs `job` over leaves, each a dict of arrays of one shape.

    Args:
        job: what to do.
        leaves: what to work on; leaves may have different columns and dtypes.
        options: how to run. With `skip` all columns keep their bits, and new arrays are
            zero; reductions are made regardless. `unscale` is a number for the formula.
        scalars: further numbers by name, as float32.
        per_leaf: further numbers, one per leaf.
        tags: per leaf, something static for the formula.
    """
    given = {"skip": options.skip, "unscale": options.unscale, **(scalars or {})}
    scalars = {name: x for name, x in given.items() if x is not None}
    where = resolve(options.backend, [x for leaf in leaves for x in leaf.values()])
    if not leaves:
        shape = () if job.totals else (0,)
        return Results([], dict.fromkeys(job.reductions, jnp.zeros(shape, jnp.float32)))
    tags = [None] * len(leaves) if tags is None else tags
    names = (*scalars, *(per_leaf or ()))
    numbers = [jnp.array([*scalars.values()], jnp.float32)]
    if per_leaf:
        numbers.append(jax.lax.optimization_barrier(jnp.stack([*per_leaf.values()], 1)))
    if where != "xla" and (placement := _placement_for_kernels(leaves, options)):
        from pallas_kernels import mosaic  # takes a third of a second to load

        interpret = where == "interpret"
        part = mosaic.run_in_mosaic(
            job, names, tags, interpret, placement, leaves, *numbers
        )
    else:
        whole = job.totals and placement_of(leaves, options.shardings).is_one_device
        every = range(len(leaves))
        part = run_in_xla(job, names, tags, whole, every, leaves, *numbers)
    return Results(list(part.leaves.values()), part.reductions)


def _placement_for_kernels(
    leaves: Sequence[Leaf], options: Options
) -> Placement | None:
    """Where leaves are; None where kernels cannot run, and XLA shall.

    Raises:
        BackendError: kernels cannot run, and nothing else was asked for.
    """
    placement = placement_of(leaves, options.shardings)
    if not placement.unknown:
        return placement
    if options.backend != "auto":
        raise BackendError(
            f"backend={options.backend!r} cannot run: {placement.unknown}"
        )
    return None
