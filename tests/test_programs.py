"""The walk of tests.programs: it must see a product in every kind of sub-program."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.constructs import TABLE, N, backwards
from tests.programs import Product, products

X = jnp.ones((N, N))
COUNTS = dict(matmul=1, nested_jit=3, scan=2, while_loop=2, switch=2, remat=2)
COUNTS |= dict(shard_map=3, ragged_dot=1, custom_vjp=3)


@pytest.mark.parametrize("name", COUNTS)
def test_products_are_found_everywhere(name):
    assert len(products(TABLE[name](lambda fn: fn), X, X)) == COUNTS[name]


def test_products_of_a_derivative_are_found_where_it_is_taken():
    assert len(products(jax.grad(jax.checkpoint(lambda x: (x @ x).sum())), X)) == 3
    assert len(products(jax.grad(lambda x: backwards(x, x, 1.0).sum()), X)) == 3
    assert products(lambda x: x * x, X) == []


def test_a_product_names_the_types_of_its_factors():
    image, kernel = jnp.ones((2, 1, 3, 8, 8), jnp.float16)
    (found,) = products(lambda x, w: lax.conv(x, w, (1, 1), "SAME"), image, kernel)
    assert found == Product("conv_general_dilated", "float16", "float16", "")
    numbers = ((1,), (0,)), ((), ())
    half = X.astype(jnp.bfloat16)
    (found,) = products(lambda x, w: lax.dot_general(x, w, numbers), X, half)
    assert found == Product("dot_general", "float32", "bfloat16", "")
