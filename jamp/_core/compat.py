"""The only file that asks which JAX this is."""

import os
from typing import Any

import jax


def varying_axes(x: Any) -> frozenset[Any]:
    """The mesh axes along which `x` differs, inside `shard_map` with `check_vma`."""
    aval = x if hasattr(x, "strip_weak_type") else jax.typeof(x)
    if hasattr(aval, "mat"):  # JAX 0.11 and newer
        return frozenset(aval.mat.varying)
    return frozenset(getattr(aval, "vma", ()))


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


def scan_counts(params: dict[str, Any]) -> tuple[int, int, int]:
    """How many constants, carries and slices a scan takes, from its parameters."""
    if "ft_in" in params:  # JAX 0.11 and newer
        consts, carry, xs = params["ft_in"].unpack()
        return len(list(consts)), len(list(carry)), len(list(xs))
    consts, carry = params["num_consts"], params["num_carry"]
    return consts, carry, len(params["jaxpr"].invars) - consts - carry


# Folders whose lines are not the user's.
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(file), "")
    for file in (jax.__file__, os.path.dirname(__file__))
)


def source_line(eqn: Any) -> str:
    """`file:line` of an equation, the innermost outside of JAX and jamp; "" if none."""
    traceback = eqn.source_info.traceback  # on JAX 0.11 and 0.12; innermost first
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{frame.file_name}:{frame.line_num}"
    return ""
