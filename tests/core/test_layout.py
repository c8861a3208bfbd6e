"""Test which leaves of params are trained, and how gradients are read."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp._core.layout import Layout

F, N = np.ones(2, np.float32), np.arange(3)


GIVEN = {
    "like the params": ({"a": F, "n": N}, True),
    "None for integers": ({"a": F, "n": None}, True),
    "float0": ({"a": F, "n": np.zeros(3, jax.dtypes.float0)}, True),
    "another shape": ({"a": np.ones(3, np.float32), "n": None}, False),
    "a missing leaf": ({"a": F}, False),
    "None for a float": ({"a": None, "n": None}, False),
    "an integer gradient": ({"a": np.ones(2, np.int32), "n": None}, False),
    "an unexpected leaf": ({"a": F, "n": None, "c": F}, False),
    "a list": ([F, None], False),
    "a tree for integers": ({"a": F, "n": {"w": F}}, False),
}


@pytest.mark.parametrize("name", GIVEN)
def test_gradients_are_read_or_refused(name):
    grads, fits = GIVEN[name]
    layout, leaves = Layout.of({"a": F, "n": N})
    if fits:
        (found,), overwritten = layout.read_gradients(grads, leaves, "gradients", "")
        assert found is F and overwritten == []
        return
    with pytest.raises(ValueError, match="^gradients.*fix it"):
        layout.read_gradients(grads, leaves, "gradients", "fix it.")


def test_gradients_of_another_structure_are_refused_even_without_floats():
    layout, leaves = Layout.of({"n": N})
    with pytest.raises(ValueError, match="^gradients have .* fix it"):
        layout.read_gradients({"m": None}, leaves, "gradients", ": fix it.")


@jax.tree_util.register_pytree_node_class
class Unhashable:
    """A node with static data that has no hash, which no jit takes."""

    def __init__(self, w, names):
        self.w, self.names = w, names

    def tree_flatten(self):
        return (self.w,), self.names

    @classmethod
    def tree_unflatten(cls, names, children):
        return cls(*children, names)


def test_params_with_unhashable_static_data_are_stepped_outside_of_jit():
    params = {"model": Unhashable(jnp.ones(2), ["a", "list"])}
    state = jamp.initialize(params, optax.sgd(0.5), "O0", verbosity=0)
    grads = jamp.scaled_grad(lambda p: p["model"].w.sum())(state)
    state = state.apply_gradients(grads=grads)
    np.testing.assert_array_equal(state.params["model"].w, [0.5, 0.5])
