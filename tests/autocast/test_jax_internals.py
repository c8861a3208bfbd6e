"""Test undocumented facts about JAX that autocast needs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, PartitionSpec as P

from jamp._fp8.quantized import Of, quantize
from tests.support.programs import walk

X = jnp.arange(4.0).reshape(2, 2) / 4


def total(x):
    return quantize(x, Of.INPUT)[0].astype(jnp.float32).sum()


def trips(fn):
    return lax.scan(lambda sum, _: (sum + fn(), None), jnp.float32(0), length=2)[0]


def alone(x):
    """Closes a `shard_map` over the array."""
    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,))
    fn = lambda: total(x)  # noqa: E731
    return jax.shard_map(fn, mesh=mesh, in_specs=(), out_specs=P(), check_vma=False)()


jitted = jax.jit(total)
BOUND_BEFORE = {
    "scan": lambda x: trips(lambda: total(x)),
    "scan of scan": lambda x: trips(lambda: trips(lambda: total(x))),
    "cast": lambda x: trips(lambda: total(x.astype("bfloat16").T)),
    "jit": lambda x: trips(jax.jit(lambda: total(x))),
    "branch": lambda x: lax.cond(
        x[0, 0] == 0, lambda: total(x), lambda: jnp.float32(0)
    ),
    "gradient": lambda x: trips(
        lambda: jax.grad(lambda x: total(x) + x.sum())(x).sum()
    ),
}
BOUND_WITHIN = {
    "computed": lambda x: trips(lambda: total(x + 1)),
    "an argument": lambda x: trips(lambda: jitted(x)),
    "vmap": lambda x: jax.vmap(BOUND_BEFORE["scan"])(x).sum(),
    "shard_map": alone,
}


@pytest.mark.parametrize("name", BOUND_BEFORE | BOUND_WITHIN)
def test_a_loop_invariant_is_quantized_before_the_loop(name):
    fn = (BOUND_BEFORE | BOUND_WITHIN)[name]
    program = jax.make_jaxpr(fn)(X).jaxpr
    names = [eqn.primitive.name for eqn in program.eqns]
    everywhere = [eqn.primitive.name for eqn in walk(program)]
    assert everywhere.count("jamp_quantize") == 1
    assert ("jamp_quantize" in names) == (name in BOUND_BEFORE)
    with jax.disable_jit():  # moves no operation
        expected = fn(X)
    np.testing.assert_array_equal(jax.jit(fn)(X), expected)
