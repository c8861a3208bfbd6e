"""Functions with derivatives of their own that close over values, under autocast.

The numbers are small integers, which half holds exactly: gradients are plain JAX's.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.ode import odeint
from jax.sharding import PartitionSpec as P

import jamp
from tests.constructs import repeat

ORDER = np.array([2, 0, 1])
BACK = np.argsort(ORDER)
SCALE = jnp.array([3.0, 1.0, 2.0])
X, Y = jnp.array([1.0, 2.0, 3.0]), jnp.array([2.0, 4.0, 5.0])


def custom_vjp(fn, fwd, bwd, nondiff_argnums=(), **options):
    function = jax.custom_vjp(fn, nondiff_argnums=nondiff_argnums)
    function.defvjp(fwd, bwd, **options)
    return function


def permuted(order=ORDER, **options):
    """`x[order]² y`; its residuals are its arguments, in the other order."""
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


def gradient(x, y):
    @jax.custom_gradient
    def fn(x):
        return x[ORDER] ** 2 * 2, lambda g: (g * x * 3)[BACK]

    return fn(x) * y


def converted(x, y):
    apply = custom_vjp(
        lambda fn, x, *rest: fn(x, *rest),
        lambda fn, x, *rest: (fn(x, *rest), (x, rest)),
        lambda fn, saved, g: jax.vjp(fn, saved[0], *saved[1])[1](2 * g),
        nondiff_argnums=(0,),
    )
    fn, rest = jax.closure_convert(lambda x: x[ORDER] * y, x)
    return apply(fn, x, *rest)


def solution(x, y):
    times = jnp.array([0.0, 0.5, 1.0])
    return odeint(lambda u, t, p: SCALE - u * p, x, times, y)[-1]


def mapped(x, y):
    mesh = jax.make_mesh((1,), ("d",))
    return jax.shard_map(square, mesh=mesh, in_specs=P(), out_specs=P())(x, y)


CLOSURES = {
    "array": lambda x, y: scaled(x) * y,
    "numpy": square,
    "indices": permuted(jnp.asarray(ORDER)),
    "nondiff_argnums": functools.partial(power, 2),
    "optimize_remat": rematerialised,
    "custom_gradient": gradient,
    "closure_convert": converted,
    "odeint": solution,
    "twice": lambda x, y: square(square(x, y) / 4, y),
    "in_jit": jax.jit(square),
    "in_grad": lambda x, y: jax.grad(lambda x: square(x, y).sum())(x),
    "in_scan": lambda x, y: repeat(lambda c, _: square(c, y) / 4, x, length=2),
    "over_slices": lambda x, y: lax.scan(
        lambda c, row: (c + square(row, y), square(c, row)), x, jnp.stack([y, x])
    ),
    "in_fori_loop": lambda x, y: lax.fori_loop(0, 2, lambda i, c: square(c, y) / 4, x),
    "in_cond": lambda x, y: lax.cond(x[0] > 0, square, lambda x, y: x, x, y),
    "in_remat": jax.checkpoint(lambda x, y: square(x, y) + rematerialised(y, x)),
    "in_vmap": lambda x, y: jax.vmap(square, (0, None))(jnp.stack([x, y]), y),
    "in_shard_map": mapped,
}
GRADS = {
    "first": lambda loss: jax.grad(loss),
    "both": lambda loss: jax.grad(loss, (0, 1)),
    "jit": lambda loss: jax.jit(jax.grad(loss, (0, 1))),
    "vmap": lambda loss: (
        lambda x, y: jax.vmap(jax.grad(loss, (0, 1)))(
            jnp.stack([x, y]), jnp.stack([y, x])
        )
    ),
}


def total(fn):
    return lambda x, y: sum(out.sum() for out in jax.tree.leaves(fn(x, y)))


@pytest.mark.parametrize("grad", GRADS.values(), ids=GRADS)
@pytest.mark.parametrize("name", CLOSURES)
def test_gradients_of_what_closes_over_arrays(name, grad):
    fn = CLOSURES[name]
    got, expected = (grad(total(f))(X, Y) for f in (jamp.autocast(fn), fn))
    # An ODE solver's steps are no integers, and its residuals pass through products.
    rtol = 1e-3 if name == "odeint" else 0
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol, strict=True)
        assert np.any(np.asarray(b))


def product_with(y):
    return custom_vjp(lambda x: x * y, lambda x: (x * y, x), lambda x, g: (g * x * 2,))


def reversed_by(y):
    return custom_vjp(lambda x: x, lambda x: (x, None), lambda _, g: (-g * y,))


def kept(y):
    return custom_vjp(lambda x: x, lambda x: (x, y), lambda y, g: (-g * y,))


def by_argument(y):
    """The value is in a function that is given, as in JAX's own solvers."""
    apply = custom_vjp(
        lambda fn, x: fn(x),
        lambda fn, x: (fn(x), x),
        lambda fn, x, g: (3 * fn(g),),
        nondiff_argnums=(0,),
    )
    return functools.partial(apply, lambda x: x * y)


