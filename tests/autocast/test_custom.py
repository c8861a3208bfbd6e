"""Test custom derivatives that close over values, under autocast."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jamp
from tests.support.constructs import custom_vjp
from tests.support.extent import slow_except
from tests.support.states import make

ORDER = np.array([2, 0, 1])
BACK = np.argsort(ORDER)
SCALE = jnp.array([3.0, 1.0, 2.0])
X, Y = jnp.array([1.0, 2.0, 3.0]), jnp.array([2.0, 4.0, 5.0])


def permuted(order=ORDER, **options):
    """Computes `x[order]² y`. The residuals are the arguments in reverse order."""
    return custom_vjp(
        lambda x, y: x[order] ** 2 * y,
        lambda x, y: (x[order] ** 2 * y, (y, x)),
        lambda saved, g: (
            (2 * saved[1][order] * saved[0] * g)[BACK],
            saved[1][order] ** 2 * g,
        ),
        **options,
    )


square = permuted()
rematerialised = permuted(optimize_remat=True)
scaled = custom_vjp(
    lambda x: x * SCALE, lambda x: (x * SCALE, x), lambda x, g: (g * SCALE * x,)
)
power = custom_vjp(
    lambda n, x, y: x[ORDER] * y * n,
    lambda n, x, y: (x[ORDER] * y * n, (x, y)),
    lambda n, saved, g: ((saved[1] * n * g)[BACK], saved[0][ORDER] * n * g),
    nondiff_argnums=(0,),
)


CLOSURES = {
    "array": lambda x, y: scaled(x) * y,
    "numpy": square,
    "indices": permuted(jnp.asarray(ORDER)),
    "in_remat": jax.checkpoint(lambda x, y: square(x, y) + rematerialised(y, x)),
    "nondiff_argnums": functools.partial(power, 2),
    "optimize_remat": rematerialised,
    "twice": lambda x, y: square(square(x, y) / 4, y),
}


def total(fn):
    return lambda x, y: sum(out.sum() for out in jax.tree.leaves(fn(x, y)))


def assert_same(evaluated, fn):
    """Checks that autocast changes no result, and that no result is all zeros."""
    got, expected = (evaluated(f) for f in (jamp.autocast(fn), fn))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
        assert np.any(np.asarray(b))


def mapped(fn):
    return jax.vmap(fn)(jnp.stack([X, Y]), jnp.stack([Y, X]))


@pytest.mark.parametrize("name", CLOSURES)
def test_gradients_of_rules_that_close_over_arrays(name):
    def gradients(fn):
        grad = jax.grad(total(fn), (0, 1))
        return grad(X, Y), mapped(grad)

    assert_same(gradients, CLOSURES[name])


def product_with(y):
    return custom_vjp(lambda x: x * y, lambda x: (x * y, x), lambda x, g: (g * x * 2,))


def reversed_by(y):
    return custom_vjp(lambda x: x, lambda x: (x, None), lambda _, g: (-g * y,))


def times_reference(y):
    times = custom_vjp(
        lambda x, ref: x * ref[...],
        lambda x, ref: (x * ref[...], ref[...]),
        lambda saved, g: (g * y * saved, None),
    )
    return lambda x: times(x, jax.new_ref(jnp.float32(3.0)))


def by_argument(y):
    """Closes an argument over the value, as JAX's own solvers do."""
    apply = custom_vjp(
        lambda fn, x: fn(x),
        lambda fn, x: (fn(x), x),
        lambda fn, x, g: (3 * fn(g),),
        nondiff_argnums=(0,),
    )
    return functools.partial(apply, lambda x: x * y)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    """A pytree, like an Equinox module."""

    parts: Any

    @classmethod
    def of(cls, y):
        return cls({"y": [y]})

    def __call__(self, x):
        return custom_vjp(lambda x: x, lambda x: (x, x), self.backward)(x)

    def backward(self, x, g, factor=2):
        return (self.parts["y"][0] * g * x * factor,)


TRACED = {
    "all": product_with,
    "bwd": reversed_by,
    "fwd": lambda y: custom_vjp(lambda x: x, lambda x: (x, y), lambda y, g: (-g * y,)),
    "argument": by_argument,
    "attribute": Layer.of,
    "default": lambda y: custom_vjp(
        lambda x: x, lambda x: (x, None), lambda _, g, y=y: (-g * y,)
    ),
    "intermediate": lambda y: product_with(lax.stop_gradient(y * 2 + 1)),
    "two": lambda y: product_with(reversed_by(y)(y) * 3),
    "beside a reference": times_reference,
}


