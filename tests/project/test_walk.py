"""Bound the number of our functions that a step calls."""

import jax
import jax.numpy as jnp

import jamp
from jamp import optimizers
from tests.support.calls import calls_of


def loss_fn(params, x):
    for layer in params.values():
        x = x @ layer["kernel"] + layer["bias"]
    return (x.astype(jnp.float32) ** 2).mean()


def test_how_many_functions_a_fused_step_passes():
    layer = lambda: {"kernel": jnp.eye(4), "bias": jnp.ones(4)}  # noqa: E731
    params, found = {"a": layer(), "b": layer()}, {}
    tx = optimizers.fused_adam(1e-3)
    state = jamp.initialize(params, tx, "O2", apply_fn=None, verbosity=0)

    def step(state, x):
        both = jamp.scaled_value_and_grad(loss_fn)
        (loss, grads), found["grads"] = calls_of(both, state, x)
        after, found["step"] = calls_of(lambda: state.apply_gradients(grads=grads))
        return after, loss

    jax.make_jaxpr(step)(state, jnp.ones((2, 4), jnp.float32))
    whole = found["grads"] | found["step"]
    assert 20 < len(found["step"]) <= 68
    assert len(whole) <= 268