class Layer:
    def __init__(self, y):
        self.parts = {"y": [y]}

    def __call__(self, x):
        layer = custom_vjp(lambda x: x, lambda x: (x, x), self.backward)
        return layer(x)

    def backward(self, x, g, factor=2):
        return (self.parts["y"][0] * g * x * factor,)


TRACED = {
    "all": product_with,
    "bwd": reversed_by,
    "fwd": kept,
    "argument": by_argument,
    "attribute": Layer,
    "intermediate": lambda y: product_with(lax.stop_gradient(y * 2 + 1)),
    "two": lambda y: product_with(reversed_by(y)(y) * 3),
}


@pytest.mark.parametrize("grad", ["first", "jit", "vmap"])
@pytest.mark.parametrize("name", TRACED)
def test_gradients_of_what_closes_over_traced_values(name, grad):
    def fn(x, y):
        return TRACED[name](y)(x)

    def evaluated(cast):
        derivative = jax.grad(total(cast(fn)))
        if grad == "vmap":
            return jax.vmap(derivative)(jnp.stack([X, Y]), jnp.stack([Y, X]))
        return (jax.jit(derivative) if grad == "jit" else derivative)(X, Y)

    got, expected = evaluated(jamp.autocast), evaluated(lambda fn: fn)
    np.testing.assert_array_equal(got, expected, strict=True)
    assert np.any(np.asarray(expected))


def test_a_closed_over_value_has_no_derivative():
    def fn(x, y):
        return custom_vjp(lambda x: x * y, lambda x: (x * y, x), lambda x, g: (g,))(x)

    with pytest.raises(Exception, match="with respect to a closed-over value"):
        jax.grad(total(jamp.autocast(jax.jit(fn))), 1)(X, Y)


def test_what_closes_over_a_traced_value_in_a_loop_is_told_what_to_do():
    def fn(x, y):
        return lax.fori_loop(0, 2, lambda _, x: product_with(y)(x), x)

    for cast in (jax.jit, jamp.autocast):  # plain JAX refuses it too
        with pytest.raises(Exception, match="[Tt]racer") as error:
            jax.grad(total(cast(fn)))(X, Y)
    assert "pass it as one more argument" in "".join(error.value.__notes__)


# ---- symbolic zeros


def test_the_rule_of_a_vjp_sees_what_is_perturbed_and_what_is_zero():
    seen = []

    def fwd(x, y):
        seen.append((x.perturbed, y.perturbed))
        return (x.value * y.value, y.value), (x.value, y.value)

    def bwd(saved, g):
        seen.append(
            tuple(isinstance(c, jax.custom_derivatives.SymbolicZero) for c in g)
        )
        return g[0] * saved[1], None

    fn = custom_vjp(lambda x, y: (x * y, y), fwd, bwd, symbolic_zeros=True)

    def look(cast):
        seen.clear()
        grad = jax.grad(lambda x: cast(lambda x, y: fn(x, y)[0])(x, Y).sum())(X)
        return list(seen), grad

    (flags, expected), (got, grad) = look(lambda fn: fn), look(jamp.autocast)
    assert got == flags == [(True, False), (False, True)]
    np.testing.assert_array_equal(grad, expected)


@pytest.mark.parametrize("argnums", [0, 1, (0, 1)])
def test_the_rule_of_a_jvp_sees_what_is_zero(argnums):
    seen = []

    @jax.custom_jvp
    def fn(x, y):
        return x * y, x

    def rule(primals, tangents):
        zeros = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]
        seen.append(zeros)
        x, y = primals
        terms = [
            a * t for a, t, z in zip((y, x), tangents, zeros, strict=True) if not z
        ]
        return (x * y, x), (sum(terms), tangents[0])

    fn.defjvp(rule, symbolic_zeros=True)

    def look(cast):
        seen.clear()
        grad = jax.grad(total(cast(fn)), argnums)(X, Y)
        return list(seen), grad

    (zeros, expected), (got, grads) = look(lambda fn: fn), look(jamp.autocast)
    assert got[0] == zeros[0]
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(a, b)
