"""Autocast on a mesh of explicit axes, as `jax.make_mesh` gives it, jitted and not."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import jamp
from tests.autocast.constructs import TABLE
from tests.autocast.test_coverage import TOLERANCE, W, X, both_passes, distance
from tests.support.extent import more

half = functools.partial(jamp.autocast, dtype="float16")
NOT_OF_JAX = ("conv", "ragged_dot", "dot_product_attention_after_norms", "shard_map")
# Their rules have products that sum over a sharded axis.
NOT_OF_JAX += ("custom_vjp", "custom_vjp_with_symbolic_zeros")
CONSTRUCTS = [name for name in TABLE if name not in NOT_OF_JAX]
# Where a carry or a branch would be sharded otherwise, or a sum goes over an axis.
NOT_BY_COLUMNS = "scan scan_over_layers while_loop cond integers_first labels"
NOT_BY_COLUMNS += " custom_vjp_in_remat_in_vmap"


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
    "relu": lambda w, x: jax.nn.relu(x @ w) @ w,
}


@pytest.fixture(autouse=True)
def mesh():
    axes = (AxisType.Explicit,) * 2
    with jax.set_mesh(jax.make_mesh((4, 2), ("data", "model"), axis_types=axes)):
        yield


# How it runs, and where both operands lie. In CI a few, of all that JAX takes.
WAYS = {
    "rows": (jax.jit, (P(), P("data"))),
    "columns": (jax.jit, (P(None, "model"), P("data"))),
    "not jitted": (lambda fn: fn, (P(), P("data"))),
}
ABSENT = {"columns": NOT_BY_COLUMNS, "not jitted": "cond"}
FEW = {
    "rows": "matmul scan cond while_loop remat nested_jit vmap_out grad_in custom_jvp "
    "closed_over softmax one_hot labels norm bias",
    "columns": "matmul remat vmap_out nested_jit",
    "not jitted": "matmul scan custom_jvp softmax labels bias",
}
CASES = [
    (way, name)
    for way in WAYS
    for name in (*CONSTRUCTS, *LOSSES)
    if name not in ABSENT.get(way, "").split()
    if name in FEW[way].split() or more("SWEEP", [name])
]


@pytest.mark.parametrize(("way", "name"), CASES)
@pytest.mark.eight_devices
def test_a_construct_is_as_without_autocast(way, name):
    place, specs = WAYS[way]
    operands = [jax.device_put(x, spec) for x, spec in zip((W, X), specs, strict=True)]
    name = LOSSES.get(name, name)
    both = (both_passes(name, f).__wrapped__ for f in (half, lambda f: f))
    cast, plain = (place(fn)(*operands) for fn in both)
    assert jax.tree.map(jax.typeof, cast) == jax.tree.map(jax.typeof, plain)
    errors = jax.tree.map(distance, cast, plain)
    assert max(jax.tree.leaves(errors)) <= TOLERANCE, errors


@pytest.mark.eight_devices
def test_a_step_outside_of_jit():
    def loss(params, x):
        logits = jax.nn.relu(x @ params["first"]) @ params["second"]
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels())
        return losses.mean()

    def step(state, x):
        value, grads = jamp.scaled_value_and_grad(loss)(state, x)
        return value, grads, state.apply_gradients(grads=grads).params

    params = {"first": jax.device_put(W, P()), "second": jax.device_put(W.T, P())}
    state = jamp.initialize(params, optax.sgd(0.1), "O5", verbosity=0)
    x = jax.device_put(X, P("data"))
    (value, grads, new), jitted = step(state, x), jax.jit(step)(state, x)
    expected = jax.value_and_grad(loss)(params, x)
    assert distance(value, expected[0]) <= TOLERANCE
    errors = jax.tree.map(distance, grads, expected[1])
    assert max(jax.tree.leaves(errors)) <= 8 * TOLERANCE
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(jitted[2]), strict=True):
        assert jax.typeof(a) == jax.typeof(b)
        np.testing.assert_allclose(*(np.float32(x) for x in (a, b)), rtol=2**-7)


def in_fp8(params, x):
    h = x * params["one"]
    h = jnp.tanh(h @ params["first"]) @ params["second"]
    return jnp.square(h @ params["third"]).mean()


@pytest.mark.parametrize("place", [jax.jit, lambda fn: fn], ids=["jit", "eager"])
@pytest.mark.eight_devices
def test_products_in_fp8(place):
    square = np.random.default_rng(0).normal(size=(3, 16, 16)).astype(np.float32)
    params = dict(zip(("first", "second", "third"), square / 4, strict=True))
    params["one"] = np.float32(1)
    x = np.random.default_rng(1).normal(size=(8, 16)).astype(np.float32)
    options = {"fp8": jamp.Fp8(smallest=1), "opt_level": "O6", "verbosity": 0}
    state = jamp.initialize(jax.device_put(params, P()), optax.sgd(0.1), **options)
    step = place(jamp.scaled_value_and_grad(in_fp8))
    placed = jax.device_put(x, P("data"))
    assert str(jax.make_jaxpr(step)(state, placed)).count("f8_e5m2[") >= 2
    loss, grads = step(state, placed)
    expected, plain = jax.value_and_grad(in_fp8)(params, jnp.asarray(x))
    assert distance(loss, expected) <= 0.05
    for name in ("first", "second", "third"):
        assert distance(grads[name], plain[name]) <= 0.2, name
