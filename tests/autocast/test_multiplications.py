"""Test that a `dot_general` without a matmul is cast as `mul` or `reduce_sum`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.support.constructs import AROUND
from tests.support.states import make

LEVELS = ("O0", "O1", "O2", "O4", "O5", "O6")
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731

# Einsums and the shapes of their operands, by rule.
CALLS = {
    "promote": {
        "i,j->ij": ((3,), (4,)),
        "bi,bj->bij": ((2, 3), (2, 4)),
        "b,bd->bd": ((2,), (2, 4)),
        "ik,kj->ij": ((3, 1), (1, 4)),
    },
    "float32": {
        "d,d->": ((4,), (4,)),
        "bd,bd->b": ((2, 4), (2, 4)),
        "bid,bdj->bij": ((2, 1, 4), (2, 4, 1)),
    },
    "half": {
        "bd,d->b": ((2, 4), (4,)),
        "bij,bj->bi": ((2, 3, 4), (2, 4)),
        "bi,ij->bj": ((1, 3), (3, 4)),
    },
}


@pytest.mark.parametrize(
    ("rule", "spec"), [(rule, spec) for rule in CALLS for spec in CALLS[rule]]
)
def test_which_rule_an_einsum_follows(rule, spec):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in CALLS[rule][spec]]
    found = jamp.explain(lambda *args: jnp.einsum(spec, *args))(*args).operations
    (op,) = (op for op in found if op.primitive == "dot_general")
    assert (op.rule, op.flops is not None) == (rule, rule == "half")
    assert ("Matrix units" in op.reason) == (rule == "half")


T, FREQUENCIES = jnp.arange(1024.0), 1.0 / 10000.0 ** (jnp.arange(0, 64, 2) / 64)
EXACT = np.cos(np.arange(1024.0)[:, None] * np.asarray(FREQUENCIES, float))


@pytest.mark.parametrize(
    "around", ["plain", "jit", "vmap", "scan", "custom_jvp", "custom_vjp"]
)
def test_rotary_angles_keep_their_digits_at_every_level(around):
    outer = AROUND[around](lambda t: jnp.einsum("i,j->ij", t, FREQUENCIES))

    def loss_fn(params):
        return (params["w"] ** 2).sum(), jnp.cos(outer(T))

    for level in LEVELS:
        state = make(level, {"w": jnp.ones(2)})
        (_, got), _ = jamp.scaled_value_and_grad(loss_fn, has_aux=True)(state)
        np.testing.assert_allclose(got, EXACT, atol=1e-4, err_msg=level)
    for promote in ("widest", "narrowest"):
        cast = jamp.autocast(lambda: loss_fn({"w": T})[1], promote=promote)
        np.testing.assert_allclose(cast(), EXACT, atol=1e-4, err_msg=promote)


X, W, Y = normal(8, 64) * 60, normal(64, 64) / 8, normal(8, 64)
NORMS = {
    "einsum": lambda h: jnp.einsum("bd,bd->b", h, h),
    "vmap": lambda h: jax.vmap(jnp.dot)(h, h),
    "matmul": lambda h: (h[:, None] @ h[:, :, None])[:, 0, 0],
    "sum": lambda h: (h * h).sum(-1),
}


def normalized_loss(params, squared):
    h = X @ params["w"]  # its rows have norms of 480, whose squares overflow float16
    return ((h / jnp.sqrt(squared(h))[:, None] - Y) ** 2).mean()


def exact_gradient():
    x, w, y = (np.asarray(a, float) for a in (X, W, Y))
    h = x @ w
    norm = np.sqrt((h * h).sum(-1, keepdims=True))
    g = 2 * (h / norm - y) / y.size
    return x.T @ (g / norm - h * (g * h).sum(-1, keepdims=True) / norm**3)


@pytest.mark.slow
@pytest.mark.parametrize("norm", NORMS)
def test_an_inner_product_is_a_sum_in_float32(norm):
    rule = jamp.DynamicLossScale(init_scale=16.0)
    for level in LEVELS:
        state = make(
            level, {"w": W}, loss_scale=rule if level in ("O1", "O2") else None
        )
        grads = jamp.scaled_grad(normalized_loss)(state, NORMS[norm])
        error = np.linalg.norm(np.asarray(grads["w"], float) - exact_gradient())
        eps = 2.0**-7 if level in ("O4", "O5", "O6") else 2.0**-10
        assert error <= 4 * eps * np.linalg.norm(exact_gradient()), level


def test_the_gradient_of_a_matvec_is_an_outer_product():
    penalty = jax.grad(lambda w, t: jnp.cos(w @ t).sum())  # - sin(w @ t) ⊗ t
    w, t = jnp.zeros((4, 3)), jnp.asarray([1001.0, 3.0, 5.0])
    np.testing.assert_array_equal(jamp.autocast(penalty)(w, t), jnp.zeros((4, 3)))
    ones = jax.grad(lambda w, t: (w @ t).sum())  # 1 ⊗ t, of float32 operands
    for promote in ("widest", "narrowest"):
        cast = jamp.autocast(ones, "bfloat16", promote=promote)
        np.testing.assert_array_equal(cast(w, t)[0], t)
