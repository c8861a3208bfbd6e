"""Test autocast on a mesh with explicit axes, jitted and not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jamp
from tests.autocast.test_coverage import TOLERANCE, W, X, both_passes
from tests.support.near import assert_near, distance
from tests.support.states import make

pytestmark = pytest.mark.slow

half = functools.partial(jamp.autocast, dtype="float16")


def labels():
    return jax.device_put(jnp.arange(8) % 8, P("data"))


LOSSES = {
    "softmax": lambda w, x: jax.nn.softmax(x @ w) @ w,
    "log_softmax": lambda w, x: jax.nn.log_softmax(x @ w),
    "one_hot": lambda w, x: jax.nn.log_softmax(x @ w) * jax.nn.one_hot(labels(), 8),
    "labels": lambda w, x: optax.softmax_cross_entropy_with_integer_labels(
        x @ w, labels()
    ),
    "norm": lambda w, x: jax.nn.standardize(x @ w) @ w,
    "bias": lambda w, x: jnp.maximum(x @ w + w[0], 0.1),
}


@pytest.fixture(autouse=True)
def mesh():
    axes = (AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=axes)):
        yield


# How a construct runs, the shardings of both operands, and constructs that JAX accepts.
WAYS = {
    "rows": (
        *(jax.jit, (P(), P("data"))),
        "matmul scan cond while_loop remat nested_jit vmap_out grad_in custom_jvp "
        "closed_over softmax one_hot labels norm bias",
    ),
    "columns": (
        *(jax.jit, (P(None, "model"), P("data"))),
        "matmul remat vmap_out nested_jit",
    ),
    "not jitted": (
        *(lambda fn: fn, (P(), P("data"))),
        "matmul scan custom_jvp softmax labels bias",
    ),
}
CASES = [(way, name) for way, (*_, names) in WAYS.items() for name in names.split()]


@pytest.mark.parametrize(("way", "name"), CASES)
@pytest.mark.eight_devices
def test_a_construct_agrees_with_the_plain_one(way, name):
    place, specs, _ = WAYS[way]
    operands = [jax.device_put(x, spec) for x, spec in zip((W, X), specs, strict=True)]
    name = LOSSES.get(name, name)
    both = (both_passes(name, f).__wrapped__ for f in (half, lambda f: f))
    cast, plain = (place(fn)(*operands) for fn in both)
    assert jax.tree.map(jax.typeof, cast) == jax.tree.map(jax.typeof, plain)
    assert_near(cast, plain, TOLERANCE)


def in_fp8(params, x):
    h = jnp.tanh(x * params["one"] @ params["w"][0]) @ params["w"][1]
    return jnp.square(h @ params["w"][2]).mean()


@pytest.mark.parametrize("place", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
@pytest.mark.eight_devices
def test_products_in_fp8(place):
    normal = np.random.default_rng(0).normal
    w = [normal(size=(16, 16)).astype(np.float32) / 4 for _ in range(3)]
    x, params = normal(size=(8, 16)).astype(np.float32), {"w": w, "one": np.float32(1)}
    state = make("O6", jax.device_put(params, P()), fp8=jamp.Fp8(smallest=1))
    step = place(jamp.scaled_value_and_grad(in_fp8))
    placed = jax.device_put(x, P("data"))
    assert str(jax.make_jaxpr(step)(state, placed)).count("f8_e5m2[") >= 2
    loss, grads = step(state, placed)
    expected, plain = jax.value_and_grad(in_fp8)(params, jnp.asarray(x))
    assert distance(loss, expected) <= 0.05
    assert max(map(distance, grads["w"], plain["w"])) <= 0.2
