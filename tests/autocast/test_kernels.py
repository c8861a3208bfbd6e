"""Functions that only run in half: called with half under autocast, and left alone."""

import contextlib
import functools
import types
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import jamp
from benchmarks import h200
from jamp._autocast import jax_internals
from tests.support.by_jamp import amp_init, amp_step
from tests.support.constructs import AROUND
from tests.support.programs import products

HALVES = (jnp.float16, jnp.bfloat16)
X = jnp.linspace(-2.0, 2.0, 12).reshape(3, 4)

both = pytest.mark.parametrize("half", HALVES, ids=str)


@pytest.fixture(autouse=True)
def no_warning():
    """Autocast does not look into a kernel, and gives no warning about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", jamp.AutocastWarning)
        yield


def only(dtype):
    """A kernel of one dtype: sin, with a derivative that is as picky."""

    @jax.custom_vjp
    def kernel(x):
        assert x.dtype == dtype
        return jnp.sin(x)

    def backward(x, cotangent):
        assert x.dtype == cotangent.dtype == dtype
        return (cotangent * jnp.cos(x),)

    kernel.defvjp(lambda x: (kernel(x), x), backward)
    return kernel


WAYS = ["plain", "jit", "vmap", "checkpoint", "scan", "cond"]


@pytest.mark.parametrize("name", WAYS)
def test_a_kernel_gets_half_and_gives_float32_and_so_do_its_gradients(name):
    half = HALVES[WAYS.index(name) % 2]
    called = AROUND[name](jamp.half_kernel(only(half)))
    x64 = np.asarray(X.astype(half), np.float64)

    def loss(x):
        y = called(x)
        assert y.dtype == jnp.float32
        return (3.0 * y).sum()

    eps = float(jnp.finfo(half).eps)
    for grad in (
        jax.grad(jamp.autocast(loss, half)),
        jamp.autocast(jax.grad(loss), half),
    ):
        got = grad(X)
        assert got.dtype == jnp.float32
        np.testing.assert_allclose(got, 3 * np.cos(x64), rtol=4 * eps, atol=4 * eps)
    got = jamp.autocast(called, half)(X)
    np.testing.assert_allclose(got, np.sin(x64), rtol=eps, atol=eps)


def dtypes_in(fn, *args, **options):
    """The dtypes with which `fn(kernel, *args)` calls its kernel under autocast."""
    seen = []

    @jamp.half_kernel
    def kernel(*args, **kwargs):
        leaves = jax.tree.leaves((args, kwargs))
        seen.append(" ".join(str(getattr(x, "dtype", x)) for x in leaves))
        return args[0]

    jax.make_jaxpr(jamp.autocast(lambda *args: fn(kernel, *args), **options))(*args)
    return seen


def disabled(kernel, x):
    with jamp.disable_casts():
        kernel(x)
        return jamp.promote_function(kernel)(x)


CALLS = {
    "arrays": (lambda k, x: k(x, {"b": np.ones(2, np.float32)}), ["float16 float16"]),
    "options": (lambda k, x: k(x, 2.0, np.float32(3)), ["float16 2.0 float32"]),
    "others": (lambda k, x: k(x, x > 0, x.argmax()), ["float16 bool int32"]),
    "own half": (lambda k, x: k(x.astype("bfloat16"), x), ["bfloat16 float16"]),
    "a product": (lambda k, x: k(x @ x.T), ["float16"]),
    "disable_casts": (disabled, ["float32", "float16"]),
    "float_function": (lambda k, x: jamp.float_function(k)(x), ["float32"]),
    "half_function": (lambda k, x: jamp.half_function(k)(x), ["float16"]),
    "inner autocast": (lambda k, x: jamp.autocast(k, "bfloat16")(x), ["bfloat16"]),
}


@pytest.mark.parametrize("case", CALLS)
def test_which_operands_are_cast(case):
    fn, expected = CALLS[case]
    assert dtypes_in(fn, X) == expected


def test_results_come_back_in_the_dtype_of_the_operands_and_inside_all_stays():
    @jamp.half_kernel
    def kernel(x):
        wide = x.astype(jnp.float32)
        half = (wide @ wide.T).astype(x.dtype) @ x
        return {"half": half, "sum": wide.sum(), "at": x.argmax()}

    def dtypes(x):
        return {key: str(y.dtype) for key, y in jamp.autocast(kernel)(x).items()}

    assert dtypes(X) == {"half": "float32", "sum": "float32", "at": "int32"}
    assert dtypes(X.astype("float16"))["half"] == "float16"  # asked for by the program
    found = [p.lhs for p in products(jamp.autocast(kernel), X)]
    assert found == ["float32", "float16"]


def test_outside_of_autocast_it_is_the_function_also_if_it_was_jitted():
    kernel = jax.jit(
        jamp.half_kernel(lambda x: jnp.sin(x) if x.dtype == "float16" else x)
    )
    for _ in range(2):
        np.testing.assert_array_equal(kernel(X), X)
        assert not np.array_equal(jamp.autocast(kernel)(X), X)


@pytest.mark.parametrize("disabled", [False, True])
def test_the_users_rules_of_custom_functions_call_kernels_too(disabled):
    seen = []

    @jamp.half_kernel
    def kernel(x):
        seen.append(str(x.dtype))
        return x

    @jax.custom_vjp
    def pulled(x):
        return x

    pulled.defvjp(lambda x: (kernel(x), None), lambda _, g: (kernel(g),))

    def loss(x):
        with jamp.disable_casts() if disabled else contextlib.nullcontext():
            return pulled(x).sum()

    assert jax.grad(jamp.autocast(loss))(X).dtype == jnp.float32
    assert seen == ["float32" if disabled else "float16"] * 2


def test_registered_kernels_are_called_so_where_they_are_looked_up():
    module = types.SimpleNamespace(kernel=only(jnp.float16))
    lists = jamp.AutocastLists().register_half_kernel(module, "kernel")
    kernel = module.kernel
    got = jamp.autocast(lambda x: module.kernel(x), lists=lists)(X)
    np.testing.assert_allclose(got, np.sin(X), atol=1e-3)
    assert module.kernel is kernel


@pytest.fixture
def with_cudnn(monkeypatch):
    """A machine without a GPU has no cuDNN whose version JAX could ask for."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)


