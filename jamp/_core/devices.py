"""Devices of arrays: checks that they agree, and placement like another array."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from jamp._core.tree import is_traced
from jamp._core.warnings import UnusedOptionWarning, warn
from pallas_kernels._compat import compute_capability


def check_same_devices(*named: tuple[str, Any]) -> None:
    """Raises if arrays are on different meshes, or some on one and some elsewhere.

    JAX would say so at the first operation on two of them, without their names. Tracers
    and uncommitted arrays are left out.
    """
    first: dict[Any, str] = {}  # by their devices, where the first array is
    for name, tree in named:
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            if is_traced(leaf) or not getattr(leaf, "committed", False):
                continue
            devices = _devices(leaf.sharding)
            if devices not in first:
                first[devices] = _in_words(
                    name + jax.tree_util.keystr(path), leaf.sharding
                )
    if len(first) > 1:
        one, other, *_ = first.values()
        raise ValueError(
            f"Arrays are on different devices: {one}, and {other}. Put all of them on "
            "one mesh first, with `jax.device_put(tree, sharding)`."
        )


def place_like(x: Any, like: Any) -> jax.Array:
    """`x` as an array on the sharding of `like`, if `like` has one.

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
        return x  # on other hosts too, and `like` was never told where to be
    elsewhere = getattr(x, "sharding", sharding).device_set != sharding.device_set
    return jax.device_put(x, sharding) if elsewhere else jnp.asarray(x)


def put(x: Any, sharding: Any) -> jax.Array:
    """`jax.device_put`, by value if it puts an array of this host on all hosts.

    Otherwise JAX 0.12 makes an array without addressable shards, and Orbax fails.
    """
    local = getattr(x, "is_fully_addressable", True)
    if sharding.is_fully_addressable or not local:
        return jax.device_put(x, sharding, may_alias=False)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        # A program returns the data with a full spec.
        data = put(data, with_full_spec(sharding, data.ndim))
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
    x = np.asarray(x)
    own = lambda index: np.array(x[index])  # noqa: E731 - a view may be aliased
    return jax.make_array_from_callback(x.shape, sharding, own)


def with_full_spec(sharding: NamedSharding, ndim: int) -> NamedSharding:
    """The sharding, with a spec that names every axis of an array."""
    rest = (None,) * (ndim - len(sharding.spec))
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec, *rest))


# The first NVIDIA compute capability whose matrix units multiply the dtype.
UNITS = {"float16": (7, 0), "bfloat16": (8, 0), "float8": (8, 9)}
_TPUS_WITH_FP8 = ("TPU7", "TPU v7")


def matmul_dtypes(device: Any) -> list[str] | None:
    """The half dtypes that a GPU's matrix units multiply; None if unknown."""
    capability = compute_capability(device)
    known = [name for name, first in UNITS.items() if capability >= first]
    return known if capability else None


def warn_without_fp8() -> None:
    """Warns once on a GPU or TPU without fp8 units, where fp8 is not faster."""
    device = jax.local_devices()[0]
    kind, known = device.device_kind, matmul_dtypes(device)
    old_tpu = device.platform == "tpu" and not kind.startswith(_TPUS_WITH_FP8)
    if old_tpu or (known is not None and "float8" not in known):
        _warn_of_device(kind)


@functools.cache
def _warn_of_device(kind: str) -> None:
    warn(
        f"{kind} has no fp8 units: products in fp8 give the same numbers as elsewhere, "
        "and take longer than in half. Write opt_level='O5', or fp8=False.",
        UnusedOptionWarning,
    )


_GUARDS = ("host_to_device", "device_to_device", "device_to_host")
# The caller's levels of `jax.transfer_guard`, while a function of jamp runs.
_callers_levels: ContextVar[list[Any] | None] = ContextVar("levels", default=None)


def moves_constants[**P, T](fn: Callable[P, T]) -> Callable[P, T]:
    """Lets the constants of a function of jamp through `jax.transfer_guard`.

    The caller's own functions run in `callers_guard`, which restores it.
    """

    @functools.wraps(fn)
    def let_through(*args: P.args, **kwargs: P.kwargs) -> T:
        if _callers_levels.get() is not None:
            return fn(*args, **kwargs)
        levels = [getattr(jax.config, f"jax_transfer_guard_{x}") for x in _GUARDS]
        token = _callers_levels.set(levels)
        try:
            with jax.transfer_guard("allow"):
                return fn(*args, **kwargs)
        finally:
            _callers_levels.reset(token)

    return let_through


@contextlib.contextmanager
def callers_guard() -> Iterator[None]:
    """Restores the caller's `jax.transfer_guard`, for a function of the caller's."""
    levels = _callers_levels.get()
    with contextlib.ExitStack() as stack:
        if levels is not None:
            stack.callback(_callers_levels.reset, _callers_levels.set(None))
            for name, level in zip(_GUARDS, levels, strict=True):
                guard = getattr(jax, f"transfer_guard_{name}")
                stack.enter_context(guard(level or "allow"))
        yield


def check_transfers(tree: Any) -> None:
    """Lets the caller's `jax.transfer_guard` see the NumPy arrays that a loss takes.

    Autocast moves them to the device before the loss runs.
    """
    levels = _callers_levels.get()
    if levels and levels[0] not in (None, "allow"):
        with callers_guard():
            for x in jax.tree.leaves(tree):
                if isinstance(x, np.ndarray):
                    jnp.asarray(x)


@functools.lru_cache(maxsize=64)
def _devices(sharding: Sharding) -> tuple[Any, ...]:
    """Its devices in mesh order, because two programs must share the order too."""
    if isinstance(sharding, NamedSharding) and sharding.mesh.devices is not None:
        return tuple(sharding.mesh.devices.flat)
    return tuple(sorted(sharding.device_set, key=lambda device: device.id))


def _in_words(name: str, sharding: Sharding) -> str:
    ids = [device.id for device in _devices(sharding)]
    if not isinstance(sharding, NamedSharding):
        return f"{name} on devices {ids}"
    axes = ", ".join(f"{axis}: {size}" for axis, size in sharding.mesh.shape.items())
    return f"{name} on a mesh ({axes}) of devices {ids}"
