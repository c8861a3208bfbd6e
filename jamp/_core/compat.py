"""What JAX may call otherwise in its next version; autocast has a file of its own."""

from typing import Any

import jax

from pallas_kernels._compat import varying_axes as varying_axes


def manual_axes() -> frozenset[Any]:
    """The mesh axes of the `shard_map` that is being traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)
