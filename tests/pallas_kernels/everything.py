"""One job that uses all that the launcher can do, and its oracle in NumPy.

Numbers are small integers: every sum is exact whatever its order, and an element that
is stepped twice, or counted twice, shows.
"""

import jax.numpy as jnp
import numpy as np

from pallas_kernels import Job, Options, Results, run

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def _formula(numbers, tag, c):
    stepped = c["w"] + numbers["a"] * c["g"] + numbers["b"]
    return {
        "w": stepped,
        "h": c["h"] + tag,
        "bits": c["bits"].astype(jnp.uint32) + 1,
        "new": (stepped * 2).astype(F16),
        "total": c["g"],
        "largest": jnp.abs(c["w"]),
    }


# Reads g; steps w, h and bits; writes copy and never reads it; makes new; reduces.
JOB = Job(_formula, copies={"copy": "w"}, reductions={"total": "sum", "largest": "max"})


def integers(shape, dtype, seed=0, least=-8, most=9):
    values = np.random.default_rng(seed).integers(least, most, shape)
    return jnp.asarray(values, dtype)


def leaf(shape, seed=0):
    return {
        "g": integers(shape, BF16, seed),
        "w": integers(shape, F32, seed + 1),
        "copy": jnp.full(shape, jnp.nan, F16),
        "h": integers(shape, BF16, seed + 2),
        "bits": integers(shape, jnp.uint16, seed + 3, 0, 2**15),
    }


def leaves(shapes):
    return [leaf(shape, 10 * k) for k, shape in enumerate(shapes)]


def call(leaves, skip, backend) -> Results:
    """Runs the job, with a number and a tag for each leaf."""
    return run(
        JOB,
        leaves,
        Options(skip=skip, backend=backend),
        {"a": 3.0, "b": jnp.arange(len(leaves), dtype=F32) % 5},
        tags=[float(k % 2) for k in range(len(leaves))],
    )


def assert_ran(leaves, results):
    """Compares with what `call` makes of leaves, if it does not skip."""
    for k, leaf in enumerate(leaves):
        columns = _expected(leaf, k % 5, k % 2)
        assert results[0][k].keys() == columns.keys()
        for name, x in columns.items():
            given = results[0][k][name]
            assert given.dtype == (F16 if name == "new" else leaf[name].dtype)
            np.testing.assert_array_equal(np.asarray(given, np.float64), x, name)
    _assert_reduced(leaves, results)


def assert_skipped(leaves, results):
    """The same if it skips: only the reductions are made."""
    for before, after in zip(leaves, results[0].values(), strict=True):
        after = dict(after)
        new = after.pop("new")
        assert new.dtype == F16 and not bits(new).any()
        for name, x in after.items():
            if name != "copy" or x.size >= 128:  # XLA writes copies from the weights
                assert (bits(x) == bits(before[name])).all(), name
    _assert_reduced(leaves, results)


def bits(x):
    return np.asarray(x).view(f"u{x.dtype.itemsize}")


def _expected(leaf, b, tag):
    g, w, h = (np.asarray(leaf[name], np.float64) for name in "gwh")
    stepped = w + 3 * g + b
    return {
        "w": stepped,
        "copy": stepped,
        "h": h + tag,
        "bits": np.asarray(leaf["bits"], np.uint32) + 1,
        "new": 2 * stepped,
    }


def _assert_reduced(leaves, results):
    total = [np.asarray(x["g"], np.float64).sum() for x in leaves]
    largest = [abs(np.asarray(x["w"], np.float64)).max(initial=0) for x in leaves]
    np.testing.assert_array_equal(results[1]["total"], total)
    np.testing.assert_array_equal(results[1]["largest"], largest)
