"""What JAX may call otherwise in its next version."""

from typing import Any

import jax


def compute_capability(device: Any) -> tuple[int, ...]:
    """Of an NVIDIA GPU, such as (9, 0); () of any other device."""
    parts = str(getattr(device, "compute_capability", "")).split(".")
    # ROCm names architectures: "gfx942".
    return tuple(map(int, parts)) if all(map(str.isdecimal, parts)) else ()


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes along which an array, or what has the type of one, differs.

    There are some inside of `shard_map` with `check_vma`.
    """
    aval = x if hasattr(x, "strip_weak_type") else jax.typeof(x)
    manual = getattr(aval, "mat", None)  # a reference or a token has none
    return frozenset() if manual is None else frozenset(manual.varying)
