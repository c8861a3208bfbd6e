"""Test calls of a model under a policy: inputs, outputs, collections, containers."""

import pickle
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict

import jamp
from tests.policy.forward_models import TOKENS, dtypes, normal
from tests.support import programs
from tests.support.bits import assert_same_bits

# Flax itself promotes: half inputs meet BatchNorm's float32 parameters.
pytestmark = pytest.mark.standard_promotion

X = normal(3, 4)
O2, O5 = (jamp.Properties.from_opt_level(level) for level in ("O2", "O5"))


class Point(NamedTuple):
    x: Any
    y: Any


FLOATS = {
    "jax": X,
    "numpy": np.asarray(X),
    "float64": np.asarray(X, np.float64),
    "float16": X.astype(jnp.float16),
    "bfloat16": X.astype(jnp.bfloat16),
    "point": Point(X, None),
    "list": [X, {"w": X}],
}
OTHERS = {
    "arrays": [TOKENS, np.arange(3, dtype=np.uint8), jnp.asarray([True, False])],
    "complex": (jnp.asarray([1 + 2j]), None),
    "keys": Point(jax.random.key(3), jax.random.PRNGKey(3)),
    # Programs can branch on numbers, such as rates of stochastic depth.
    "python": [0.1, 3, True, "mean", jnp.tanh, np.float64(0.1), np.float32(0.1)],
}


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_every_float_array_is_float32_inside_and_nothing_else_is_touched(level):
    given, inside = {"floats": FLOATS, "others": OTHERS}, []

    def body(variables, *args, **kwargs):
        inside.append((*args, kwargs["again"]))
        return given

    properties = jamp.Properties.from_opt_level(level)
    half = jnp.zeros(1, properties.cast_model_type)  # a model with half params
    out = jamp.cast_forward(body, properties)(half, given, again=given)
    for got in (*inside[0], out):
        assert jax.tree.structure(got) == jax.tree.structure(given)
        assert set(dtypes(got["floats"])) == {"float32"}
        pairs = zip(*map(jax.tree.leaves, (got["others"], OTHERS)), strict=True)
        if got is not out:  # the results have arrays for NumPy's scalars
            assert all(x is y or x.dtype == y.dtype for x, y in pairs)
    # A value that no half operation reads keeps its digits.
    expected = jax.tree.map(lambda x: np.asarray(x).astype(np.float32), FLOATS)
    assert_same_bits(out["floats"], expected)


def plain(params, x):
    return jnp.tanh(x @ params["w"])


def test_updated_collections_are_not_cast():
    half, seen = X.astype(jnp.float16), []

    def apply_fn(variables, x, mutable=False, **kwargs):
        seen.append((jax.tree.structure(variables), mutable))
        return half, {"cache": half}

    fn, variables = jamp.cast_forward(apply_fn, O2), {"params": {"w": half}, "state": X}
    for mutable in (["cache"], "cache", True, []):
        out, new = fn(variables, X, mutable=mutable)
        assert out.dtype == jnp.float32
        assert_same_bits(new["cache"], half)
        assert seen[-1] == (jax.tree.structure(variables), mutable)
    # Without `mutable`, a tuple is an ordinary output.
    for kwargs in ({}, {"mutable": False}):
        assert dtypes(fn(variables, X, **kwargs)) == ["float32"] * 2


def test_a_state_without_apply_fn_says_what_to_pass():
    state = jamp.initialize({"w": X}, None, "O2", verbosity=0)
    said = "no forward function: pass `apply_fn=model.apply`"
    with pytest.raises(TypeError, match=said):
        state.apply_fn({"params": state.params}, X)


def test_equal_wrappers_are_one_static_argument():
    # TrainState has apply_fn as static data, so an unequal one would retrace each step.
    first, second = jamp.cast_forward(plain, O2), jamp.cast_forward(plain, O2)
    assert first == second and hash(first) == hash(second)
    assert first != jamp.cast_forward(plain, O5)
    assert pickle.loads(pickle.dumps(first)) == first


def test_functions_of_several_models_keep_their_container():
    fn, w = jamp.cast_forward(plain, O2), {"w": normal(4, 2)}
    for given, expected in (
        ([plain, plain], (fn, fn)),
        ((plain,), (fn,)),
        ({"a": plain, "b": plain}, FrozenDict(a=fn, b=fn)),
    ):
        state = jamp.initialize(w, None, "O2", apply_fn=given, verbosity=0)
        assert state.apply_fn == expected and hash(state.apply_fn) == hash(expected)


class Coder(nn.Module):
    def setup(self):
        self.up, self.down = nn.Dense(8), nn.Dense(4)

    def __call__(self, x):
        return self.down(self.encode(x))

    def encode(self, x, *, shift=0.0):
        self.sow("intermediates", "mean", x.mean())
        return self.up(x) + shift


@pytest.mark.parametrize(
    "method", ["encode", Coder.encode, lambda m, x, **k: m.encode(x, **k)]
)
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_apply_fn_takes_a_method_as_in_flax(level, method):
    model = Coder()
    params = model.init(jax.random.key(0), X)["params"]
    options = {"apply_fn": model.apply, "loss_scale": 8.0, "verbosity": 0}
    state = jamp.initialize(params, optax.sgd(0.1), level, **options)
    call = {"method": method, "mutable": ["intermediates"], "shift": 1.0}

    def forward(params, x):
        return state.apply_fn({"params": params}, x, **call)

    def loss_fn(params, x):
        return forward(params, x)[0].sum()

    out, sown = jax.jit(forward)(state.params, X)
    expected, plain = model.apply({"params": params}, X, **call)
    assert out.dtype == jnp.float32
    assert jax.tree.structure(sown) == jax.tree.structure(plain)
    np.testing.assert_allclose(out, expected, atol=0.05)
    (product,) = programs.products(forward, state.params, X)
    assert product.lhs == ("bfloat16" if level == "O5" else "float16")
    grads = jamp.scaled_grad(loss_fn)(state, X)
    assert not grads["down"]["kernel"].any() and grads["up"]["kernel"].any()
    untouched = state.apply_fn({"params": state.params}, X, method=method)
    assert untouched.shape == (3, 8)
