"""Weights that all trips of a loop share: one sum for each, in float32."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jamp
from jamp._autocast import jax_internals, weight
from tests import h200
from tests.programs import evaluate, walk

N, TRIPS = 8, 5
rng = np.random.default_rng(0)
normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32) / 3  # noqa: E731
WEIGHTS = {"i": normal(N, N), "h": normal(N, N), "bias": normal(N)}
XS = normal(TRIPS, 2, N)
HALVES = {"float16": "f16", "bfloat16": "bf16"}
halves = pytest.mark.parametrize("half", HALVES)


def joined(w, xs):
    """The weights side by side, as a Flax LSTM has its gates'; the one first, once."""

    def trip(c, x):
        both = jnp.concatenate([w["i"], w["h"].T], axis=1)
        first, second = jnp.split(x @ both, 2, axis=1)
        return jnp.tanh(first + (w["h"] @ c.T).T * second + w["bias"]), None

    return jax.lax.scan(trip, jnp.ones((2, N)), xs)[0]


def once(w, xs):
    """Each weight is read once: all that is done to them can be done before."""

    def trip(c, x):
        both = jnp.concatenate([w["i"], w["h"].T])
        return jnp.tanh(jnp.concatenate([x, c], axis=1) @ both + w["bias"][None]), None

    return jax.lax.scan(trip, jnp.ones((2, N)), xs)[0]


def mapped(fn):
    mesh = jax.make_mesh((1,), ("d",))
    return jax.shard_map(fn, mesh=mesh, in_specs=(P(), P()), out_specs=P())


WRAPS = {
    "plain": lambda fn: fn,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "shard_map": mapped,
    "scan": lambda fn: (
        lambda w, xs: jax.lax.scan(
            lambda c, _: (c + fn(w, xs), None), jnp.zeros((2, N)), None, 2
        )[0]
    ),
}


def bodies(fn):
    scans = (
        e for e in walk(jax.make_jaxpr(fn)(WEIGHTS, XS)) if e.primitive.name == "scan"
    )
    return [(jax_internals.scan_counts(e)[0], str(e.params["jaxpr"])) for e in scans]


@pytest.mark.parametrize("name", WRAPS)
def test_what_rearranges_constants_is_done_before_the_loop(name):
    fn = WRAPS[name](once)
    consts, body = bodies(jamp.autocast(fn))[-1]
    assert consts == 2 and body.count("concatenate[") == 1  # of the input and the carry
    assert "transpose[" not in body and bodies(fn)[-1][0] == 3
    assert_close(jamp.autocast(fn), fn, "float16")


def assert_close(ours, plain, half):
    got, expected = (
        jax.tree.leaves(evaluate(lambda w, x, fn=fn: fn(w, x), WEIGHTS, XS))
        for fn in (ours, plain)
    )
    limit = 30 * float(jnp.finfo(half).eps)
    for a, b in zip(got, expected, strict=True):
        assert np.linalg.norm(a - b) <= limit * np.linalg.norm(b)


def test_what_is_read_twice_or_has_effects_stays():
    def noisy(w, xs):
        def trip(c, x):
            jax.debug.print("{}", c.sum())
            return c + x @ jnp.concatenate([w["i"], w["h"]], axis=1), None

        return jax.lax.scan(trip, jnp.ones((2, 2 * N)), xs)[0]

    for fn in (joined, noisy):
        ((_, body),) = bodies(jamp.autocast(fn))
        assert "concatenate[" in body
        assert bodies(fn)[0][0] == bodies(jamp.autocast(fn))[0][0]


def total(fn):
    return lambda w, xs: jnp.square(fn(w, xs)).sum()


DERIVATIVES = {
    "of both": lambda fn: jax.grad(total(fn), argnums=(0, 1)),
    "of inputs": lambda fn: jax.grad(total(fn), argnums=1),
    "forward": lambda fn: lambda w, xs: jax.jvp(fn, (w, xs), (w, xs))[1],
    "of weights, forward": lambda fn: (
        lambda w, xs: jax.jvp(lambda w: fn(w, xs), (w,), (w,))[1]
    ),
    "each example's": lambda fn: (
        lambda w, xs: jax.vmap(jax.grad(total(fn)), (None, 0))(
            w, jnp.stack([xs, 2 * xs])
        )
    ),
    "second": lambda fn: (
        lambda w, xs: jax.jvp(jax.grad(total(fn)), (w, xs), (w, xs))[1]
    ),
}


@halves
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives(name, half):
    for fn in (joined, once):
        ours = functools.partial(jamp.autocast, dtype=half)
        assert_close(DERIVATIVES[name](ours(fn)), DERIVATIVES[name](fn), half)


@halves
def test_a_sum_over_many_trips_is_exact(half):
    """In bfloat16 it would stop at 256, in float16 at 2,048."""
    fn = jamp.autocast(
        lambda w, x: jax.lax.scan(lambda c, x: (c, x @ w), 0, x)[1], half
    )
    grad = jax.grad(lambda w: fn(w, jnp.ones((2500, 1, 2))).sum())
    np.testing.assert_array_equal(grad(jnp.ones((2, 2))), 2500)


@pytest.mark.h200
@halves
def test_on_a_gpu_a_product_is_added_where_it_is_computed(half):
    size, trips = 1024, 256
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    w = {"i": shape((size, size)), "h": shape((size, size)), "bias": shape((size,))}

    def cell(w, xs):
        trip = lambda c, x: (jnp.tanh(x @ w["i"] + c @ w["h"]), None)  # noqa: E731
        return jax.lax.scan(trip, jnp.ones((64, size)), xs)[0]

    grad = jax.grad(total(jamp.autocast(cell, half)))
    program = h200.compile_step(grad, w, shape((trips, 64, size)))
    assert {dtype for pair in program.products for dtype in pair} == {HALVES[half]}
    per_weight = program.traffic / trips / (2 * size**2)
    assert per_weight <= 20, per_weight  # 24 if it were written first


@pytest.mark.parametrize("capability", ["7.5", "9.0", "10.0"])
@halves
def test_gpus_that_multiply_no_bfloat16_get_no_algorithm(half, capability, monkeypatch):
    devices = [types.SimpleNamespace(compute_capability=capability)]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    refused = (half, capability) == ("bfloat16", "7.5")
    assert weight.has_algorithm(jnp.dtype(half)) == (not refused)
