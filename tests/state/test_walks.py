"""Test that a step reads each tree once, however many leaves and optimizers it has.

Each walk over a tree is Python work per leaf, in each trace and each eager step.
"""

import collections
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jamp
from jamp import optimizers
from tests.support.pages import ROOT

pytestmark = pytest.mark.standard_promotion  # for optax.adam

OURS = tuple(f"{ROOT / name}/" for name in ("jamp", "pallas_kernels"))
WALKS = ("tree_flatten", "tree_flatten_with_path", "tree_leaves", "tree_map")
WALKS += ("tree_leaves_with_path", "tree_map_with_path", "tree_structure")
WALKS += tuple(name.removeprefix("tree_") for name in WALKS)


def walks_of(fn):
    """Counts the calls of functions of `jax.tree` by our functions."""
    found = collections.Counter()

    def count(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_name in WALKS and "jax" in code.co_filename:
            caller = frame.f_back.f_code
            if caller.co_filename.startswith(OURS):
                found[caller.co_qualname] += 1

    sys.setprofile(count)
    try:
        result = fn()
    finally:
        sys.setprofile(None)
    return result, found


def loss_fn(params, x):
    for layer in params.values():
        x = x @ layer["kernel"] + layer["bias"]
    return (x.astype(jnp.float32) ** 2).mean()


# The params and the gradients; two moments, or the skip.
TX = {"fused": (optimizers.fused_adam(1e-3), 4), "optax": (optax.adam(1e-3), 3)}


@pytest.mark.parametrize("name", TX)
def test_a_step_reads_each_tree_once(name):
    tx, most = TX[name]
    layer = lambda: {"kernel": jnp.eye(4), "bias": jnp.ones(4)}  # noqa: E731
    state = jamp.initialize({"a": layer(), "b": layer()}, tx, "O2", verbosity=0)

    def step(state, x):
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
        after, found = walks_of(lambda: state.apply_gradients(grads=grads))
        assert 1 < sum(found.values()) <= most, found
        return after, loss

    jax.make_jaxpr(step)(state, jnp.ones((2, 4)))
