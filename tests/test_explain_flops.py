"""FLOPs as `jamp.explain` counts them, each number derived by hand."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp


def shape(*sizes, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(sizes, dtype)


X = shape(8, 8)


def flops(fn, *args):
    return [op.flops for op in jamp.explain(fn)(*args).operations if op.flops]


@pytest.mark.parametrize(
    "subscripts, lhs, rhs, expected",
    [
        ("ij,jk->ik", (8, 16), (16, 4), 2 * 8 * 16 * 4),
        ("bij,bjk->bik", (3, 8, 16), (3, 16, 4), 3 * 2 * 8 * 16 * 4),
        ("ij,j->i", (8, 16), (16,), 2 * 8 * 16),
        ("i,i->", (7,), (7,), 2 * 7),
        ("i,j->ij", (7,), (5,), 2 * 7 * 5),
    ],
)
def test_flops_of_a_product(subscripts, lhs, rhs, expected):
    assert flops(jnp.einsum, subscripts, shape(*lhs), shape(*rhs)) == [expected]


# Batch 4, 2 input features, 5 output features, 10 positions, a kernel of 3.
@pytest.mark.parametrize(
    "options, expected",
    [
        ({"padding": "VALID"}, 2 * 4 * 5 * 2 * (8 * 3)),
        # At both ends, one of the three places lies in the padding.
        ({"padding": "SAME"}, 2 * 4 * 5 * 2 * (10 * 3 - 2)),
        # The last of 5 outputs starts at 8 and reads beyond the end once.
        ({"padding": "SAME", "window_strides": (2,)}, 2 * 4 * 5 * 2 * (5 * 3 - 1)),
        # 7 outputs start at -3 ... 3; the first 3 miss their first place.
        ({"padding": [(3, 0)], "rhs_dilation": (3,)}, 2 * 4 * 5 * 2 * (7 * 3 - 3)),
        # 19 places of which every other one is a hole; 17 outputs start at 0 ... 16:
        # the 9 even ones meet 2 values, the 8 odd ones 1.
        ({"padding": [(0, 0)], "lhs_dilation": (2,)}, 2 * 4 * 5 * 2 * (9 * 2 + 8)),
    ],
)
def test_flops_of_a_convolution(options, expected):
    options = {"window_strides": (1,), **options}
    conv = functools.partial(lax.conv_general_dilated, **options)
    assert flops(conv, shape(4, 2, 10), shape(5, 2, 3)) == [expected]


def test_flops_of_a_convolution_of_images_in_groups():
    conv = functools.partial(
        lax.conv_general_dilated,
        window_strides=(1, 1),
        padding="VALID",
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
        feature_group_count=3,
    )
    # 6 features in 3 groups: each of the 12 outputs reads 2 of them.
    found = flops(conv, shape(2, 9, 7, 6), shape(3, 2, 2, 12))
    assert found == [2 * 2 * 12 * 2 * (7 * 3) * (6 * 2)]


def test_flops_of_a_convolution_in_batch_groups():
    options = {"window_strides": (1,), "padding": "VALID", "batch_group_count": 2}
    conv = functools.partial(lax.conv_general_dilated, **options)
    # 4 examples in 2 groups are 2 outputs; each of the 6 features reads one group.
    found = flops(conv, shape(4, 2, 10), shape(6, 2, 3))
    assert found == [2 * 2 * 6 * 2 * (8 * 3)]


def test_flops_of_ragged_products():
    def loss(x, w):
        return lax.ragged_dot(x, w, jnp.array([1, 3])).sum()

    # Each of 4 rows meets one of the two (8, 3) matrices; so in both derivatives.
    expected = 2 * 4 * 8 * 3
    assert flops(loss, shape(4, 8), shape(2, 8, 3)) == [expected]
    backward = flops(jax.grad(loss, argnums=(0, 1)), shape(4, 8), shape(2, 8, 3))
    assert set(backward) == {expected} and len(backward) >= 2


def test_scans_multiply_and_while_loops_do_not():
    def fn(x, w):
        def inner(c, _):
            return c @ w, None

        def outer(c, _):
            return lax.scan(inner, c, None, length=3)[0], None

        x, _ = lax.scan(outer, x, None, length=5)
        return lax.while_loop(lambda c: c.sum() < 1, lambda c: c @ w, x)

    explanation = jamp.explain(fn)(X, X)
    first, second = (op for op in explanation.operations if op.flops)
    assert (first.path, first.flops) == (("scan", "scan"), 15 * 1024)
    assert (second.path, second.flops) == (("while body",), 1024)
    scans = [op for op in explanation.operations if op.primitive == "scan"]
    assert [op.trips for op in scans] == [5, 3]
    loops = [op for op in explanation.operations if op.primitive == "while"]
    assert [op.trips for op in loops] == [None]


def two_products(x, w, v):
    return jamp.float_function(jnp.matmul)(x @ w, v)


def test_share_in_half():
    # 2 * 8 * 8 * 24 in half, 2 * 8 * 24 * 8 / 3 in float32.
    explanation = jamp.explain(two_products)(X, shape(8, 24), shape(24, 2))
    assert explanation.matmul_flops == 3072 + 768
    assert explanation.half_matmul_flops == 3072
    assert explanation.half_share == 0.8


def test_share_without_products_is_none():
    explanation = jamp.explain(jnp.tanh)(X)
    assert (explanation.matmul_flops, explanation.half_share) == (0, None)


def test_products_of_integers_do_not_count():
    explanation = jamp.explain(jnp.matmul)(
        shape(8, 8, dtype=jnp.int8), shape(8, 8, dtype=jnp.int8)
    )
    assert [op.flops for op in explanation.operations] == [1024]
    assert explanation.matmul_flops == 0 and explanation.warnings == ()
