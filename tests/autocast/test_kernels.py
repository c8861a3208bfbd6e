"""Test half kernels, which autocast calls with half operands and does not rewrite."""

import contextlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.support.constructs import AROUND
from tests.support.programs import products

HALVES = (jnp.float16, jnp.bfloat16)
X = jnp.linspace(-2.0, 2.0, 12).reshape(3, 4)


def only(dtype):
    """Returns `sin` with a derivative. Both accept one dtype only."""

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
def test_a_kernel_runs_in_half_forward_and_backward(name):
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
    """Returns the dtypes with which `fn` calls its kernel under autocast."""
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


def test_a_kernel_returns_the_operands_dtype_and_its_body_is_untouched():
    @jamp.half_kernel
    def kernel(x):
        wide = x.astype(jnp.float32)
        half = (wide @ wide.T).astype(x.dtype) @ x
        return {"half": half, "sum": wide.sum(), "at": x.argmax()}

    def dtypes(x):
        return {key: str(y.dtype) for key, y in jamp.autocast(kernel)(x).items()}

    assert dtypes(X) == {"half": "float32", "sum": "float32", "at": "int32"}
    assert dtypes(X.astype("float16"))["half"] == "float16"
    found = [p.lhs for p in products(jamp.autocast(kernel), X)]
    assert found == ["float32", "float16"]


def test_outside_autocast_a_kernel_is_the_plain_function():
    kernel = jax.jit(
        jamp.half_kernel(lambda x: jnp.sin(x) if x.dtype == "float16" else x)
    )
    for _ in range(2):
        np.testing.assert_array_equal(kernel(X), X)
        assert not np.array_equal(jamp.autocast(kernel)(X), X)


@pytest.mark.parametrize("disabled", [False, True])
def test_custom_vjp_rules_call_kernels(disabled):
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


def test_a_registered_kernel_is_replaced_in_its_module():
    module = types.SimpleNamespace(kernel=only(jnp.float16))
    lists = jamp.AutocastLists().register_half_kernel(module, "kernel")
    kernel = module.kernel
    got = jamp.autocast(lambda x: module.kernel(x), lists=lists)(X)
    np.testing.assert_allclose(got, np.sin(X), atol=1e-3)
    assert module.kernel is kernel
