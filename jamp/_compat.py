"""The only file that asks which JAX this is."""

from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes along which `x` differs, inside `shard_map` with `check_vma`."""
    aval = jax.typeof(x)
    if hasattr(aval, "mat"):  # JAX 0.11 and newer
        return frozenset(aval.mat.varying)
    return frozenset(getattr(aval, "vma", ()))


def manual_axes() -> frozenset[Any]:
    """The mesh axes of the `shard_map` that is being traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def scan_counts(params: dict[str, Any]) -> tuple[int, int, int]:
    """How many constants, carries and slices a scan takes, from its parameters."""
    if "ft_in" in params:  # JAX 0.11 and newer
        consts, carry, xs = params["ft_in"].unpack()
        return len(list(consts)), len(list(carry)), len(list(xs))
    consts, carry = params["num_consts"], params["num_carry"]
    return consts, carry, len(params["jaxpr"].invars) - consts - carry
