"""Where arrays are on a mesh, and a kernel run on what each device holds.

A kernel is opaque to the partitioner, which would gather all arrays on every device
first. So it runs under `shard_map`, with the specs that the arrays have: known while
tracing on a mesh of Explicit axes, and to be told on one of Auto axes.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from pallas_kernels._compat import varying_axes
from pallas_kernels._xla import Job, Leaf, PartialResults, join


class Placement(NamedTuple):
    """Where the leaves of one call are.

    Attributes:
        mesh: the mesh to spread over; None if a kernel may run on the arrays as they
            are: on one device, or inside of a `shard_map`.
        specs: per leaf, how it is sharded.
        unknown: why a kernel cannot run; empty if it can.
    """

    mesh: Any
    specs: tuple[Any, ...] = ()
    unknown: str = ""


def placement_of(leaves: Sequence[Leaf], shardings: Sequence[Any] | None) -> Placement:
    """Where `leaves` are; `shardings` say it per leaf, on a mesh of Auto axes."""
    told = [s for s in shardings or () if isinstance(s, NamedSharding)]
    # The sharding that decides for a leaf is that of its weight, where it has one.
    deciding = [leaf.get("weight", next(iter(leaf.values()))) for leaf in leaves]
    types = [jax.typeof(x).sharding for x in deciding]
    meshes = [s.mesh for s in (*types, *told) if not s.mesh.empty and s.mesh.size > 1]
    if not meshes:
        return Placement(None)
    mesh = meshes[0]
    kinds = set(mesh.axis_types)
    if kinds == {AxisType.Manual}:
        varies = any(varying_axes(x) for leaf in leaves for x in leaf.values())
        return Placement(None, unknown=_VARYING if varies else "")
    if kinds == {AxisType.Explicit}:
        return Placement(mesh, tuple(t.spec for t in types))
    if kinds != {AxisType.Auto}:
        return Placement(None, unknown=_PARTLY_MANUAL)
    if len(told) < len(leaves) or any(s.mesh.shape != mesh.shape for s in told):
        return Placement(None, unknown=_AUTO)
    return Placement(mesh, tuple(s.spec for s in told))


def on_each_device(
    local: Callable[..., PartialResults],
    job: Job,
    placement: Placement,
    leaves: Sequence[Leaf],
    *numbers: Any,
) -> PartialResults:
    """Runs `local(members, leaves, *numbers)` under `shard_map`.

    Reductions are completed over the axes that split a leaf; nothing else is sent.
    """
    groups: dict[tuple[str, ...], list[int]] = {}
    for k, spec in enumerate(placement.specs):
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

    specs = placement.specs
    replicated: Any = PartitionSpec()
    leaves = [
        {c: _resharded(x, spec, placement.mesh) for c, x in leaf.items()}
        for leaf, spec in zip(leaves, specs, strict=True)
    ]
    # Refs cannot be checked for how they vary; every reduction is completed by hand.
    return jax.shard_map(
        body,
        mesh=placement.mesh,
        in_specs=(list(specs), *[replicated] * len(numbers)),
        out_specs=PartialResults(dict(enumerate(specs)), replicated),
        check_vma=False,
    )(leaves, *numbers)


def _complete(x: Array, how: str, axes: tuple[str, ...]) -> Array:
    if not axes:
        return x
    return jax.lax.psum(x, axes) if how == "sum" else jax.lax.pmax(x, axes)


def _resharded(x: Array, spec: Any, mesh: Any) -> Array:
    """`x` as `spec` says: a gradient may be sharded otherwise than its weight."""
    if AxisType.Explicit in mesh.axis_types and jax.typeof(x).sharding.spec != spec:
        return jax.sharding.reshard(x, NamedSharding(mesh, spec))
    return x


def _axes(spec: Any) -> tuple[str, ...]:
    """The mesh axes that a spec names."""
    names = [n if isinstance(n, tuple) else (n,) for n in spec if n is not None]
    return tuple(sorted(itertools.chain.from_iterable(names)))


_AUTO = (
    "the arrays are on a mesh of Auto axes, where tracing cannot know how they are "
    "sharded. Create the state from sharded arrays with jamp.initialize, write "
    "`tx.replace(shardings=...)` with one NamedSharding per leaf, make the mesh by "
    "`jax.make_mesh` with Explicit axes, or choose backend='auto'."
)
_VARYING = (
    "inside of a shard_map that checks how values vary. Pass check_vma=False to "
    "jax.shard_map, or choose backend='auto'."
)
_PARTLY_MANUAL = (
    "the mesh mixes Auto, Explicit and Manual axes. Use one kind, or backend='auto'."
)