@pytest.mark.parametrize("name", TRACED)
def test_gradients_of_rules_that_close_over_tracers(name):
    def gradients(fn):
        grad = jax.grad(total(fn))
        return grad(X, Y), jax.jit(grad)(X, Y), mapped(grad)

    assert_same(gradients, lambda x, y: TRACED[name](y)(x))


class Trainer:
    """An object other than a pytree, which autocast does not search for tracers."""

    def __init__(self, scale):
        self.scale = scale

    def backward(self, _, g):
        return (g * self.scale,)

    def __call__(self, x):
        return custom_vjp(lambda x: x, lambda x: (x, None), self.backward)(x)


HIDDEN = {
    "loop": lambda x, y: lax.fori_loop(0, 2, lambda _, x: product_with(y)(x), x),
    "object": lambda x, y: Trainer(y)(x),
}


@pytest.mark.parametrize("fn", HIDDEN.values(), ids=HIDDEN)
def test_an_error_about_a_hidden_tracer_says_what_to_do(fn):
    with pytest.raises(Exception, match="[Tt]racer"):  # JAX refuses it under jit
        jax.grad(total(jax.jit(fn)))(X, Y)
    with pytest.raises(Exception, match="[Tt]racer") as error:
        jax.grad(total(jamp.autocast(fn)))(X, Y)
    assert "Pass the array as an argument" in "".join(error.value.__notes__)
    assert_same(lambda fn: jax.grad(total(fn))(X, Y), lambda x, y: Trainer(2.0)(x))


def cubed(x):
    return x**3


@pytest.mark.parametrize("kind", [jax.custom_jvp, jax.custom_vjp])
def test_jax_prints_the_users_name_of_a_function(kind):
    function = kind(cubed)
    if kind is jax.custom_jvp:
        function.defjvp(lambda p, t: (cubed(*p), t[0]))
    else:
        function.defvjp(lambda x: (cubed(x), None), lambda _, g: (g,))
    assert "name=cubed" in str(jax.make_jaxpr(jamp.autocast(function))(X))


def test_a_leak_without_custom_rules_gets_no_advice_about_them():
    leaked = []
    jax.jit(lambda x: leaked.append(x + 1))(X)
    with pytest.raises(jax.errors.UnexpectedTracerError) as error:
        jamp.autocast(lambda x: x + leaked[0])(X)
    assert "derivative" not in "".join(getattr(error.value, "__notes__", []))


# A user's JVP rule whose tangent is multiplied by a float32 factor.
def _sech2(x):
    return 1 / jnp.cosh(x) ** 2


FACTORS = {
    "cos": (jnp.sin, jnp.cos, np.cos),
    "exp": (jnp.exp, jnp.exp, np.exp),
    "tanh": (lambda x: jnp.log(jnp.cosh(x)), jnp.tanh, np.tanh),
    "logistic": (jax.nn.softplus, jax.nn.sigmoid, lambda x: 1 / (1 + np.exp(-x))),
    "gelu": (jnp.tanh, _sech2, lambda x: 1 / np.cosh(x) ** 2),
    "softmax": (
        lambda x: x * jax.lax.stop_gradient(jax.nn.softmax(x)),
        jax.nn.softmax,
        lambda x: np.exp(x) / np.exp(x).sum(-1, keepdims=True),
    ),
}
ORDERS = {
    "tangent * factor": lambda t, f, x: t * f(x),
    "factor * tangent": lambda t, f, x: f(x) * t,
    "in float32": lambda t, f, x: (t.astype(jnp.float32) * f(x)).astype(t.dtype),
    "in a jit": lambda t, f, x: jax.jit(lambda t, x: t * f(x))(t, x),
    "twice": lambda t, f, x: (t / 2) * f(x) + f(x) * (t / 2),
}