attention = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")


class Block(nn.Module):
    """Attention as users write it, between two layers."""

    @nn.compact
    def __call__(self, x, train=True):
        q, k, v = (nn.DenseGeneral((8, 64))(x) for _ in range(3))
        return nn.DenseGeneral(10, axis=(-2, -1))(attention(q, k, v, is_causal=True))


def calls_and_scores(program):
    """The calls of cuDNN's attention with the dtypes of their results, and the arrays
    that are as large as the scores of 8 heads, 128 x 128."""
    found = [i for c in program.computations.values() for i in c.values()]
    target = r'custom_call_target="__cudnn\$fmha([^"]+)"'
    targets = [(i.attribute(target), i) for i in found]
    calls = {name: i.shape[1:].partition("[")[0] for name, i in targets if name}
    return calls, [i.shape for i in found if "128,128]" in i.shape]


@pytest.mark.h200
@pytest.mark.standard_promotion
def test_a_step_calls_cudnn_forward_and_backward(with_cudnn):
    x = jax.ShapeDtypeStruct((4, 128, 32), jnp.float32)
    init = jamp.autocast(Block().init)  # it calls the kernel, too
    variables = jax.eval_shape(init, jax.random.key(0), x)
    begin = functools.partial(amp_init, Block(), tx=optax.sgd(0.1), level="O5")
    labels = jax.ShapeDtypeStruct((4, 128), jnp.int32)
    program = h200.compile_step(amp_step, jax.eval_shape(begin, variables), x, labels)
    calls = {"Softmax": "bf16", "SoftmaxBackward": "bf16"}
    assert calls_and_scores(program) == (calls, [])


def attend(np, q, k, v, bias):
    """Attention, by its formula."""
    scores = np.einsum("btnh,bsnh->bnts", q, k) / 2.0 + bias
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, v)


@both
def test_a_mask_beyond_half_leaves_a_row_of_nothing_else_finite(half, monkeypatch):
    def fake_cudnn(*operands, **options):
        assert {x.dtype for x in operands[:4]} == {jnp.dtype(half)}
        wide = [x.astype(jnp.float32) for x in operands[:4]]
        return attend(jnp, *wide).astype(half)

    module, name = jax_internals.cudnn_attention()
    monkeypatch.setattr(module, name, fake_cudnn)
    from jax.nn import dot_product_attention  # nobody can replace this name

    x = jnp.arange(24.0).reshape(1, 3, 2, 4) / 24
    bias = jnp.where(jnp.arange(3)[:, None] > jnp.arange(3), 0.0, -3.4e38)[None, None]

    def fn(x, bias):
        return dot_product_attention(x, x, x, bias, implementation="cudnn")

    got = jamp.autocast(fn, half)(x, bias)
    x64, bias64 = np.asarray(x, np.float64), np.asarray(bias, np.float64)
    expected = attend(np, x64, x64, x64, bias64)[:, 1:]
    np.testing.assert_allclose(got[:, 1:], expected, atol=2 * jnp.finfo(half).eps)
    # All is masked there: any weights will do.
    assert (got[:, 0] >= x.min(1)).all() and (got[:, 0] <= x.max(1)).all()
    assert getattr(module, name) is fake_cudnn
