"""Test users' programs at O2 and O5: float32 values do not widen their matmuls."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jamp
import jamp.nnx
from tests.policy.forward_models import normal, products
from tests.support.programs import evaluate
from tests.support.states import SGD, make

pytestmark = [pytest.mark.slow, pytest.mark.standard_promotion]

HALF = {"O2": "float16", "O5": "bfloat16"}
WIDTH, X = 8, normal(2, 6, 8)
MASK = np.tril(np.ones((6, 6), bool))


def weights(*names, width=WIDTH):
    shapes = {name: normal(width, width, seed=i) for i, name in enumerate(names)}
    return {name: x / width**0.5 for name, x in shapes.items()}


# Ways to write attention scores, each with one float32 value.
SCORES = {
    "numpy sqrt": lambda q, k, p: q @ k.mT / np.sqrt(WIDTH),
    "numpy scale": lambda q, k, p: q @ k.mT * np.float32(WIDTH**-0.5),
    "float32 mask": lambda q, k, p: (q @ k.mT) * MASK.astype(np.float32),
    "own float32": lambda q, k, p: (q @ k.mT).astype(jnp.float32),
    "float32 products": lambda q, k, p: jnp.matmul(
        q.astype(jnp.float32), k.mT.astype(jnp.float32)
    ),
    "kept temperature": lambda q, k, p: q @ k.mT / p["temperature"],
    "mask of -1e30": lambda q, k, p: jnp.where(MASK, q @ k.mT, -1e30),
}


@pytest.mark.parametrize("name", SCORES)
def test_no_float32_value_leaves_a_product_in_float32(name):
    level = list(HALF)[list(SCORES).index(name) % 2]
    params = weights("q", "k", "v", "out") | {"temperature": jnp.float32(2.0)}

    def loss_fn(params, x):
        q, k, v = (x @ params[n] for n in "qkv")
        attention = jax.nn.softmax(SCORES[name](q, k, params))
        return jnp.square(attention @ v @ params["out"]).mean()

    state = make(level, params, SGD, loss_scale=8.0, keep_fp32="temperature")
    step = jamp.scaled_value_and_grad(loss_fn)
    found = products(step, state, X)
    assert found == [f"{HALF[level]},{HALF[level]}"] * 15
    loss, grads = evaluate(step, state, X)
    expected, exact = jax.value_and_grad(loss_fn)(params, X)
    np.testing.assert_allclose(loss, expected, rtol=0.02)
    far = jax.tree.map(jnp.subtract, grads, exact)
    assert optax.tree.norm(far) <= 0.03 * optax.tree.norm(exact)


def mlp(params, x):
    for w in params.values():
        x = jnp.tanh(x @ w)
    return x


def test_the_loss_around_a_model_and_a_teacher_stay_float32():
    params = weights("a", "b", "c")
    state = make("O5", params, SGD, apply_fn=mlp)

    def loss_fn(half, x):
        z = state.apply_fn(half, x)  # three matmuls
        teacher = mlp(params, z)
        return jnp.square(z @ z.T).mean() + jnp.square(teacher).mean()

    found = products(jamp.scaled_grad(loss_fn), state, X[0])
    # z @ z.T has three matmuls with its gradients, and the teacher's layers six.
    assert found.count("float32,float32") == 3 + 3 + 3
    assert found.count("bfloat16,bfloat16") == 3 + 5
    assert len(found) == 9 + 8


def in_shard_map(body, params, x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    specs = {"in_specs": (P(), P("data")), "out_specs": P("data")}
    return jax.shard_map(functools.partial(body), mesh=mesh, **specs)(params, x)


def in_custom_vjp(body, params, x):
    fn = jax.custom_vjp(body)
    fn.defvjp(lambda p, x: jax.vjp(body, p, x), lambda pull, g: pull(g))
    return fn({"half": params["half"]}, x) @ params["kept"]


@pytest.mark.parametrize("where", [in_shard_map, in_custom_vjp])
def test_kept_and_half_params_inside_calls(where):
    def body(params, x):
        x = x @ params["half"]
        return x @ params["kept"] if "kept" in params else x

    forward = functools.partial(where, body)
    state = make("O2", weights("half", "kept"), SGD, keep_fp32="kept", apply_fn=forward)
    run = lambda state: state.apply_fn(state.params, X[0])  # noqa: E731
    assert products(run, state) == ["float16,float16", "float32,float32"]


@pytest.mark.parametrize("level, promote", [("O2", "widest"), ("O5", None)])
def test_promote_and_lists_select_what_runs_in_half(level, promote):
    def stream(params, x):
        return x + x @ params["w"]

    products_in_float32 = jamp.AutocastLists().with_primitive("dot_general", "float32")
    options = {"apply_fn": stream, "promote": promote}
    for lists, half in ((None, HALF[level]), (products_in_float32, "float32")):
        state = make(level, weights("w"), SGD, **options, lists=lists)
        found = products(lambda s: s.apply_fn(s.params, X), state)
        assert found == [f"{half},{half}"]
        small = jnp.full((3, WIDTH), np.float32(1 + 2.0**-12))
        out = state.apply_fn({"w": jnp.zeros_like(state.params["w"])}, small)
        is_float32 = promote == "widest" or half == "float32"
        assert (out[0, 0] == small[0, 0]) == is_float32


def test_nnx_attention_runs_at_o2_on_the_cpu():
    # JAX chooses a half matmul here that the CPU does not have.
    attention = nnx.MultiHeadAttention(2, WIDTH, decode=False, rngs=nnx.Rngs(0))
    model, optimizer = jamp.nnx.initialize(attention, optax.sgd(0.1), "O2", verbosity=0)
    loss_fn = lambda model, x: jnp.square(model(x)).mean()  # noqa: E731
    grad = nnx.jit(jamp.nnx.scaled_value_and_grad(loss_fn))
    loss, grads = grad(model, optimizer, X)
    assert jnp.isfinite(optax.tree.norm(grads)) and loss > 0


@pytest.mark.parametrize(
    "norm, level", [(nn.LayerNorm, "O2"), (functools.partial(nn.GroupNorm, 2), "O5")]
)
def test_a_norm_is_rounded_once(norm, level):
    half = jnp.dtype(HALF[level])
    x = (10 + normal(64, WIDTH)).astype(half)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            identity = lambda *_: jnp.eye(WIDTH)  # noqa: E731
            x = nn.Dense(WIDTH, use_bias=False, kernel_init=identity)(x)
            return norm(name="norm")(x)

    variables = Model().init(jax.random.key(0), jnp.ones((1, WIDTH)))
    scales = {k: 1 + 0.3 * normal(WIDTH) for k in variables["params"]["norm"]}
    params = {**variables["params"], "norm": scales}
    state = make(level, params, SGD, keep_fp32=None, apply_fn=Model().apply)
    found = jax.jit(state.apply_fn)({"params": state.params}, x)
    own = {"params": state.params["norm"]}
    expected = norm(dtype=half).apply(own, x)
    # Another order of sums changes few last digits. A second rounding would change a
    # third of them.
    assert (found.astype(half) == expected).mean() > 0.99


def summed_products(p, x):
    step = lambda c, row: (c + (row.astype(jnp.float32) @ p["head"])[0], None)  # noqa: E731
    return jax.lax.scan(step, 0.0, x)[0] / len(x)


HEADS = {
    "promoted": lambda p, x: (x @ p["head"]).mean(),
    "cast": lambda p, x: (x.astype(jnp.float32) @ p["head"]).mean(),
    "after a matmul": lambda p, x: (x @ p["w"] @ p["head"]).mean(),
    "einsum": lambda p, x: jnp.einsum("ij,jk->k", x, p["head"])[0] / len(x),
    "in a checkpoint": lambda p, x: jax.checkpoint(jnp.matmul)(x, p["head"]).mean(),
    "in a jit": lambda p, x: jax.jit(jnp.matmul)(x, p["head"]).mean(),
    "in a scan": summed_products,
    "beside a half input": lambda p, x: ((x * x) @ p["head"]).mean(),
}


ROWS_OF_PARAMS = {
    "embedding": lambda p: p["e"][jnp.arange(4)],
    "mean": lambda p: p["e"][jnp.zeros((4, 3), int)].mean(1),
    "positions": lambda p: p["e"][jnp.zeros(4, int)] + 0 * p["w"][:4],
    "queries": lambda p: p["e"] * p["e"],
    "constant batch": lambda p: jnp.ones((4, WIDTH), jnp.bfloat16) * 1,
}


@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("name", ROWS_OF_PARAMS)
def test_a_kept_head_multiplies_values_of_half_params_in_float32(name, level):
    params = {"head": jnp.full((WIDTH, 1), 1.001), "w": jnp.eye(WIDTH)}
    params["e"] = jnp.ones((4, WIDTH))
    state = make(level, params, SGD, loss_scale=1.0, keep_fp32="head")
    loss_fn = lambda p: (ROWS_OF_PARAMS[name](p) @ p["head"]).mean()  # noqa: E731
    loss, _ = evaluate(jamp.scaled_value_and_grad(loss_fn), state)
    np.testing.assert_allclose(loss, WIDTH * 1.001, rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("level", HALF)
@pytest.mark.parametrize("name", HEADS)
def test_a_kept_head_multiplies_half_data_in_float32(name, level, dtype):
    params = {"head": jnp.full((WIDTH, 1), 1.001), "w": jnp.eye(WIDTH)}
    state = make(level, params, SGD, loss_scale=1.0, keep_fp32="head")
    x = jnp.ones((4, WIDTH), dtype)
    loss, _ = evaluate(jamp.scaled_value_and_grad(HEADS[name]), state, x)
    np.testing.assert_allclose(loss, WIDTH * 1.001, rtol=1e-6)
