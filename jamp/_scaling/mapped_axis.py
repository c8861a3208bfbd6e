"""Gradients on the devices of a mapped axis.

Based on apex/parallel/distributed.py with its option `allreduce_always_fp32`.
"""

from collections.abc import Hashable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree

from jamp._core.dtypes import is_half
from jamp._core.tree import path_string
from jamp._core.warnings import PrecisionWarning, warn
from pallas_kernels._compat import varying_axes


def check_bound(axis_name: Hashable) -> None:
    """Raises if an axis is not bound here."""
    for name in _names(axis_name):
        try:
            jax.lax.axis_size(name)
        except (NameError, AssertionError):
            manual = sorted(map(str, _manual_axes()))
            raise ValueError(
                f"axis_name={name!r} is not bound here; the axes of the shard_map "
                f"around this call are {manual}. Call the function inside "
                "jax.shard_map or jax.vmap over an axis of this name. Under jit with "
                "sharded arrays, leave axis_name out."
            ) from None


def varying(params: PyTree, axis_name: Hashable) -> PyTree:
    """Marks replicated params as varying, or JAX would sum their gradients in half."""
    mapped = _manual_axes().intersection(_names(axis_name))

    def leaf(x):
        missing = tuple(mapped - varying_axes(x))
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(leaf, params)


def warn_of_half_sums(params: PyTree) -> None:
    """Warns about replicated half params, whose gradients JAX sums in half."""
    mapped = _manual_axes()
    if not mapped or not _checks_vma():
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        missing = sorted(map(str, mapped - varying_axes(leaf)))
        if missing and is_half(leaf):
            warn(
                f"The params {path_string(path)!r} are {leaf.dtype} and replicated "
                f"along {missing} of a shard_map. JAX sums their gradients over it in "
                f"{leaf.dtype}, and `lax.pmean` has no effect. For the mean in "
                f"float32, pass `axis_name={missing[0]!r}`.",
                PrecisionWarning,
            )
            return


def agreed(
    finite: Bool[Array, ""], scale: Array, axis_name: Hashable
) -> Bool[Array, ""]:
    """Returns whether gradients are finite on all devices that share a scale.

    Along `axis_name`, `finite` is already equal. Along the other axes of a
    `shard_map`, devices may hold parts of the params. An overflow on one device makes
    all devices skip.
    """
    rest = _manual_axes() - set(_names(axis_name))
    if _checks_vma():
        rest &= varying_axes(finite) - varying_axes(scale)
    if not rest:
        return finite
    return jax.lax.pmin(finite.astype(jnp.int32), tuple(rest)) > 0


def alike(finite: Bool[Array, ""], x: Array) -> Bool[Array, ""]:
    """Returns whether the losses are finite on all devices where `x` is replicated.

    In a `shard_map` each device has its own loss, and JAX sums the gradients of
    replicated params over the devices.
    """
    axes = tuple(varying_axes(finite) - varying_axes(x))
    return jax.lax.pmin(finite.astype(jnp.int32), axes) > 0 if axes else finite


def _checks_vma() -> bool:
    """Returns whether the `shard_map` around this call has check_vma=True."""
    axes = tuple(_manual_axes())
    return any(varying_axes(jax.lax.axis_index(axis)) for axis in axes)


def _names(axis_name: Hashable) -> tuple[Any, ...]:
    return axis_name if isinstance(axis_name, tuple) else (axis_name,)


def _manual_axes() -> frozenset[Any]:
    """Returns the mesh axes of the `shard_map` around this call."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)
