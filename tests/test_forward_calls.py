"""Every way to call a model under a policy, a Linen one or a function of any framework:
methods, containers, collections. Inputs go half, outputs come back in float32."""

import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import FrozenDict

import jamp
from tests.bits import assert_same_bits
from tests.forward_models import (
    TOKENS,
    Tied,
    dtypes,
    forward,
    normal,
    products,
    state_of,
    under_policy,
    variables_of,
)

# Flax itself promotes: half inputs meet BatchNorm's float32 parameters.
pytestmark = pytest.mark.standard_promotion

X = normal(3, 4)
O2, O3, O5 = (jamp.Properties.from_opt_level(level) for level in ("O2", "O3", "O5"))


class Point(NamedTuple):
    x: Any
    y: Any


@flax.struct.dataclass
class Graph:
    nodes: Any
    edges: Any
    name: str = flax.struct.field(pytree_node=False, default="g")


class Inputs(nn.Module):
    """Hands its inputs to a function of the test, and its outputs back."""

    body: Callable[..., Any]

    @nn.compact
    def __call__(self, *args, **kwargs):
        nn.Dense(1)(jnp.zeros((1, 1)))  # makes it a model with half params
        return self.body(*args, **kwargs)


def call(door, level, *args, returns=None, **kwargs):
    """What a model sees of its inputs, and what comes back of its outputs."""
    seen = []

    def body(*args, **kwargs):
        seen.append((args, kwargs))
        return returns

    if door == "linen":
        model = Inputs(body)
        state = state_of(model, level=level)
        seen.clear()
        out = forward(state, *args, **kwargs)
    else:
        properties = jamp.Properties.from_opt_level(level)
        apply_fn = lambda variables, *args, **kwargs: body(*args, **kwargs)  # noqa: E731
        half = jnp.zeros(1, properties.cast_model_type)  # a model with half params
        out = jamp.cast_forward(apply_fn, properties)(half, *args, **kwargs)
    assert len(seen) == 1
    return *seen[0], out


FLOATS = {
    "jax": X,
    "numpy": np.asarray(X),
    "float64": np.asarray(X, np.float64),
    "float16": X.astype(jnp.float16),
    "bfloat16": X.astype(jnp.bfloat16),
    "point": Point(X, None),
    "graph": [Graph(X, {"w": X})],
}
OTHERS = {
    "arrays": [TOKENS, np.arange(3, dtype=np.uint8), jnp.asarray([True, False])],
    "complex": (jnp.asarray([1 + 2j]), None),
    "keys": Point(jax.random.key(3), jax.random.PRNGKey(3)),
    # Numbers can still be branched on: rates of stochastic depth from np.linspace.
    "python": [0.1, 3, True, "mean", jnp.tanh, np.float64(0.1), np.float32(0.1)],
}


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
@pytest.mark.parametrize("door", ["linen", "function"])
def test_every_float_array_is_float32_inside_and_nothing_else_is_touched(door, level):
    given = {"floats": FLOATS, "others": OTHERS}
    (seen,), keywords, out = call(door, level, given, again=given, returns=given)
    for got in (seen, keywords["again"], out):
        assert jax.tree.structure(got) == jax.tree.structure(given)
        assert set(dtypes(got["floats"])) == {"float32"}
        pairs = zip(*map(jax.tree.leaves, (got["others"], OTHERS)), strict=True)
        if got is not out:  # where NumPy's numbers are arrays
            assert all(x is y or x.dtype == y.dtype for x, y in pairs)
    # What no operation in half reads keeps its digits.
    expected = jax.tree.map(lambda x: np.asarray(x).astype(np.float32), FLOATS)
    assert_same_bits(out["floats"], expected)


METHODS = {
    "name": ("encode", TOKENS),
    "function": (Tied.encode, TOKENS),
    "lambda": (lambda m, tokens: m.decode(m.encode(tokens)), TOKENS),
    "of floats": ("decode", normal(2, 3, 4)),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("route", ["state.apply_fn", "model.apply"])
def test_methods_other_than_call(name, route):
    model = Tied(dtype=jnp.float32)
    state, (method, x) = state_of(model, TOKENS), METHODS[name]
    apply = None if route == "state.apply_fn" else model.apply

    def run(state):
        run = lambda: forward(state, x, apply=apply, method=method)  # noqa: E731
        return under_policy(state, run)

    assert run(state).dtype == jnp.float32
    assert set(products(run, state)) == {"float16,float16"}


@pytest.mark.parametrize("bound", ["outside", "inside"])
def test_bind(bound):
    # Bound outside of the loss, its params are half, and Flax promotes them.
    model = Tied(dtype=jnp.float32)
    state = state_of(model, TOKENS)
    bind = lambda: model.bind({"params": state.params})  # noqa: E731
    before = bind()

    def run():
        m = before if bound == "outside" else bind()
        return m.encode(TOKENS), m(TOKENS), m.layers[0](normal(2, 4))

    assert dtypes(under_policy(state, run)) == ["float32"] * 3
    found = products(lambda state: under_policy(state, run), state)
    assert len(found) == 6 and set(found) == {"float16,float16"}
    # Outside of the policy the same module promotes again.
    assert products(before.decode, normal(2, 4)) == ["float32,float32"]
    assert before.dtype == jnp.float32


def test_mutable_and_sow():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(4)(x)
            self.sow("intermediates", "hidden", x)
            count = self.variable("counts", "calls", lambda: jnp.zeros((), jnp.int32))
            total = self.variable("counts", "total", lambda: jnp.zeros(()))
            count.value += 1
            total.value += jnp.sum(x.astype(jnp.float32))
            return nn.Dense(2)(x)

    variables = variables_of(Sowing(), X)
    state = state_of(Sowing(), variables=variables)
    start = np.float64(variables["counts"]["total"])
    variables = {"params": state.params, "counts": variables["counts"]}
    for mutable in (["intermediates", "counts"], True):
        out, new = state.apply_fn(variables, X, mutable=mutable)
        hidden = new["intermediates"]["hidden"][0]
        assert out.dtype == hidden.dtype == jnp.float32
        # As the model saw it: a product in half.
        assert_same_bits(hidden, hidden.astype(jnp.float16).astype(jnp.float32))
        assert dtypes(new["counts"]) == ["int32", "float32"]
        expected = start + np.float64(hidden).sum()
        np.testing.assert_allclose(new["counts"]["total"], expected, rtol=1e-6)


# Functions, by cast_forward and by state.apply_fn


def plain(params, x):
    """Module level, so that it can be pickled."""
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
    # Else a tuple is an output like any other.
    for kwargs in ({}, {"mutable": False}):
        assert dtypes(fn(variables, X, **kwargs)) == ["float32"] * 2


def test_a_function_of_jax_runs_in_half():
    w = normal(4, 2)
    state = jamp.initialize({"w": w}, None, "O5", apply_fn=plain, verbosity=0)
    # The product in half; its tanh in float32, and not rounded on the way out.
    by_hand = X.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)
    by_hand = jnp.tanh(by_hand.astype(jnp.float32))
    assert_same_bits(state.apply_fn(state.params, X), by_hand)
    fn = jamp.scaled_value_and_grad(lambda params: jnp.sum(state.apply_fn(params, X)))
    loss, grads = fn(state)
    assert loss.dtype == jnp.float32 and dtypes(grads.tree) == ["bfloat16"]
    assert set(products(fn, state)) == {"bfloat16,bfloat16"}


def test_equal_wrappers_are_one_static_argument():
    # TrainState keeps apply_fn as static data: a second hash would retrace every step.
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
