"""BatchNorm whose batch is spread over devices: Flax's, with axis_name or under jit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh, AxisType

from tests import subprocesses
from tests.eight_levels import collectives
from tests.sync_batchnorm import (
    AXIS,
    CASES,
    EPS,
    MOMENTUM,
    RATE,
    linen_start,
    linen_step,
    mapped,
    name_of,
    nnx_start,
    nnx_step,
    numbers,
)

# Flax's layers compute in the promotion of what they are given.
pytestmark = pytest.mark.standard_promotion

each_case = pytest.mark.parametrize("case", CASES, ids=name_of)
each_check_vma = pytest.mark.parametrize("check_vma", [True, False])


@functools.cache
def results():
    return subprocesses.on_devices(8, "tests.sync_batchnorm")


def oracle(first, last, x, y):
    """Batch mean and variance of all rows, and the gradients, in float64."""
    first, last, x, y = (np.float64(a) for a in (first, last, x, y))
    hidden = x @ first
    mean, var = hidden.mean(0), hidden.var(0)
    normal = (hidden - mean) / np.sqrt(var + EPS)  # its scale is 1, its bias 0
    d_out = 2 * (normal @ last - y) / y.size
    d_normal = d_out @ last.T
    centred = d_normal - d_normal.mean(0) - normal * (d_normal * normal).mean(0)
    grads = {
        "first": x.T @ (centred / np.sqrt(var + EPS)),
        "scale": (d_normal * normal).sum(0),
        "bias": d_normal.sum(0),
        "last": normal.T @ d_out,
    }
    return mean, var, grads


def test_no_device_has_the_statistics_of_the_whole_batch():
    given = numbers()
    mean, _, grads = oracle(**given)
    for rows in np.split(np.arange(32), 8):
        local = {**given, "x": given["x"][rows], "y": given["y"][rows]}
        other, _, others = oracle(**local)
        assert np.abs(other - mean).max() > 0.5
        for name, grad in grads.items():
            assert np.abs(others[name] - grad).max() > 0.1 * np.abs(grad).max()


@each_case
def test_statistics_are_those_of_the_whole_batch(case):
    # The hidden layer is exact in half; its sums are in float32.
    mean, var, _ = oracle(**numbers())
    stats = results()[name_of(case)]["clean"]["stats"]
    running = MOMENTUM * np.ones(8) + (1 - MOMENTUM) * var
    np.testing.assert_allclose(stats["mean"], (1 - MOMENTUM) * mean, rtol=1e-6)
    np.testing.assert_allclose(stats["var"], running, rtol=1e-5)


@each_case
def test_gradients_are_those_of_the_whole_batch(case):
    given = numbers()
    _, _, grads = oracle(**given)
    begun = {"first": given["first"], "scale": 1, "bias": 0, "last": given["last"]}
    params = results()[name_of(case)]["clean"]["params"]
    eps = 2.0**-7 if "O5" in case else 2.0**-10
    for name, grad in grads.items():
        stepped = (np.float64(begun[name]) - params[name]) / RATE
        np.testing.assert_allclose(
            stepped, grad, rtol=0, atol=4 * eps * np.abs(grad).max()
        )


@each_case
def test_an_overflow_on_one_device_leaves_no_trace(case):
    clean, bad = (results()[name_of(case)][which] for which in ("clean", "bad"))
    assert (clean["skipped"], bad["skipped"]) == (0, 1)
    assert (clean["scale"], bad["scale"]) == (2.0**8, 2.0**7)
    assert bad["stats"] == clean["stats"]
    assert bad["params"] == clean["params"]


@each_case
def test_statistics_and_params_of_the_norm_are_float32(case):
    for which in ("clean", "bad"):
        assert results()[name_of(case)][which]["dtypes"] == ["float32"]


# What crosses devices, traced for eight that need not be there


MESH = AbstractMesh((8,), (AXIS,), axis_types=(AxisType.Auto,))


def assert_statistics_in_float32(program):
    operands = collectives(program)
    assert (2, 8) in [x.shape for x in operands]  # means of x and of its square
    assert {str(x.dtype) for x in operands if x.ndim} == {"float32"}


@each_check_vma
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "O4", "O5"])
def test_statistics_cross_devices_in_float32(level, check_vma):
    step = mapped(jax.shard_map, linen_step, MESH, check_vma, 1)
    state, given = linen_start(level, AXIS), numbers()
    assert_statistics_in_float32(jax.make_jaxpr(step)(state, given["x"], given["y"]))


@each_check_vma
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_statistics_of_nnx_cross_devices_in_float32(level, check_vma):
    graphdef, arrays = nnx.split(nnx_start(level, AXIS))
    given = numbers()

    def pure(arrays, x, y, axis_name):
        model, optimizer = nnx.merge(graphdef, arrays)
        nnx_step(model, optimizer, x, y, axis_name)
        return nnx.state((model, optimizer))

    step = mapped(jax.shard_map, pure, MESH, check_vma, 1)
    assert_statistics_in_float32(jax.make_jaxpr(step)(arrays, given["x"], given["y"]))


def test_statistics_of_each_device_are_no_state_that_all_share():
    # Without axis_name in the layer: JAX sees it, unless it is told not to look.
    state, given = linen_start("O2", None), numbers()
    step = mapped(jax.shard_map, linen_step, MESH, True, 1)
    with pytest.raises(ValueError, match="out_specs.*batch"):
        jax.make_jaxpr(step)(state, jnp.asarray(given["x"]), given["y"])
