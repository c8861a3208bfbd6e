"""Devices of arrays: placement, and what their matmul units multiply."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jamp._core.tree import is_traced
from jamp._core.warnings import UnusedOptionWarning, warn
from pallas_kernels._compat import compute_capability


def place_like(x: Any, like: Any) -> jax.Array:
    """Returns `x` as an array with the sharding of `like`, if `like` has one.

    A number takes the dtype of `like`; arrays and PRNG keys keep their own.
    """
    is_key = jnp.issubdtype(like.dtype, jax.dtypes.prng_key)
    x = x if is_key or hasattr(x, "dtype") else jnp.asarray(x, like.dtype)
    sharding = getattr(like, "sharding", None)
    if sharding is None or is_traced(like) or is_traced(x):
        return jnp.asarray(x)
    if getattr(like, "committed", True):
        is_there = isinstance(x, jax.Array) and x.committed and x.sharding == sharding
        return x if is_there else put(x, sharding)
    if not getattr(x, "is_fully_addressable", True):
        return x  # JAX cannot move an array of several hosts to one device
    elsewhere = getattr(x, "sharding", sharding).device_set != sharding.device_set
    return jax.device_put(x, sharding) if elsewhere else jnp.asarray(x)


def put(x: Any, sharding: Any) -> jax.Array:
    """Calls `jax.device_put`, or copies an array of this host to all hosts by value.

    On several hosts, `jax.device_put` of JAX 0.12 makes an array without addressable
    shards. Orbax cannot save such an array.
    """
    local = getattr(x, "is_fully_addressable", True)
    if sharding.is_fully_addressable or not local:
        return jax.device_put(x, sharding, may_alias=False)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        # Compiled programs return key data with a full spec.
        data = put(data, with_full_spec(sharding, data.ndim))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    x = np.asarray(x)
    own = lambda index: np.array(x[index])  # noqa: E731 - a view may be aliased
    return jax.make_array_from_callback(x.shape, sharding, own)


def with_full_spec(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """Returns the sharding with a spec that has an entry for every axis."""
    rest = (None,) * (ndim - len(sharding.spec))
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *rest))


# The first NVIDIA compute capability whose tensor cores multiply the dtype.
UNITS = {"float16": (7, 0), "bfloat16": (8, 0), "float8": (8, 9)}
_TPUS_WITH_FP8 = ("TPU7", "TPU v7")


def matmul_dtypes(device: Any) -> list[str] | None:
    """Returns the dtypes that the tensor cores of a GPU multiply; None if unknown."""
    capability = compute_capability(device)
    known = [name for name, first in UNITS.items() if capability >= first]
    return known if capability else None


@functools.cache
def warn_without_fp8() -> None:
    """Warns once on a GPU or TPU without fp8 units, where fp8 is not faster."""
    device = jax.local_devices()[0]
    kind, known = device.device_kind, matmul_dtypes(device)
    old_tpu = device.platform == "tpu" and not kind.startswith(_TPUS_WITH_FP8)
    if old_tpu or (known is not None and "float8" not in known):
        warn(
            f"{kind} has no fp8 units: matmuls in fp8 have the same results as on "
            "other devices, and are slower than in half. Write opt_level='O5', or "
            "fp8=False.",
            UnusedOptionWarning,
        )
