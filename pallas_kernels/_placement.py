"""Where arrays are on a mesh.

It is known while tracing on a mesh of Explicit axes, and to be told on one of Auto
axes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from pallas_kernels._compat import varying_axes
from pallas_kernels._xla import Leaf

type Sharding = NamedSharding | None


class Placement(NamedTuple):
    """Where the leaves of one call are.

    Attributes:
        mesh: the mesh to spread over; None if a kernel may run on the arrays as they
            are: on one device, or inside of a `shard_map`.
        specs: per leaf, how it is sharded.
        unknown: why a kernel cannot run; empty if it can.
    """

    mesh: Mesh | AbstractMesh | None
    specs: tuple[PartitionSpec, ...] = ()
    unknown: str = ""

    @property
    def is_one_device(self) -> bool:
        """Whether each array is whole where it is used."""
        return self.mesh is None and not self.unknown


def placement_of(
    leaves: Sequence[Leaf], shardings: Sequence[Sharding] | None
) -> Placement:
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
