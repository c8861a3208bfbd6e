"""Compare trees bit for bit, and name the leaf that differs."""

import jax
import jax.numpy as jnp
import numpy as np


def bits(x) -> bytes:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def _pairs(a, b):
    """Yields the leaves of two trees and their path; checks structures and dtypes."""
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True)
    for (path, x), y in pairs:
        where = jax.tree_util.keystr(path)
        assert x.dtype == y.dtype, where
        yield x, y, where


def assert_same_bits(a, b) -> None:
    """Compares structures, shapes, dtypes and bits: NaN equals NaN, and 0 is not -0."""
    for x, y, where in _pairs(a, b):
        assert x.shape == y.shape, where
        assert bits(x) == bits(y), f"{where}: {x} != {y}"


def assert_rounded_alike(a, b, rtol=1e-6, atol=None) -> None:
    """Compares structures and dtypes exactly, and values within one rounding.

    XLA may sum in another order if it compiles two programs separately.
    """
    for x, y, where in _pairs(a, b):
        x, y = (np.asarray(z, np.float64) for z in (x, y))
        atol = rtol if atol is None else atol
        np.testing.assert_allclose(x, y, rtol, atol, err_msg=where)


def copy(tree):
    """Returns copies on the host, which donation cannot delete."""
    return jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else np.array(x),
        tree,
    )
