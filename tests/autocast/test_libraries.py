"""Test that Equinox, Diffrax and Optimistix keep plain JAX's gradients."""

import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.support.near import assert_near
from tests.support.programs import equations, products

# A machine that `make gpu` runs on may not have them.
eqxi = pytest.importorskip("equinox.internal")
diffrax = pytest.importorskip("diffrax")
optimistix = pytest.importorskip("optimistix")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.standard_promotion,
    # Equinox raises its errors from a callback, which is opaque to autocast.
    pytest.mark.filterwarnings("ignore::jamp.AutocastWarning"),
]

W = jnp.asarray(np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)) / 3
X = jnp.array([1.0, 2.0, -1.0, 0.5])


def step(w, x):
    return jnp.tanh(w @ x)


def while_loop(w, x):
    return eqxi.while_loop(
        lambda c: c[0] < 4,
        lambda c: (c[0] + 1, step(w, c[1])),
        (0, x),
        kind="checkpointed",
        max_steps=8,
    )[1]


def solution(w, x):
    term = diffrax.ODETerm(lambda t, y, w: step(w, y) - y)
    controller = diffrax.PIDController(rtol=1e-2, atol=1e-2)
    args = term, diffrax.Heun(), 0.0, 1.0, 0.25, x, w
    options = {"stepsize_controller": controller, "max_steps": 16}
    return diffrax.diffeqsolve(*args, **options).ys[0]


def fixed_point(w, x):
    solver = optimistix.FixedPointIteration(1e-3, 1e-3)
    fn = lambda y, args: step(args[0], y) / 2 + args[1]  # noqa: E731
    return optimistix.fixed_point(fn, solver, x, (w, x)).value


PROGRAMS = {
    "checkpointed_while_loop": while_loop,
    "diffeqsolve": solution,
    "fixed_point": fixed_point,
}


# Half has 3 digits, and a solver chooses its steps by their errors.
assert_close = functools.partial(assert_near, most=0.02)


@pytest.mark.parametrize("name", PROGRAMS)
def test_values_and_gradients_of_a_library(name):
    def evaluated(fn):
        loss = lambda w: (fn(w, X) ** 2).sum()  # noqa: E731
        return jax.jit(jax.value_and_grad(loss))(W)

    fn = PROGRAMS[name]
    cast = jamp.autocast(fn)
    assert_close(evaluated(cast), evaluated(fn))
    assert "float16" in {p.lhs for p in products(cast, W, X)}


def test_a_vmapped_equinox_primitive_keeps_the_programs_dtype():
    """`vmap` wraps a primitive of `create_vprim` in one named `vprim`."""
    seen = set()

    def triple(x):
        seen.add(x.dtype.name)
        return [3 * x]

    jvp = lambda primals, tangents: (tripled.bind(*primals), triple(*tangents))  # noqa: E731
    tripled = eqxi.create_vprim("tripled", triple, lambda x: [x], jvp, None)

    def fn(w, x):
        return jax.vmap(lambda row: tripled.bind(row @ w)[0] @ w)(x)

    gradient = jax.grad(lambda w, fn: (fn(w, W) ** 2).sum())
    cast = jamp.autocast(fn)
    with warnings.catch_warnings():
        warnings.simplefilter("error", jamp.AutocastWarning)
        assert {(p.lhs, p.rhs) for p in products(cast, W, W)} == {("float16",) * 2}
    assert equations(fn, ["vprim"], W, W)
    assert_close((cast(W, W), gradient(W, cast)), (fn(W, W), gradient(W, fn)))
    assert seen == {"float32"}
