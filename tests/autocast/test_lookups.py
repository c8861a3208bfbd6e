"""Test that the gradient of a lookup is a float32 sum at every level.

The oracle adds the cotangents of each row in float64.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.support.extent import slow_except
from tests.support.programs import equations
from tests.support.states import make

LEVELS = "O0", "O1", "O2", "O3", "O4", "O5", "O6"
WIDTH, COUNT = 8, 4096
rng = np.random.default_rng(0)
# Words as in a text: some occur in most positions. A cotangent is exact in half.
IDS = np.minimum(rng.zipf(1.2, COUNT) - 1, 9_999).astype(np.int32)
COTANGENT = rng.choice([0.5, 0.75, 1.0], (COUNT, WIDTH)).astype(np.float32)


def summed(ids, rows):
    """Returns the gradient of the table: the cotangents of each row in float64."""
    want = np.zeros((rows, WIDTH))
    inside = (ids >= 0) & (ids < rows)
    np.add.at(want, ids[inside], np.float64(COTANGENT)[inside])
    return want


def gradient(level, lookup, rows, ids):
    params = {"embedding": np.ones((rows, WIDTH), np.float32)}
    scale = 1.0 / 256 if level in ("O2", "O3") else 1.0  # the sums fit into float16
    state = make(level, params, loss_scale=scale)

    def loss_fn(p, ids):
        found = lookup(p["embedding"], ids).reshape(COUNT, WIDTH)
        return (found.astype(jnp.float32) * COTANGENT).sum()

    return jax.jit(jamp.scaled_grad(loss_fn))(state, ids)["embedding"]


LOOKUPS = {
    "index": lambda table, ids: table[ids],
    "rank 2": lambda table, ids: table[ids.reshape(64, -1)],
    "take": lambda table, ids: jnp.take(table, ids, axis=0),
    "clipped": lambda table, ids: table.at[ids].get(mode="clip"),
    "columns": lambda table, ids: jnp.take(table.T, ids, axis=1).T,
    "linen": lambda table, ids: nn.Embed(*table.shape).apply(
        {"params": {"embedding": table}}, ids
    ),
    "vmap": lambda table, ids: jax.vmap(lambda i: table[i])(ids),
    "slices": lambda table, ids: jax.vmap(
        lambda i: jax.lax.dynamic_slice_in_dim(table, i, 1)
    )(ids),
    "jit": lambda table, ids: jax.jit(lambda t, i: t[i])(table, ids),
    "checkpoint": lambda table, ids: jax.checkpoint(lambda t, i: t[i])(table, ids),
    "scan": lambda table, ids: jax.lax.scan(
        lambda c, i: (c, table[i]), 0, ids.reshape(64, -1)
    )[1],
    "computed": lambda table, ids: (2 * table / 2)[ids],
    "after a matmul": lambda table, ids: (table @ jnp.eye(WIDTH))[ids],
    "half of a row": lambda table, ids: jnp.concatenate(
        [table[ids, :4], table[ids, 4:]], axis=-1
    ),
}


@pytest.mark.parametrize("rows", [10_000, 1000])
@pytest.mark.parametrize("name", slow_except(["index", "linen", "slices"], LOOKUPS))
def test_each_level_sums_the_gradient_of_a_table(name, rows):
    ids = np.minimum(IDS, rows - 1)
    want = summed(ids, rows)
    for level in LEVELS:
        got = gradient(level, LOOKUPS[name], rows, ids)
        # The sum is rounded once, to the dtype of the param.
        np.testing.assert_allclose(got, want, rtol=2**-8, err_msg=level)


@pytest.mark.parametrize("rows", [10_000, 1000])
@pytest.mark.parametrize("name", ["index", "take", "linen"])
def test_ids_beyond_the_table_get_no_gradient(name, rows):
    ids = np.where(np.arange(COUNT) % 5 == 0, rows + 3, np.minimum(IDS, rows - 1))
    if name == "index":  # JAX clips them
        lookup = lambda table, ids: table.at[ids].get(mode="fill", fill_value=0)  # noqa: E731
    else:
        lookup = lambda table, ids: jnp.nan_to_num(LOOKUPS[name](table, ids))  # noqa: E731
    got = gradient("O5", lookup, rows, ids.astype(np.int32))
    np.testing.assert_allclose(got, summed(ids, rows), rtol=2**-8)


def test_clipped_ids_and_negative_ids():
    ids = np.where(np.arange(COUNT) % 3 == 0, 10_007, IDS - 10_000).astype(np.int32)
    lookup = lambda table, ids: table.at[ids].get(mode="clip")  # noqa: E731
    got = gradient("O5", lookup, 10_000, ids)
    last = np.where(ids < 0, ids + 10_000, 9_999)
    np.testing.assert_allclose(got, summed(last, 10_000), rtol=2**-8)


@pytest.mark.parametrize("rows", [10_000, 1000])
def test_derivatives_in_forward_mode_and_of_a_batch(rows):
    ids, table = np.minimum(IDS, rows - 1), jnp.ones((rows, WIDTH), jnp.float32)
    found = jamp.autocast(lambda t: (t @ jnp.eye(WIDTH))[ids], "bfloat16")
    tangent = jnp.asarray(np.arange(rows * WIDTH).reshape(rows, -1) % 64, jnp.float32)
    _, got = jax.jvp(found, (table,), (tangent,))
    np.testing.assert_array_equal(got, np.asarray(tangent)[ids])
    batch = jnp.stack([COTANGENT, 2 * COTANGENT])
    (got,) = jax.vmap(jax.vjp(found, table)[1])(batch)
    np.testing.assert_allclose(got[1], 2 * summed(ids, rows), rtol=2**-8)


def test_few_lookups_need_no_float32_table():
    """A table of 10,000 rows for 4,096 lookups: the float32 sums have 4,096 rows."""
    state = make("O5", {"embedding": np.ones((10_000, WIDTH), np.float32)})
    grad = jamp.scaled_grad(lambda p: (p["embedding"][IDS] * COTANGENT).sum())
    scatters = equations(grad, ["scatter-add"], state)
    shapes = [(v.aval.shape, str(v.aval.dtype)) for e in scatters for v in e.outvars]
    assert shapes == [((COUNT, WIDTH), "float32"), ((10_000, WIDTH), "bfloat16")]


def test_the_gradient_of_tied_embeddings_is_one_float32_sum():
    """In half, the sum over the lookups would be rounded before it gets a last term."""
    rows = 1000
    ids = np.minimum(IDS, rows - 1)
    x = rng.choice([0.25, 1.0, 3.0], (1, WIDTH)).astype(np.float32)

    def loss_fn(p, ids, x):
        table = p["embedding"]
        found = (table[ids].astype(jnp.float32) * COTANGENT).sum()
        return found + (x @ table.T).astype(jnp.float32).sum()

    state = make("O5", {"embedding": np.ones((rows, WIDTH), np.float32)})
    got = jax.jit(jamp.scaled_grad(loss_fn))(state, ids, x)["embedding"]
    want = (summed(ids, rows) + x).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.float32(got), np.float32(want))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint16", "int32", "uint32"])
@pytest.mark.parametrize("rows", [100, 256, 300])
@pytest.mark.parametrize("mode", ["fill", "clip"])
def test_ids_may_have_few_bits(dtype, rows, mode):
    ids = jnp.array([7, 9, 99, 7], dtype)
    loss_fn = lambda p, ids: jnp.take(p["e"], ids, 0, mode=mode).sum()  # noqa: E731
    state = make("O5", {"e": jnp.ones((rows, 4))})
    got = jax.jit(jamp.scaled_grad(loss_fn))(state, ids)["e"][:, 0]
    want = np.zeros(rows)
    np.add.at(want, [7, 9, 99, 7], 1)
    np.testing.assert_array_equal(np.float32(got), want)


@pytest.mark.parametrize("level", ["O2", "O5"])
def test_a_slice_of_a_vector_has_a_gradient(level):
    state = make(level, {"b": jnp.arange(1.0, 9.0)}, loss_scale=1.0)
    for loss_fn in (
        lambda p, i: p["b"][i],
        lambda p, i: jax.lax.dynamic_slice(p["b"], (i,), (1,)).sum(),
        lambda p, i: jnp.roll(p["b"], i)[6],
    ):
        got = jax.jit(jamp.scaled_grad(loss_fn))(state, jnp.int32(3))["b"]
        np.testing.assert_array_equal(got, np.arange(8) == 3)
