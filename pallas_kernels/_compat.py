"""What JAX may call otherwise in its next version."""

from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes along which an array, or what has the type of one, differs.

    There are some inside of `shard_map` with `check_vma`.
    """
    aval = x if hasattr(x, "strip_weak_type") else jax.typeof(x)
    manual = getattr(aval, "mat", None)  # a reference or a token has none
    return frozenset() if manual is None else frozenset(manual.varying)
