"""BatchNorm whose batch is spread over devices: Flax's, with axis_name or under jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import jamp
from tests.devices.eight_devices import collectives
from tests.support.states import assert_skipped

# Flax's layers promote their inputs and params.
pytestmark = pytest.mark.standard_promotion

AXIS, LEVELS = "batch", ("O1", "O2", "O5")
MOMENTUM, EPS, RATE = 0.75, 1e-3, 0.125
OPTIONS = {"loss_scale": jamp.DynamicLossScale(init_scale=2.0**8), "verbosity": 0}
TX = optax.sgd(RATE, 0.9)


def numbers():
    """Weights, inputs and targets. Each device's rows have a mean of their own."""
    rng = np.random.default_rng(0)
    first, last = (rng.integers(-4, 5, size) / 4 for size in ((4, 8), (8, 2)))
    x = rng.integers(-2, 3, (32, 4)) / 2 + np.repeat(np.arange(8) / 2 - 2, 4)[:, None]
    y = rng.integers(-4, 5, (32, 2)) / 4
    return {k: np.float32(v) for k, v in dict(first=first, last=last, x=x, y=y).items()}


def begun():
    norm = {"scale": np.ones(8, np.float32), "bias": np.zeros(8, np.float32)}
    first, last = ({"kernel": numbers()[name]} for name in ("first", "last"))
    return {"layers_0": first, "layers_1": norm, "layers_2": last}


def start(level, axis_name, params):
    norm = nn.BatchNorm(False, axis_name=axis_name, momentum=MOMENTUM, epsilon=EPS)
    model = nn.Sequential([nn.Dense(8, False), norm, nn.Dense(2, False)])
    stats = {"layers_1": {"mean": jnp.zeros(8), "var": jnp.ones(8)}}
    fields = {"apply_fn": model.apply, "batch_stats": stats}
    return jamp.initialize(params, TX, level, **fields, **OPTIONS)


def step(state, x, y, axis_name=None):
    def loss_fn(params, x, y):
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
        return ((out.astype(jnp.float32) - y) ** 2).mean(), new["batch_stats"]

    grad = jamp.scaled_grad(loss_fn, has_aux=True, axis_name=axis_name)
    grads, batch_stats = grad(state, x, y)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats)


def step_all(states, x, y, axis_name=None):
    return {level: step(state, x, y, axis_name) for level, state in states.items()}


def mapped(mesh, check_vma):
    """The step of several states where each device has its rows."""
    specs = {"in_specs": (P(), P(AXIS), P(AXIS)), "out_specs": P()}
    by_hand = functools.partial(step_all, axis_name=AXIS)
    return jax.shard_map(by_hand, mesh=mesh, check_vma=check_vma, **specs)


@functools.cache
def on_one_device():
    """The same step of all rows; test_forward_linen holds what BatchNorm computes."""
    states = {level: start(level, None, begun()) for level in LEVELS}
    return jax.jit(step_all)(states, numbers()["x"], numbers()["y"])


# A step, and one in which one device's batch overflows


@pytest.mark.parametrize("way", ["replicated", "shard_map"])
@pytest.mark.eight_devices
def test_eight_devices_take_the_step_of_the_whole_batch(way):
    mesh = Mesh(jax.devices(), (AXIS,), axis_types=(AxisType.Auto,))
    by_hand = way == "shard_map"
    take = jax.jit(mapped(mesh, check_vma=True) if by_hand else step_all)
    axis_name = AXIS if by_hand else None
    params = jax.device_put(begun(), NamedSharding(mesh, P()))
    states = {level: start(level, axis_name, params) for level in LEVELS}
    given = numbers()
    batch = jax.device_put((given["x"], given["y"]), NamedSharding(mesh, P(AXIS)))
    bad = jax.device_put(batch[0].at[13, 2].set(jnp.inf), batch[0].sharding)
    clean = take(states, *batch)
    after_bad = take(clean, bad, batch[1])
    assert take._cache_size() == 1

    whole = on_one_device()
    for level, state in clean.items():
        assert (state.skipped_steps, state.loss_scale) == (0, 2.0**8)
        assert state.params["layers_1"]["scale"].dtype == jnp.float32
        # The hidden layer is exact in half; its sums are in float32.
        pairs = (s.batch_stats["layers_1"] for s in (state, whole[level]))
        for a, b in zip(*map(jax.tree.leaves, pairs), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, err_msg=level)
            assert a.dtype == jnp.float32
        eps = 2.0**-7 if level == "O5" else 2.0**-10
        pairs = (jamp.master_params(s) for s in (state, whole[level]))
        for a, b, old in zip(*map(jax.tree.leaves, (*pairs, begun())), strict=True):
            limit = 4 * eps * np.abs(b - old).max()
            np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=level)
        skipped = after_bad[level]
        assert (skipped.skipped_steps, skipped.loss_scale) == (1, 2.0**7)
        assert_skipped(skipped, state)


# What crosses devices, traced for eight that need not be there

MESH = AbstractMesh((8,), (AXIS,), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("level", ["O1", "O2", "unchecked"])
def test_statistics_cross_devices_in_float32(level):
    states = {"one": start("O2" if level == "unchecked" else level, AXIS, begun())}
    fn = mapped(MESH, check_vma=level != "unchecked")
    program = jax.make_jaxpr(fn)(states, numbers()["x"], numbers()["y"])
    operands = collectives(program)
    assert (2, 8) in [x.shape for x in operands]  # means of x and of its square
    assert {str(x.dtype) for x in operands if x.ndim} == {"float32"}
