"""Every way to call a Linen model under a policy: methods, containers, collections."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.forward_models import (
    SEQUENCE,
    TOKENS,
    Headed,
    Tied,
    Witness,
    dtypes,
    normal,
    products,
    state_of,
    under_policy,
    variables_of,
)

# Flax itself promotes: half inputs meet BatchNorm's float32 parameters.
pytestmark = pytest.mark.standard_promotion

X = normal(3, 4)


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


def call(*args, level="O2", returns=None, **kwargs):
    """What a model sees of its inputs, and what comes back of its outputs."""
    seen = []

    def body(*args, **kwargs):
        seen.append((args, kwargs))
        return returns

    model = Inputs(body)
    state = state_of(model, variables_of(model), level)
    seen.clear()
    out = state.apply_fn({"params": state.params}, *args, **kwargs)
    assert len(seen) == 1
    return *seen[0], out


def test_containers_of_inputs_keep_their_types():
    given = {
        "dict": {"a": X, "b": [X, (X, None)]},
        "namedtuple": Point(X, TOKENS),
        "dataclass": Graph(X, {"w": X}),
    }
    (positional,), keywords, _ = call(given, named=Point(X, X))
    assert jax.tree.structure(positional) == jax.tree.structure(given)
    assert dtypes(positional["dict"]) == ["float16"] * 3
    assert isinstance(positional["namedtuple"], Point)
    assert dtypes(positional["namedtuple"]) == ["float16", "int32"]
    assert isinstance(positional["dataclass"], Graph)
    assert dtypes(positional["dataclass"]) == ["float16"] * 2
    assert dtypes(keywords["named"]) == ["float16"] * 2


@pytest.mark.parametrize("level, half", [("O2", "float16"), ("O5", "bfloat16")])
@pytest.mark.parametrize(
    "x",
    [
        X,
        np.asarray(X),
        np.asarray(X, np.float64),
        X.astype(jnp.float16),
        X.astype(jnp.bfloat16),
    ],
    ids=["jax", "numpy", "float64", "float16", "bfloat16"],
)
def test_every_float_array_is_cast(x, level, half):
    (seen,), _, _ = call(x, level=level)
    assert seen.dtype == half
    # Rounded once, straight from what was given.
    expected = np.asarray(x).astype(seen.dtype)
    assert np.asarray(seen).tobytes() == expected.tobytes()


@pytest.mark.parametrize(
    "value",
    [
        TOKENS,
        np.arange(3, dtype=np.uint8),
        jnp.asarray([True, False]),
        jnp.asarray([1 + 2j]),
        jax.random.key(3),
        jax.random.PRNGKey(3),
    ],
    ids=["int", "numpy-uint8", "bool", "complex", "key", "raw-key"],
)
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_other_arrays_pass_untouched(value, level):
    (seen,), keywords, _ = call(value, level=level, again=value)
    assert seen is value and keywords["again"] is value


@pytest.mark.parametrize(
    "value", [0.1, 3, True, None, "mean", jnp.tanh, np.float64(0.1), np.float32(0.1)]
)
def test_python_values_pass_untouched(value):
    (seen,), keywords, _ = call(value, again=value)
    assert seen is value and keywords["again"] is value


@pytest.mark.parametrize("rate", [0.1, np.linspace(0, 0.2, 3)[1]])
def test_numbers_can_still_be_branched_on_under_jit(rate):
    # Rates of stochastic depth come from np.linspace; as arrays they would be traced.
    class Rated(nn.Module):
        @nn.compact
        def __call__(self, x, rate):
            return nn.Dense(2)(x) if rate > 0 else x

    model = Rated()
    state = state_of(model, variables_of(model, X, rate=0.1), "O2")
    out = jax.jit(lambda p: state.apply_fn({"params": p}, X, rate))(state.params)
    assert out.shape == (3, 2) and out.dtype == jnp.float32


def test_modules_as_inputs_and_outputs_pass_untouched():
    # They have a `dtype` too, without being arrays.
    class Calls(nn.Module):
        @nn.compact
        def __call__(self, x, other):
            w = self.param("w", nn.initializers.ones, (4, 4))
            return other(x @ w)

    class Outer(nn.Module):
        def setup(self):
            self.calls, self.dense = Calls(), nn.Dense(2, dtype=jnp.float32)

        def part(self):
            return self.dense

        def __call__(self, x):
            return self.calls(x, self.part())

    model = Outer()
    state = state_of(model, variables_of(model, X), "O2")
    fn = lambda p: state.apply_fn({"params": p}, X)  # noqa: E731
    assert products(fn, state.params) == ["float16,float16"] * 2
    bound = model.bind({"params": state.params})
    assert isinstance(under_policy(state, bound.part), nn.Dense)


def test_containers_of_outputs_come_back_in_float32():
    half, ints = X.astype(jnp.float16), TOKENS
    returns = {"p": Point(half, ints), "l": [half, None, 0.5], "x": X}
    _, _, out = call(returns=returns)
    assert jax.tree.structure(out) == jax.tree.structure(returns)
    assert isinstance(out["p"], Point)
    assert out["p"].x.dtype == out["l"][0].dtype == out["x"].dtype == jnp.float32
    np.testing.assert_array_equal(out["p"].x, np.float32(half))
    np.testing.assert_array_equal(out["x"], X)  # float32 within: no bit is lost
    assert out["p"].y.dtype == jnp.int32 and out["l"][2] == 0.5


class Coder(Tied):
    """Tied, whose methods tell how wide their numbers are."""

    def encode(self, tokens):
        x = super().encode(tokens)
        return x, jnp.asarray(x.dtype.itemsize)

    def decode(self, x):
        logits = super().decode(x)
        return logits, jnp.asarray(logits.dtype.itemsize)

    def __call__(self, tokens):
        return self.decode(self.encode(tokens)[0])


METHODS = {
    "name": "encode",
    "function": Coder.encode,
    "lambda": lambda m, tokens: m.decode(m.encode(tokens)[0]),
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("route", ["state.apply_fn", "model.apply"])
def test_methods_other_than_call(method, route):
    model = Coder(dtype=jnp.float32)
    state = state_of(model, variables_of(model, TOKENS), "O2")
    apply = state.apply_fn if route == "state.apply_fn" else model.apply

    def run(params):
        variables = {"params": params}
        return apply(variables, TOKENS, method=METHODS[method])

    out, width = under_policy(state, lambda: run(state.params))
    assert out.dtype == jnp.float32 and width == 2
    found = products(lambda p: under_policy(state, lambda: run(p)), state.params)
    assert set(found) == {"float16,float16"}


def test_float_inputs_of_a_method_are_cast():
    model = Coder()
    state = state_of(model, variables_of(model, TOKENS), "O2")
    x = normal(2, 3, 4)
    logits, width = state.apply_fn({"params": state.params}, x, method="decode")
    assert width == 2 and logits.dtype == jnp.float32
    table = np.float64(state.params["embed"]["embedding"])
    # Four products of rounded numbers, and their partial sums.
    exact, size = np.float64(x) @ table.T, np.abs(np.float64(x)) @ np.abs(table.T)
    assert np.all(np.abs(logits - exact) <= 6 * 2.0**-11 * size)


@pytest.mark.parametrize("bound", ["outside", "inside"])
def test_bind(bound):
    model = Coder()
    state = state_of(model, variables_of(model, TOKENS), "O2")
    bind = lambda: model.bind({"params": state.params})  # noqa: E731
    before = bind()

    def run():
        m = before if bound == "outside" else bind()
        code, first = m.encode(TOKENS)
        logits, second = m(TOKENS)
        layer = m.layers[0](normal(2, 4))
        return (code, logits, layer), (first, second)

    out, widths = under_policy(state, run)
    assert dtypes(out) == ["float32"] * 3
    assert [int(w) for w in widths] == [2, 2]
    # Outside of the policy the same bound module promotes, as Flax does.
    assert before.decode(normal(2, 4))[1] == 4


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

    model = Sowing()
    variables = variables_of(model, X)
    state = state_of(model, variables, "O2")
    variables = {"params": state.params, "counts": variables["counts"]}
    for mutable in (["intermediates", "counts"], True):
        out, new = state.apply_fn(variables, X, mutable=mutable)
        assert out.dtype == jnp.float32
        hidden = new["intermediates"]["hidden"][0]
        assert hidden.dtype == jnp.float16  # what the model had, not a copy of it
        assert dtypes(new["counts"]) == ["int32", "float32"]
        plain = model.apply(variables, X, mutable=mutable)[1]
        assert jax.tree.structure(new) == jax.tree.structure(plain)
        start = np.float64(variables["counts"]["total"])
        expected = start + np.float64(hidden).sum()
        np.testing.assert_allclose(new["counts"]["total"], expected, rtol=1e-6)


def test_captured_intermediates():
    model = Headed()
    state = state_of(model, variables_of(model, X), "O2")
    out, new = state.apply_fn(
        {"params": state.params},
        X,
        capture_intermediates=True,
        mutable=["intermediates"],
    )
    seen = new["intermediates"]
    assert seen["body"]["__call__"][0].dtype == jnp.float16
    np.testing.assert_array_equal(np.float32(seen["head"]["__call__"][0]), out)


def test_dropout_draws_the_same_mask():
    class Dropped(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return nn.Dropout(0.5, deterministic=not train)(nn.Dense(64)(x))

    model = Dropped()
    variables = variables_of(model, X, train=False)
    state = state_of(model, variables, "O2")
    options = {"train": True, "rngs": {"dropout": jax.random.key(5)}}
    out = state.apply_fn({"params": state.params}, X, **options)
    fp32 = model.apply(variables, X, **options)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out == 0, fp32 == 0)
    assert 0.3 < np.mean(out == 0) < 0.7
    # Both factors, four partial sums, bias and output are rounded; dropout doubles.
    dense = jax.tree.map(np.abs, variables["params"]["Dense_0"])
    size = np.abs(X) @ dense["kernel"] + dense["bias"]
    assert np.all(np.abs(out - fp32) <= 2 * 8 * 2.0**-11 * size)


def test_a_model_in_a_model_through_apply():
    # A student that calls `apply` on another half model: that one is patched as well.
    inner = Witness()
    variables = variables_of(inner, X)
    params = jax.tree.map(lambda p: p.astype(jnp.float16), variables["params"])

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            y, width = inner.apply({"params": params}, x.astype(jnp.float32))
            return nn.Dense(2)(y), width

    state = state_of(Outer(), variables_of(Outer(), X), "O2")
    fn = lambda p: state.apply_fn({"params": p}, X)  # noqa: E731
    assert fn(state.params)[1] == 2
    assert products(fn, state.params) == ["float16,float16"] * 2


def test_a_dtype_field_is_restored():
    # The user's module object is not touched, nor is a bound one after the call.
    model = Headed(dtype=jnp.float32, head_dtype=jnp.float32)
    state = state_of(model, variables_of(model, SEQUENCE), "O2")
    bound = model.bind({"params": state.params})
    under_policy(state, lambda: bound(SEQUENCE))
    assert bound.dtype == model.dtype == jnp.float32
    fields = [field.name for field in dataclasses.fields(Headed)]
    assert "dtype" in fields and model == Headed(jnp.float32, jnp.float32)
