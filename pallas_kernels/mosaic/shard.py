"""Runs kernels on whole leaves, or on the shards of each device of a mesh.

A kernel is opaque to XLA's partitioner, which would gather all arrays on every device.
So it runs under `shard_map`, with the specs of the arrays.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, UInt32

from pallas_kernels._rounding import strides_of
from pallas_kernels._xla import Job, Leaf, Results, combined, kinds, run_in_xla, size_of
from pallas_kernels.mosaic.launch import Work, chunks, fits, launch

_ACROSS = {"sum": jax.lax.psum, "max": jax.lax.pmax}


def run_in_mosaic(
    job: Job,
    names: tuple[str, ...],
    tags: Sequence[Any],
    interpret: bool,
    mesh: Mesh | AbstractMesh | None,
    specs: Sequence[PartitionSpec],
    leaves: Sequence[Leaf],
    *numbers: Array | None,
) -> Results:
    """Runs a job in few launches, and in XLA for leaves that no kernel fits.

    See `launch.Work` and `run_in_xla` for the arguments.
    """

    strides = [strides_of(next(iter(leaf.values())).shape) for leaf in leaves]

    def on_one_device(members, leaves, packed, table, keys):
        # Kernels compute in float32. XLA steps float64 leaves.
        rows = None if table is None else table.astype(jnp.float32)
        fitting = [k for k in members if fits(leaves[k])]
        parts = []
        for kind in kinds(fitting, leaves, tags):
            work = Work(job, names, tags[kind[0]], interpret)
            sizes = [size_of(leaves[k]) for k in kind]
            for chunk in chunks(sizes, len(leaves[kind[0]])):
                ks = [kind[c] for c in chunk]
                per_leaf = [x if x is None else x[jnp.array(ks)] for x in (rows, keys)]
                given, of = [dict(leaves[k]) for k in ks], tuple(strides[k] for k in ks)
                scalars = packed.astype(jnp.float32)
                blocks, values = launch(work, of, given, scalars, *per_leaf)
                values = {name: x.astype(packed.dtype) for name, x in values.items()}
                parts.append((dict(zip(ks, blocks, strict=True)), values))
        if rest := [k for k in members if k not in set(fitting)]:
            how = job, names, tags, True, rest, leaves
            parts.append(run_in_xla(*how, packed, table, keys, strides))
        return combined(job, parts)

    if mesh is None:
        return on_one_device(range(len(leaves)), leaves, *numbers)
    where = mesh, specs, strides
    return _on_each_device(on_one_device, job, *where, leaves, *numbers)


def _on_each_device(
    local: Callable[..., Results],
    job: Job,
    mesh: Mesh | AbstractMesh,
    specs: Sequence[PartitionSpec],
    strides: Sequence[tuple[int, ...]],
    leaves: Sequence[Leaf],
    *numbers: Array | None,
) -> Results:
    """Runs `local(members, leaves, *numbers)` under `shard_map`.

    It reduces over the axes that split a leaf, and sends no other data.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for k, spec in enumerate(specs):
        groups.setdefault(_axes(spec), []).append(k)

    def body(leaves, packed, table, keys):
        if keys is not None:
            keys += jnp.stack([*map(_first_number, leaves, strides, specs)])
        parts = []
        for axes, members in groups.items():
            done, values = local(members, leaves, packed, table, keys)
            if axes:
                values = {
                    name: _ACROSS[job.reductions[name]](x, axes)
                    for name, x in values.items()
                }
            parts.append((done, values))
        return combined(job, parts)

    replicated: Any = PartitionSpec()
    leaf_specs: Any = dict(enumerate(specs))
    leaves = [
        {c: _resharded(x, spec, mesh) for c, x in leaf.items()}
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    # JAX cannot check how refs vary. Every reduction is completed here.
    return jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(list(specs), *[replicated] * len(numbers)),
        out_specs=(leaf_specs, replicated),
        check_vma=False,
    )(leaves, *numbers)


def _first_number(
    leaf: Leaf, strides: Sequence[int], spec: PartitionSpec
) -> UInt32[Array, ""]:
    """Returns the index in the whole leaf of the first element on a device."""
    number = jnp.uint32(0)
    shape = next(iter(leaf.values())).shape
    for size, stride, axes in zip(shape, strides, spec, strict=False):
        if axes is not None:
            place = jax.lax.axis_index(axes).astype(jnp.uint32)
            number += place * np.uint32(size * stride % 2**32)
    return number


def _resharded(x: Array, spec: PartitionSpec, mesh: Mesh | AbstractMesh) -> Array:
    """Reshards `x`, because a gradient may have another sharding than its weight."""
    if AxisType.Explicit in mesh.axis_types and jax.typeof(x).sharding.spec != spec:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return x


def _axes(spec: PartitionSpec) -> tuple[str, ...]:
    """Returns the mesh axes that a spec names."""
    names = [n if isinstance(n, tuple) else (n,) for n in spec if n is not None]
    return tuple(sorted(itertools.chain.from_iterable(names)))
