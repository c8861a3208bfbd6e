"""Test that the work of a trace is proportional to the size of the program."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import jamp
from jamp._autocast.run import jit_of
from tests.support.calls import calls_of
from tests.support.constructs import custom_vjp, repeat
from tests.support.states import make

pytestmark = pytest.mark.slow

W = jnp.eye(8)


def work(fn):
    """Counts the calls of our functions in a trace of `fn(w)`."""
    _, calls = calls_of(jax.make_jaxpr(fn), W)
    return sum(calls.values())


narrowest = functools.partial(jamp.autocast, promote="narrowest")


def gradient_at_o6(fn):
    state = make("O6", W, fp8=jamp.Fp8(smallest=1))
    grad = jamp.scaled_grad(lambda w: fn(w).sum())
    return lambda w: grad(state.replace(params=w.astype(state.params.dtype)))


def layers(depth):
    def fn(w):
        x = W
        for _ in range(depth):
            x = x + jnp.tanh(x) @ w
        return x

    return fn


def nested(around):
    """Nests a layer in `depth` calls of a transformation."""

    def of(depth):
        if not depth:
            return lambda w: jnp.tanh(w @ W)
        inner = of(depth - 1)
        return around(lambda w: jnp.tanh(inner(w) @ W))

    return of


def loops(depth):
    """Nests loops, each of which also carries a value that it does not multiply."""

    def of(depth):
        if not depth:
            return lambda x, w: x @ w
        inner = of(depth - 1)
        return lambda x, w: repeat(
            lambda c, _: (inner(c[0], w), c[0] * 2), (x, x), length=2
        )[1]

    return lambda w: of(depth)(W, w)


def trainer(rows):
    """Returns a custom derivative whose rule is a method of an object with data."""

    class Trainer:
        def __init__(self):
            self.rows = [(i, i) for i in range(rows)]

        def backward(self, _, g):
            return (2.0 * g,)

    rule = Trainer().backward
    return lambda w: custom_vjp(lambda x: x, lambda x: (x, None), rule)(w @ w)


CASES = {
    "layers, widest": (jamp.autocast, layers, 20),
    "layers, narrowest": (narrowest, layers, 20),
    "layers, O6": (gradient_at_o6, layers, 10),
    "loops, O6": (gradient_at_o6, loops, 4),
}
AROUND = {
    "jit": lambda fn: jax.jit(lambda x: fn(x)),
    "checkpoint": jax.checkpoint,
    "cond": lambda fn: lambda x: lax.cond(x[0, 0] > 0, fn, lambda x: x, x),
    "scan": lambda fn: lambda x: repeat(lambda c, _: fn(c), x, length=2),
    "while": lambda fn: lambda x: lax.while_loop(lambda c: c[0, 0] < 3, fn, x),
}
CASES |= {name: (jamp.autocast, nested(fn), 4) for name, fn in AROUND.items()}


def shared(around, fn):
    """Calls a function 2 ** depth times in a program with `depth` functions."""

    def of(depth):
        if not depth:
            return fn
        inner = of(depth - 1)
        return around(lambda x: inner(inner(x)))

    return of


def in_scan(fn):
    return lambda w: repeat(lambda c, _: fn(c), w, length=2)


LAYERS = {
    "matmul": lambda x: jnp.tanh(x @ W),
    "softmax": lambda x: jax.nn.softmax(x) * 2,
    "norm": lambda x: (x - x.mean(-1, keepdims=True)) @ W,
    "scan": lambda x: in_scan(lambda c: jnp.tanh(c @ W))(x),
}
for _name, _layer in LAYERS.items():
    CASES[f"shared, {_name}"] = (jamp.autocast, shared(jax.jit, _layer), 12)
for _name, _depth in (("checkpoint", 12), ("cond", 12), ("scan", 3)):
    _around = lambda fn, name=_name: jax.jit(AROUND[name](fn))  # noqa: E731
    CASES[f"shared in {_name}"] = narrowest, shared(_around, LAYERS["matmul"]), _depth
CASES["a scan of shared"] = (
    lambda fn: narrowest(in_scan(fn)),
    shared(jax.jit, LAYERS["matmul"]),
    12,
)


@pytest.mark.parametrize("name", CASES)
def test_the_work_of_a_trace_is_linear(name):
    mode, program, depth = CASES[name]
    once, twice = (work(mode(program(d))) for d in (depth, 2 * depth))
    # Caches hold what an earlier test traced. Each scan looks for gates in all programs
    # inside of it, so nested scans take a little more.
    bound = 2.3 if name == "shared in scan" else 2.1
    assert once < twice <= bound * once


def test_the_data_of_an_object_with_a_rule_is_not_searched():
    """Searching 200,000 rows would take two seconds per trace."""

    few, many = (work(jamp.autocast(trainer(rows))) for rows in (10, 10_000))
    assert few == many


def test_the_shared_functions_of_equations_hold_no_programs():
    """A cache that outlives a trace must not keep the user's arrays."""

    def traced():
        constant = jnp.ones(8)
        loop = lambda w: repeat(lambda c, _: c @ w + constant, W, length=3).sum()  # noqa: E731
        jax.make_jaxpr(jax.grad(jamp.autocast(loop)))(W)
        return weakref.ref(constant)

    before = jit_of.cache_info().currsize
    constant = traced()
    assert jit_of.cache_info().currsize - before < 20 and jit_of.cache_info().maxsize
    jax.clear_caches()
    gc.collect()
    assert constant() is None