@pytest.mark.parametrize("order", slow_except(["factor * tangent"], ORDERS))
@pytest.mark.parametrize("name", FACTORS)
@pytest.mark.parametrize("level", slow_except(["O1", "O4"], ["O1", "O2", "O4", "O5"]))
def test_a_tangent_times_a_float32_factor(level, name, order):
    function, factor, in_numpy = FACTORS[name]
    f = jax.custom_jvp(function)
    f.defjvp(lambda p, t: (function(*p), ORDERS[order](*t, factor, *p)))
    w = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)) / 2, jnp.float32)
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 4)) / 2, jnp.float32)
    state = make(level, {"w": w}, loss_scale=1.0)
    gradient = jamp.scaled_grad(lambda params, x: f(x @ params["w"]).sum())
    h = np.float64(x) @ np.float64(w)
    want = np.float64(x).T @ in_numpy(h)
    for run in (gradient, jax.jit(gradient)):
        # bfloat16 has 8 bits, and the gradient sums 8 products.
        np.testing.assert_allclose(run(state, x)["w"], want, rtol=0.05, atol=0.05)


def rows_times(x, w, ids):
    return x[ids] @ w


by_vjp = custom_vjp(
    rows_times,
    lambda *args: (rows_times(*args), args),
    lambda args, g: jax.vjp(rows_times, *args)[1](g),
)


def by_grad(x, w, ids):
    grads = jax.grad(lambda *args: by_vjp(*args).sum(), (0, 1, 2), allow_int=True)
    dx, dw, _ = grads(x, w, ids)
    return dx @ dw


# The derivative of an integer is a float0, which is no number.
OF_INTEGERS = {
    "custom_vjp": by_vjp,
    "jit": jax.jit(by_vjp),
    "checkpoint": jax.checkpoint(by_vjp),
    "scan": lambda x, w, ids: lax.scan(
        lambda c, i: (c + by_vjp(x, w, i[None]), None), jnp.zeros((1, 4)), ids
    )[0],
    "grad": by_grad,
}


@pytest.mark.parametrize("promote", ["widest", "narrowest"])
@pytest.mark.parametrize("name", OF_INTEGERS)
def test_a_rule_may_differentiate_a_function_of_integers(name, promote):
    fn, ids = OF_INTEGERS[name], jnp.array([1, 0, 1])
    x, w = jnp.arange(12.0).reshape(3, 4), jnp.arange(16.0).reshape(4, 4) / 4
    cast = jamp.autocast(fn, promote=promote)
    for got, want in zip(*(jax.vjp(f, x, w, ids) for f in (cast, fn)), strict=True):
        if callable(got):
            got, want = (pull(jnp.ones_like(fn(x, w, ids))) for pull in (got, want))
        jax.tree.map(np.testing.assert_array_equal, got, want)


ROW = np.linspace(0.5, 1, 4).astype("f4")


def scaled_rule(x):
    """Closes a custom function over an array of NumPy."""
    fn = custom_vjp(
        lambda x: jnp.tanh(x * ROW),
        lambda x: (jnp.tanh(x * ROW), x),
        lambda x, g: (g * jnp.cos(x) * ROW,),
    )
    return fn(x)


IN_BRANCHES = {
    "cond": lambda x: jax.vmap(
        lambda row, i: lax.cond(i > 0, scaled_rule, jnp.sin, row)
    )(x, jnp.arange(3)),
    "switch": lambda x: lax.switch(1, [jnp.sin, scaled_rule], x),
    "map": lambda x: lax.map(scaled_rule, x),
    "vmap of scan": lambda x: jax.vmap(
        lambda row: lax.scan(lambda c, _: (scaled_rule(c), c), row, length=2)[1]
    )(x),
    "jit in vmap": lambda x: jax.vmap(jax.jit(scaled_rule))(x),
    "checkpoint in vmap": lambda x: jax.vmap(jax.checkpoint(scaled_rule))(x),
}


@pytest.mark.parametrize("promote", ["widest", "narrowest"])
@pytest.mark.parametrize("name", IN_BRANCHES)
def test_a_rule_may_close_over_an_array_of_numpy(name, promote):
    fn, x = IN_BRANCHES[name], jnp.arange(12.0).reshape(3, 4) / 8
    cast = jamp.autocast(fn, "bfloat16", promote=promote)
    got, want = (jax.grad(lambda x: f(x).sum())(x) for f in (cast, fn))  # noqa: B023
    np.testing.assert_allclose(got, want, rtol=0.02, atol=0.02)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: cast(x).sum()))(x), got)
