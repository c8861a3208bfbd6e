"""Weights that all trips of a loop share: one sum for each, in float32."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jamp
from benchmarks import h200
from jamp._autocast import frames, sums
from tests.autocast.constructs import custom_vjp, repeat
from tests.programs import evaluate, walk

N = 8
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32) / 3  # noqa: E731
W, XS, START = {"i": normal(N, N), "h": normal(N, N)}, normal(5, 2, N), jnp.ones((2, N))
HALVES = {"float16": "f16", "bfloat16": "bf16"}
halves = pytest.mark.parametrize("half", HALVES)


def once(w, xs):
    """Each weight is read once: all that is done to them can be done before."""
    both = lambda: jnp.concatenate([w["i"], w["h"].T])  # noqa: E731
    beside = lambda *arrays: jnp.concatenate(arrays, axis=1)  # noqa: E731
    return repeat(lambda c, x: jnp.tanh(beside(x, c) @ both()), START, xs)


def twice(w, xs):
    """One weight is read by itself too, and on the left."""

    def trip(c, x):
        first, second = jnp.split(x @ jnp.concatenate([w["i"], w["h"].T], 1), 2, axis=1)
        return jnp.tanh(first + (w["h"] @ c.T).T * second)

    return repeat(trip, START, xs)


def printing(w, xs):
    def trip(c, x):
        jax.debug.print("{}", c.sum())
        return c + x @ jnp.concatenate([w["i"], w["h"]]).reshape(2, N, N).sum(0)

    return repeat(trip, START, xs)


def mapped(fn):
    mesh = jax.make_mesh((1,), ("d",))
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P()), out_specs=P())


WRAPS = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "shard_map": mapped,
    "scan": lambda fn: lambda w, xs: repeat(lambda c, x: c + fn(w, xs), START, xs),
    "cond": lambda fn: (
        lambda w, xs: jax.lax.cond(xs[0, 0, 0] < 9, fn, lambda w, xs: START, w, xs)
    ),
    "while": lambda fn: (
        lambda w, xs: jax.lax.fori_loop(
            0, xs.astype(int)[0, 0, 0] + 2, lambda _, c: c + fn(w, xs), START
        )
    ),
    "custom_vjp": lambda fn: custom_vjp(
        fn, lambda *args: (fn(*args), args), lambda args, _: args
    ),
}


def innermost(fn):
    """How many constants the innermost scan takes, and its program."""
    found = walk(jax.make_jaxpr(fn)(W, XS))
    (*_, scan) = (e for e in found if e.primitive.name == "scan")
    return frames.scan_counts(scan)[0], str(scan.params["jaxpr"])


def assert_close(ours, plain, half):
    results = [jax.tree.leaves(evaluate(fn, W, XS)) for fn in (ours, plain)]
    for a, b in zip(*results, strict=True):
        assert np.linalg.norm(a - b) <= 30 * jnp.finfo(half).eps * np.linalg.norm(b)


@pytest.mark.parametrize("name", WRAPS)
def test_what_rearranges_constants_is_done_before_the_loop(name):
    fn = WRAPS[name](once)
    consts, body = innermost(jamp.autocast(fn))
    assert (consts, innermost(fn)[0]) == (1, 2)
    assert body.count("concatenate[") == 1 and "transpose[" not in body
    assert_close(jamp.autocast(fn), fn, "float16")


@pytest.mark.parametrize("fn", [twice, printing])
def test_what_is_read_twice_or_has_effects_stays(fn):
    consts, body = innermost(jamp.autocast(fn))
    assert consts == innermost(fn)[0] == 2 and "concatenate[" in body


def total(fn):
    return lambda w, xs: jnp.square(fn(w, xs)).sum()


DERIVATIVES = {
    "of both": lambda f: jax.grad(total(f), argnums=(0, 1)),
    "of inputs": lambda f: jax.grad(total(f), argnums=1),
    "forward": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "of weights": lambda f: lambda w, x: jax.jvp(lambda w: f(w, x), (w,), (w,)),
    "of examples": lambda f: (
        lambda w, x: jax.vmap(jax.grad(total(f)), (None, 0))(w, jnp.stack([x, 2 * x]))
    ),
    "second": lambda f: lambda w, x: jax.jvp(jax.grad(total(f)), (w, x), (w, x)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name):
    half = list(HALVES)[list(DERIVATIVES).index(name) % 2]
    for fn in (once, twice):
        ours = jamp.autocast(fn, half)
        assert_close(DERIVATIVES[name](ours), DERIVATIVES[name](fn), half)


@halves
def test_a_sum_over_many_trips_is_exact(half):
    """In bfloat16 it would stop at 256, in float16 at 2,048."""
    fn = jamp.autocast(
        lambda w, x: jax.lax.scan(lambda c, x: (c, x @ w), 0, x)[1], half
    )
    grad = jax.grad(lambda w: fn(w, jnp.ones((2500, 1, 2))).sum())
    np.testing.assert_array_equal(grad(jnp.ones((2, 2))), 2500)


@halves
@pytest.mark.parametrize("promote", ["widest", "narrowest"])
def test_what_reads_a_gate_reads_the_same_digits(half, promote):
    """A mean of ones is one, whatever weighs them."""

    def cell(h, x):
        gate = jax.nn.sigmoid(x @ W["i"] + h @ W["h"])
        return (1 - gate) * h + gate * jnp.tanh(x @ W["i"] + 20)

    cast = jamp.autocast(lambda xs: repeat(cell, START, xs), half, promote=promote)
    np.testing.assert_allclose(evaluate(cast, XS), 1, rtol=1e-6)


@pytest.mark.h200
@halves
def test_on_a_gpu_a_product_is_added_where_it_is_computed(half):
    def cell(w, xs):
        step = lambda c, x: jnp.tanh(x @ w["i"] + c @ w["h"])  # noqa: E731
        return repeat(step, jnp.ones((64, 1024)), xs)

    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    shapes = (
        {"i": shape((1024, 1024)), "h": shape((1024, 1024))},
        shape((256, 64, 1024)),
    )
    program = h200.compile_step(jax.grad(total(jamp.autocast(cell, half))), *shapes)
    assert {dtype for pair in program.products for dtype in pair} == {HALVES[half]}
    # By weight and trip: 24 bytes if products were written first.
    assert program.traffic / 256 / (2 * 1024**2) <= 20


@pytest.mark.parametrize("capability", ["7.5", "9.0", "10.0"])
@halves
def test_gpus_that_multiply_no_bfloat16_get_no_algorithm(half, capability, monkeypatch):
    devices = [types.SimpleNamespace(compute_capability=capability)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    refused = (half, capability) == ("bfloat16", "7.5")
    assert sums.has_algorithm(jnp.dtype(half)) == (not refused)
