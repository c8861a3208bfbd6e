"""The walk of tests.programs: it must see a product in every kind of sub-program."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.programs import Product, products

X = jnp.ones((4, 4))
MESH_AXIS = jax.sharding.PartitionSpec()


@jax.custom_vjp
def squared(x):
    return x @ x


squared.defvjp(lambda x: (x @ x, x), lambda x, g: (g @ x.T + x.T @ g,))


def mapped(x):
    mesh = jax.make_mesh((1,), ("d",))
    body = jax.shard_map(
        lambda x: x @ x, mesh=mesh, in_specs=MESH_AXIS, out_specs=MESH_AXIS
    )
    return body(x)


@pytest.mark.parametrize(
    ("fn", "count"),
    [
        pytest.param(lambda x: x @ x, 1, id="plain"),
        pytest.param(jax.jit(lambda x: x @ x), 1, id="jit"),
        pytest.param(
            lambda x: lax.scan(lambda c, _: (c @ c, None), x, length=3), 1, id="scan"
        ),
        pytest.param(
            lambda x: lax.while_loop(lambda c: (c @ c).any(), lambda c: c @ c, x),
            2,
            id="while",
        ),
        pytest.param(
            lambda x: lax.cond(x.any(), lambda x: x @ x, lambda x: 2 * (x @ x), x),
            2,
            id="cond",
        ),
        pytest.param(jax.grad(jax.checkpoint(lambda x: (x @ x).sum())), 3, id="remat"),
        pytest.param(squared, 1, id="custom_vjp"),
        pytest.param(jax.grad(lambda x: squared(x).sum()), 3, id="its derivative"),
        pytest.param(mapped, 1, id="shard_map"),
        pytest.param(
            lambda x: lax.ragged_dot(x, x[None], jnp.array([4])), 1, id="ragged"
        ),
        pytest.param(lambda x: x * x, 0, id="none"),
    ],
)
def test_products_are_found_everywhere(fn, count):
    assert len(products(fn, X)) == count


def test_a_product_names_the_types_of_its_factors():
    image = jax.ShapeDtypeStruct((1, 8, 8, 3), jnp.float16)
    kernel = jax.ShapeDtypeStruct((3, 3, 3, 4), jnp.float16)
    conv = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="SAME",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )
    assert products(conv, image, kernel) == [
        Product("conv_general_dilated", "float16", "float16", "")
    ]
    mixed = functools.partial(
        lax.dot_general, dimension_numbers=(((1,), (0,)), ((), ()))
    )
    assert products(mixed, X, X.astype(jnp.bfloat16)) == [
        Product("dot_general", "float32", "bfloat16", "")
    ]
