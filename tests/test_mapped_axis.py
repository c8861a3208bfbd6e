"""`axis_name` and `predivide`: gradients over a mapped axis, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jamp
from tests import subprocesses

PARAMS = {"w": np.ones(2, np.float32)}


@functools.cache
def reports():
    flags = "--xla_force_host_platform_device_count=8"
    return subprocesses.json_of("tests.mapped", XLA_FLAGS=flags)


check_vma = pytest.mark.parametrize("check_vma", [True, False])


@check_vma
@pytest.mark.parametrize("level", ["O0", "O5"])
def test_gradients_whose_sum_is_too_large_have_a_mean_with_predivide(level, check_vma):
    # 2**127 eight times; the sum of thirds, 2**130 / 3, is too large as well.
    report = {p: reports()[f"largest/{level}/{p}/{check_vma}"] for p in (None, 8.0, 3)}
    assert report[8.0] == {"exact": True, "finite": True, "steps": 1}
    skipped = {"exact": False, "finite": False, "steps": 0}
    assert report[None] == report[3] == skipped


@check_vma
def test_devices_with_other_parts_of_the_params_skip_as_well(check_vma):
    clean, broken = reports()[f"two axes/{check_vma}"]
    # Half a step along the mean of two rows: 1 - 0.5 * [0.5, 1.5, 2.5, 3.5].
    assert clean == [[0.75, 0.25, -0.25, -0.75], [[0] * 4] * 2]
    assert broken == [[1.0] * 4, [[1] * 4] * 2]


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O5"])
@pytest.mark.parametrize("wrap", ["replicated", "FSDP", "shard_map"])
def test_nnx_steps_on_eight_devices_as_on_one(wrap, level):
    """Losses, skips, statistics of BatchNorm and params; the second batch is inf."""
    one = reports()[f"nnx/{level}/one device"]
    many = reports()[f"nnx/{level}/{wrap}"]
    assert (one["skips"], one["scale"]) == (many["skips"], many["scale"]) == (1, 2.0**7)
    np.testing.assert_array_equal(np.isfinite(one["losses"]), [True, False, True])
    np.testing.assert_allclose(many["losses"], one["losses"], rtol=1e-5)
    tolerance = {"O0": 1e-5, "O5": 2e-3}.get(level, 1e-3)
    for a, b in zip(many["arrays"], one["arrays"], strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# ---- What is refused -----------------------------------------------------------------
def make(level="O2"):
    return jamp.initialize(PARAMS, optax.sgd(0.1), level, verbosity=0)


def loss_fn(params, x):
    return (params["w"].astype(jnp.float32) * x).sum()


@pytest.mark.parametrize("predivide", [0, -1.0, float("inf"), float("nan"), "8", True])
def test_predivide_is_a_positive_number(predivide):
    with pytest.raises(ValueError, match="predivide must be.*positive number, got"):
        jamp.scaled_grad(loss_fn, axis_name="data", predivide=predivide)


def test_predivide_is_of_an_axis():
    with pytest.raises(ValueError, match="no effect without axis_name"):
        jamp.scaled_value_and_grad(loss_fn, predivide=8.0)


def test_predivide_under_vmap_gives_the_mean():
    grads = jamp.scaled_grad(loss_fn, axis_name="i", predivide=3.0)
    f = jax.vmap(lambda x: grads(make("O0"), x).unscale()[0]["w"], axis_name="i")
    np.testing.assert_allclose(f(jnp.arange(4.0)), np.full((4, 2), 1.5), rtol=1e-6)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("axis_name", ["data", ("data", "model")], ids=str)
def test_an_axis_that_is_not_bound_is_named(wrap, axis_name):
    step = wrap(jamp.scaled_grad(loss_fn, axis_name=axis_name))
    with pytest.raises(ValueError, match=r"axis_name='data' is not bound here.* \[\]"):
        step(make(), jnp.ones(2))


def test_the_axes_that_there_are_are_named():
    mesh = jax.make_mesh((1,), ("batch",))
    step = jamp.scaled_grad(loss_fn, axis_name="data")
    mapped = jax.shard_map(step, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    with pytest.raises(ValueError, match=r"'data' is not bound.*\['batch'\]"):
        jax.jit(mapped)(make(), jnp.ones(2))
