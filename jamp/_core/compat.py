"""What JAX may call otherwise in its next version; autocast has a file of its own."""

import contextlib
import importlib
from typing import Any

import jax

from pallas_kernels._compat import varying_axes as varying_axes


def manual_axes() -> frozenset[Any]:
    """The mesh axes of the `shard_map` that is being traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def name_key_impl(spec: Any) -> None:
    """Lets JAX find a kind of PRNG key by its name, which is how Orbax saves keys.

    Of a JAX that keeps its names elsewhere, keys of this kind cannot be saved so.
    """
    with contextlib.suppress(ImportError, AttributeError):
        known = importlib.import_module("jax._src.random.prng").prngs
        known.setdefault(spec._impl.name, spec._impl)
