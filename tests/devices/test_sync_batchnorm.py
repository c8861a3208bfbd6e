"""Test that BatchNorm with `axis_name` sends its statistics in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import jamp
from tests.devices.eight_devices import collectives
from tests.support.by_hand import with_stats

# Flax's layers promote their inputs and params.
pytestmark = [pytest.mark.slow, pytest.mark.standard_promotion]

AXIS = "batch"
MESH = AbstractMesh((8,), (AXIS,), axis_types=(AxisType.Auto,))
MODEL = nn.Sequential(
    [nn.Dense(8, False), nn.BatchNorm(False, axis_name=AXIS), nn.Dense(2, False)]
)


def step(state, x):
    labels = jnp.zeros(len(x), int)
    loss_fn = with_stats(state.apply_fn, state.batch_stats, x, labels)
    grad = jamp.scaled_grad(loss_fn, has_aux=True, axis_name=AXIS)
    grads, batch_stats = grad(state)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats)


@pytest.mark.parametrize(
    "level, check_vma", [("O1", True), ("O2", True), ("O2", False)]
)
def test_statistics_cross_devices_in_float32(level, check_vma):
    def run(variables, x):
        fields = {"apply_fn": MODEL.apply, "batch_stats": variables["batch_stats"]}
        params, tx = variables["params"], optax.sgd(0.1)
        return step(jamp.initialize(params, tx, level, verbosity=0, **fields), x)

    x = np.ones((32, 4), np.float32)
    variables = MODEL.init(jax.random.key(0), x)
    mapped = jax.shard_map(
        run, mesh=MESH, in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=check_vma
    )
    operands = collectives(jax.make_jaxpr(mapped)(variables, x))
    assert (2, 8) in [x.shape for x in operands]  # means of x and of its square
    assert {str(x.dtype) for x in operands if x.ndim} == {"float32"}
