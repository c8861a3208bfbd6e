"""Runs one formula over many leaves, in XLA or in Mosaic GPU kernels.

A formula is a plain function of blocks in float32, or in float64 for float64 leaves. A
result with the name of a column replaces the column. A result with a name in
`reductions` is reduced over its leaf. Any other result is a new array.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, ArrayLike, Bool, Float, UInt32

from pallas_kernels._compat import compute_capability, varying_axes
from pallas_kernels._xla import Job, Leaf, Results, run_in_xla

type Backend = Literal["xla", "mosaic", "interpret"]
type Sharding = NamedSharding | None

BACKENDS = get_args(Backend.__value__)

# Mosaic GPU compiles for NVIDIA's compute capability 9.0 (Hopper) and newer. For an
# older one, its compiler aborts the process, so `check_device` always runs first. A
# device that this machine lacks, in an ahead-of-time compilation, has only a name.
_SUPPORTED_KINDS = frozenset(
    "H20 H100 H200 H800 GH200 B100 B200 B300 GB200 GB300".split()
)
_OLDEST = (9, 0)


class BackendError(RuntimeError):
    """The backend cannot run on the device."""


class Options(NamedTuple):
    """Options of all operations.

    Attributes:
        unscale: the factor of the gradients, shape (), float32 or float64; None means
            1.
        skip: whether to change nothing, shape (), bool; None means False.
        backend: a name in `BACKENDS`.
        shardings: one NamedSharding per leaf, for a mesh of Auto axes, where tracers
            have no sharding.
    """

    unscale: Float[Array, ""] | None = None
    skip: Bool[Array, ""] | None = None
    backend: str = "xla"
    shardings: Sequence[Sharding] | None = None


DEFAULTS = Options()


def run(
    job: Job,
    leaves: Sequence[Leaf],
    options: Options = DEFAULTS,
    numbers: Mapping[str, ArrayLike] | None = None,
    tags: Sequence[Any] | None = None,
    keys: UInt32[Array, " n"] | None = None,
) -> Results:
    """Runs `job` over leaves. A leaf is a dict of arrays of one shape.

    Args:
        job: the formula, and the way in which its results are stored.
        leaves: they may have different columns and dtypes.
        options: with `skip`, all columns keep their bits and new arrays are zero, but
            reductions run. The formula gets `unscale` as a number.
        numbers: numbers by name, of shape (), or (n,) for one per leaf. They become
            float32, or float64 if a leaf is float64.
        tags: one static value per leaf for the formula.
        keys: one key per leaf, if `job.stored` rounds stochastically.
    """
    given = {"skip": options.skip, "unscale": options.unscale, **(numbers or {})}
    given = {name: x for name, x in given.items() if x is not None}
    backend = options.backend
    if backend != "xla":
        check_device(backend, [x for leaf in leaves for x in leaf.values()])
    if not leaves:
        shape = () if job.totals else (0,)
        return {}, dict.fromkeys(job.reductions, jnp.zeros(shape, jnp.float32))
    tags = [None] * len(leaves) if tags is None else tags
    per_leaf = {name: x for name, x in given.items() if jnp.ndim(x)}
    shared = {name: x for name, x in given.items() if name not in per_leaf}
    names = (*shared, *per_leaf)
    dtype = width_of([x for leaf in leaves for x in leaf.values()])
    packed, table = jnp.array([*shared.values()], dtype), None
    if per_leaf:
        rows = [jnp.asarray(x, dtype) for x in per_leaf.values()]
        table = jax.lax.optimization_barrier(jnp.stack(rows, 1))
    placement = Placement(None)
    if job.totals or backend != "xla":
        placement = placement_of(leaves, options.shardings)
    if placement.unknown and backend != "xla":
        raise BackendError(f"backend={backend!r} cannot run: {placement.unknown}")
    if backend == "xla":
        whole, every = placement == Placement(None), range(len(leaves))
        return run_in_xla(job, names, tags, whole, every, leaves, packed, table, keys)
    from pallas_kernels import mosaic  # the import takes a third of a second

    how = backend == "interpret", placement.mesh, placement.specs
    return mosaic.run_in_mosaic(job, names, tags, *how, leaves, packed, table, keys)


def width_of(arrays: Iterable[Any]) -> Any:
    """Returns float64 if an array is float64, and float32 otherwise."""
    is_wide = any([getattr(x, "dtype", None) == jnp.float64 for x in arrays])
    return jnp.dtype(jnp.float64 if is_wide else jnp.float32)


def check_backend(backend: str) -> None:
    """Raises a ValueError unless `backend` is one of `BACKENDS`."""
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}.")


def check_device(backend: str, arrays: Iterable[Array] = ()) -> None:
    """Raises a BackendError if Mosaic cannot compile for the device.

    The device is from the arrays' mesh, or is JAX's default.
    """
    device = jax.local_devices()[0]
    meshes = (jax.typeof(x).sharding.mesh for x in arrays)
    told = (getattr(mesh, "abstract_device", None) for mesh in meshes)
    kind = next(filter(None, told), device).device_kind
    if kind == device.device_kind:
        supported = compute_capability(device) >= _OLDEST
    else:
        supported = _is_supported_kind(kind)
    if backend == "mosaic" and not supported:
        raise BackendError(
            f"backend='mosaic' needs an NVIDIA GPU of compute capability 9.0 or newer, "
            f"but the device is {kind!r}. Choose backend='xla', or 'interpret' to "
            "debug on the CPU."
        )


def _is_supported_kind(kind: str) -> bool:
    words = kind.replace("-", " ").split()
    return words[:1] == ["NVIDIA"] and any(w in _SUPPORTED_KINDS for w in words)


class Placement(NamedTuple):
    """The mesh and shardings of the leaves of one call.

    Attributes:
        mesh: the mesh to run on; None for one device or inside a `shard_map`.
        specs: one sharding per leaf.
        unknown: the reason why a kernel cannot run; empty if it can.
    """

    mesh: Mesh | AbstractMesh | None
    specs: tuple[PartitionSpec, ...] = ()
    unknown: str = ""


def placement_of(
    leaves: Sequence[Leaf], shardings: Sequence[Sharding] | None
) -> Placement:
    """Returns the placement of leaves, given `shardings` on a mesh of Auto axes."""
    told = [s for s in shardings or () if isinstance(s, NamedSharding)]
    # A gradient may be sharded differently, so take the param's sharding.
    deciding = [leaf.get("param", next(iter(leaf.values()))) for leaf in leaves]
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
    "`jax.make_mesh` with Explicit axes, or choose backend='xla'."
)
_VARYING = (
    "inside of a shard_map that checks how values vary. Pass check_vma=False to "
    "jax.shard_map, or choose backend='xla'."
)
_PARTLY_MANUAL = (
    "the mesh mixes Auto, Explicit and Manual axes. Use one kind, or backend='xla'."
)
