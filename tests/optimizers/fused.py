"""The fused optimizers with small trees, for the tests of their contract."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jamp import optimizers as jo


def larc_sgd(learning_rate, momentum=0.9, weight_decay=0.0, trust_coefficient=0.02):
    inner = jo.fused_sgd(learning_rate, momentum, weight_decay=weight_decay)
    return jo.larc(inner, trust_coefficient=trust_coefficient)


OPTIMIZERS = {
    "adam": (jo.fused_adam, {"learning_rate": 0.05}),
    "sgd": (jo.fused_sgd, {"learning_rate": 1e-3, "momentum": 0.9}),
    "lamb": (jo.fused_lamb, {"learning_rate": 3e-3}),
    "novograd": (jo.fused_novograd, {"learning_rate": 0.02}),
    "adagrad": (jo.fused_adagrad, {"learning_rate": 0.5}),
    "larc_sgd": (larc_sgd, {"learning_rate": 1e-3}),
}
BARE = ("adam", "sgd", "lamb", "novograd", "adagrad")

# The fields of the state with the structure of the params.
FIELDS = {name: ("mu", "nu") for name in OPTIMIZERS}
FIELDS |= {"sgd": ("trace",), "larc_sgd": ("trace",), "adagrad": ("sum_of_squares",)}

each = pytest.mark.parametrize("name", OPTIMIZERS)
each_bare = pytest.mark.parametrize("name", BARE)


def fresh(name, **changes):
    """Returns a new optimizer. `changes` override its hyperparameters."""
    factory, kwargs = OPTIMIZERS[name]
    return factory(**(kwargs | changes))


# Returns the same object each time, so that `update` compiles once.
make = functools.cache(fresh)


def tree(dtype=jnp.float32, seed=0):
    """Returns a matrix, a scalar and None, on two levels."""
    rng = np.random.default_rng(seed)

    def leaf(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

    return {"dense": {"kernel": leaf(3, 2)}, "gain": leaf(), "rest": [None]}


def gradients(seed=1):
    return tree(seed=seed)


@functools.partial(jax.jit, static_argnums=0)
def update(tx, grads, state, params, **kwargs):
    return tx.update(grads, state, params, **kwargs)


def first(tx, params, grads=None, **kwargs):
    """Returns the updates and the state of the first step."""
    grads = params if grads is None else grads
    return update(tx, grads, tx.init(params), params, **kwargs)
