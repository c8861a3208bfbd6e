"""The only file that asks which JAX this is."""

from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes along which `x` differs, inside `shard_map` with `check_vma`."""
    aval = jax.typeof(x)
    if hasattr(aval, "mat"):  # JAX 0.11 and newer
        return frozenset(aval.mat.varying)
    return frozenset(getattr(aval, "vma", ()))
