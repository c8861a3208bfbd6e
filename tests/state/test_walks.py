"""Test that a step reads each tree once, and runs few of our functions.

Each walk over a tree is Python work per leaf, in each trace and each eager step. Each
function is one more to read.
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


def profiled(fn):
    """Counts our functions, and the walks over trees by each of them."""
    functions, walks = collections.Counter(), collections.Counter()

    def count(frame, event, built_in):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(OURS):
            functions[code] += 1
        elif event == "call" and code.co_name in WALKS and "jax" in code.co_filename:
            caller = frame.f_back.f_code
            if caller.co_filename.startswith(OURS):
                walks[caller.co_qualname] += 1
        elif event == "c_call" and built_in.__name__ == "flatten_up_to":
            walks[code.co_qualname] += code.co_filename.startswith(OURS)

    sys.setprofile(count)
    try:
        result = fn()
    finally:
        sys.setprofile(None)
    return result, functions, walks


def loss_fn(params, x):
    for layer in params.values():
        x = x @ layer["kernel"] + layer["bias"]
    return (x.astype(jnp.float32) ** 2).mean()


# Transformations, the most functions of `apply_gradients`, and its most walks: over the
# params, the masters and the gradients; two moments, or the skip.
TX = {
    "fused": (optimizers.fused_adam(1e-3), 45, 5),
    "optax": (optax.adam(1e-3), 32, 5),
}


@pytest.mark.parametrize("name", TX)
def test_a_step_reads_each_tree_once_in_few_functions(name):
    tx, most_functions, most_walks = TX[name]
    layer = lambda: {"kernel": jnp.eye(4), "bias": jnp.ones(4)}  # noqa: E731
    state = jamp.initialize({"a": layer(), "b": layer()}, tx, "O2", verbosity=0)

    def step(state, x):
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
        return state.apply_gradients(grads=grads), loss

    def apply_alone(state, x):
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
        after, functions, walks = profiled(lambda: state.apply_gradients(grads=grads))
        assert 1 < walks.total() <= most_walks, walks
        assert 1 < len(functions) <= most_functions, list(functions)
        return after, loss

    jax.clear_caches()
    jax.make_jaxpr(apply_alone)(state, jnp.ones((2, 4)))
    jax.clear_caches()
    whole = lambda: jax.make_jaxpr(step)(state, jnp.ones((2, 4)))  # noqa: E731
    _, functions, _ = profiled(whole)
    assert 1 < len(functions) <= 230, len(functions)
