"""Leaves in kernels, on one device or on what each device of a mesh holds.

A kernel is opaque to the partitioner, which would gather all arrays on every device
first. So it runs under `shard_map`, with the specs that the arrays have.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from pallas_kernels._placement import Placement
from pallas_kernels._xla import Job, Leaf, PartialResults, join, run_in_xla
from pallas_kernels.mosaic.launch import fits, launch_all


def run_in_mosaic(
    job: Job,
    names: tuple[str, ...],
    tags: Sequence[Any],
    interpret: bool,
    placement: Placement,
    leaves: Sequence[Leaf],
    *numbers: Array,
) -> PartialResults:
    """Runs a job in kernels, and in XLA on leaves that no kernel fits.

    For the arguments see `launch.Work` and `run_in_xla`.
    """

    def on_one_device(members, leaves, *numbers):
        rest = [k for k in members if not fits(leaves[k])]
        fitting = [k for k in members if k not in set(rest)]
        parts = launch_all(job, names, tags, interpret, fitting, leaves, *numbers)
        if rest:
            parts.append(run_in_xla(job, names, tags, True, rest, leaves, *numbers))
        return join(job, parts)

    if placement.mesh is None:
        return on_one_device(range(len(leaves)), leaves, *numbers)
    mesh, specs = placement.mesh, placement.specs
    return _on_each_device(on_one_device, job, mesh, specs, leaves, *numbers)


def _on_each_device(
    local: Callable[..., PartialResults],
    job: Job,
    mesh: Mesh | AbstractMesh,
    specs: Sequence[PartitionSpec],
    leaves: Sequence[Leaf],
    *numbers: Array,
) -> PartialResults:
    """Runs `local(members, leaves, *numbers)` under `shard_map`.

    Reductions are completed over the axes that split a leaf; nothing else is sent.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for k, spec in enumerate(specs):
        groups.setdefault(_axes(spec), []).append(k)

    def body(leaves, *numbers):
        parts = []
        for axes, members in groups.items():
            done, values = local(members, leaves, *numbers)
            values = {
                name: _complete(x, job.reductions[name], axes)
                for name, x in values.items()
            }
            parts.append(PartialResults(done, values))
        return join(job, parts)

    replicated: Any = PartitionSpec()
    leaf_specs: Any = dict(enumerate(specs))
    leaves = [
        {c: _resharded(x, spec, mesh) for c, x in leaf.items()}
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    # Refs cannot be checked for how they vary; every reduction is completed by hand.
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(list(specs), *[replicated] * len(numbers)),
        out_specs=PartialResults(leaf_specs, replicated),
        check_vma=False,
    )(leaves, *numbers)


def _complete(x: Array, how: str, axes: tuple[str, ...]) -> Array:
    if not axes:
        return x
    return jax.lax.psum(x, axes) if how == "sum" else jax.lax.pmax(x, axes)


def _resharded(x: Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> Array:
    """`x` as `spec` says: a gradient may be sharded otherwise than its weight."""
    if AxisType.Explicit in mesh.axis_types and jax.typeof(x).sharding.spec != spec:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return x


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    """The mesh axes that a spec names."""
    names = [n if isinstance(n, tuple) else (n,) for n in spec if n is not None]
    return tuple(sorted(itertools.chain.from_iterable(names)))
