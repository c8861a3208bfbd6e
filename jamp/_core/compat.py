"""What JAX may call otherwise in its next version; autocast has a file of its own."""

from typing import Any

import jax

from pallas_kernels._compat import varying_axes as varying_axes


def manual_axes() -> frozenset[Any]:
    """The mesh axes of the `shard_map` that is being traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def shape_like(aval: Any, dtype: Any) -> jax.ShapeDtypeStruct:
    """A shape in another dtype, that varies and is sharded as `aval` says."""
    shape = getattr(aval, "shape", ())
    if not varying_axes(aval):
        return jax.ShapeDtypeStruct(shape, dtype)
    options: dict[str, Any] = {"manual_axis_type": aval.mat, "sharding": aval.sharding}
    return jax.ShapeDtypeStruct(shape, dtype, **options)
