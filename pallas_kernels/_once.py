"""One value for all that is made of it."""

import jax


def computed_once[T](values: T) -> T:
    """Keeps XLA on the CPU from computing arrays again for each fusion that reads them.

    Two fusions can round differently, one with a fused multiply-add and one without:
    the halves of a split would be of two values. On a GPU all that is made of a value
    is one fusion, which a barrier would break up.
    """
    barrier = jax.lax.optimization_barrier
    return jax.lax.platform_dependent(values, cpu=barrier, default=lambda x: x)
