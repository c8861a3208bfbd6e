"""Test the FLOPs that `jamp.explain` counts against numbers derived by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from tests.support.constructs import repeat


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


def flops(fn, *args):
    return [op.flops for op in jamp.explain(fn)(*args).operations if op.flops]


def einsum(subscripts):
    return functools.partial(jnp.einsum, subscripts)


def conv(padding="VALID", stride=(1,), **options):
    options |= {"padding": padding, "window_strides": stride}
    return functools.partial(lax.conv_general_dilated, **options)


IMAGES = ("NHWC", "HWIO", "NHWC")
# Batch 4, 2 input features, 5 output features, 10 positions, a kernel of 3.
LINES = (4, 2, 10), (5, 2, 3)


@pytest.mark.parametrize(
    "fn, lhs, rhs, expected",
    [
        (einsum("bij,bjk->bik"), (3, 8, 16), (3, 16, 4), 3 * 2 * 8 * 16 * 4),
        (einsum("ij,j->i"), (8, 16), (16,), 2 * 8 * 16),
        (conv(), *LINES, 2 * 4 * 5 * 2 * (8 * 3)),
        # FLOPs on padding count.
        (conv("SAME"), *LINES, 2 * 4 * 5 * 2 * (10 * 3)),
        (conv("SAME", (2,)), *LINES, 2 * 4 * 5 * 2 * (5 * 3)),
        # 4 examples in 2 groups give 2 outputs. Each of the 6 features reads one group.
        (conv(batch_group_count=2), (4, 2, 10), (6, 2, 3), 2 * 2 * 6 * 2 * (8 * 3)),
        # 6 features in 3 groups: each of the 12 outputs reads 2 of them.
        (
            conv(stride=(1, 1), dimension_numbers=IMAGES, feature_group_count=3),
            *((2, 9, 7, 6), (3, 2, 2, 12)),
            2 * 2 * 12 * 2 * (7 * 3) * (6 * 2),
        ),
    ],
)
def test_flops_of_a_product(fn, lhs, rhs, expected):
    assert flops(fn, shape(*lhs), shape(*rhs)) == [expected]


def test_flops_of_ragged_products():
    def loss(x, w):
        return lax.ragged_dot(x, w, jnp.array([1, 3])).sum()

    # Each of 4 rows meets one of the two (8, 3) matrices, also in both derivatives.
    expected = 2 * 4 * 8 * 3
    assert flops(loss, shape(4, 8), shape(2, 8, 3)) == [expected]
    backward = flops(jax.grad(loss, argnums=(0, 1)), shape(4, 8), shape(2, 8, 3))
    assert set(backward) == {expected} and len(backward) >= 2


def test_scans_multiply_and_while_loops_do_not():
    def fn(x, w):
        body = lambda c, _: repeat(lambda c, _: c @ w, c, length=3)  # noqa: E731
        x = repeat(body, x, length=5)
        return lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ w, x)

    operations = jamp.explain(fn)(shape(8, 8), shape(8, 8)).operations
    found = [(op.path, op.flops) for op in operations if op.flops]
    assert found == [(("scan", "scan"), 15 * 1024), (("while body",), 1024)]


def test_share_in_half():
    fn = lambda x, w, v: jamp.float_function(jnp.matmul)(x @ w, v)  # noqa: E731
    # The half matmul has 2 * 8 * 8 * 24 FLOPs, the float32 one 2 * 8 * 24 * 2.
    found = jamp.explain(fn)(shape(8, 8), shape(8, 24), shape(24, 2))
    assert [op.flops for op in found.operations] == [3072, 768]
    assert found.half_share == 0.8
    # A product of integers has no FLOPs, and without FLOPs the share is None.
    found = jamp.explain(jnp.matmul)(*2 * [shape(8, 8, dtype=jnp.int8)])
    assert [op.flops for op in found.operations] == [None]
    assert (found.half_share, found.warnings) == (None, ())
