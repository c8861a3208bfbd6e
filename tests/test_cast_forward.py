"""`cast_forward`, the patch for any framework: inputs to half, outputs to float32."""

import functools
import importlib.util
import pickle

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.bits import assert_same_bits
from tests.forward_models import (
    Headed,
    Witness,
    dtypes,
    normal,
    products,
    state_of,
    variables_of,
)

HAIKU = importlib.util.find_spec("haiku")
X = normal(3, 4)
O2, O3, O5 = (jamp.Properties.from_opt_level(level) for level in ("O2", "O3", "O5"))


def spy(seen, returns=None):
    def apply_fn(*args, **kwargs):
        seen.append((args, kwargs))
        return returns

    return apply_fn


def plain(params, x):
    """Module level, so that it can be pickled."""
    return jnp.tanh(x @ params["w"])


@pytest.mark.parametrize("properties", [O2, O3, O5], ids=["O2", "O3", "O5"])
def test_inputs_are_cast_and_variables_are_not(properties):
    seen, half = [], properties.cast_model_type
    variables = {"params": {"w": X}, "state": X}
    key = jax.random.key(0)
    fn = jamp.cast_forward(spy(seen), properties)
    fn(variables, X, [X, jnp.arange(3)], key, scale=X, train=True)
    (got, x, nested, got_key), keywords = seen[0]
    assert got is variables and got_key is key and keywords["train"] is True
    assert x.dtype == nested[0].dtype == keywords["scale"].dtype == half
    assert nested[1].dtype == jnp.int32
    np.testing.assert_array_equal(x, np.asarray(X).astype(half))


def test_outputs_come_back_in_float32():
    half = X.astype(jnp.float16)
    fn = jamp.cast_forward(spy([], {"a": half, "n": jnp.arange(2)}), O2)
    out = fn({}, X)
    assert dtypes(out) == ["float32", "int32"]
    np.testing.assert_array_equal(out["a"], np.float32(half))


def test_cast_model_outputs():
    properties = jamp.Properties.from_opt_level("O2", cast_model_outputs=jnp.bfloat16)
    fn = jamp.cast_forward(spy([], X), properties)
    assert fn({}, X).dtype == jnp.bfloat16


def test_a_tuple_is_an_output_like_any_other():
    half = X.astype(jnp.float16)
    fn = jamp.cast_forward(spy([], (half, {"h": half})), O2)
    assert dtypes(fn({}, X)) == ["float32"] * 2
    assert dtypes(fn({}, X, mutable=False)) == ["float32"] * 2


@pytest.mark.parametrize("mutable", [["cache"], "cache", True, []])
def test_mutable_collections_keep_their_dtypes(mutable):
    half, seen = X.astype(jnp.float16), []
    fn = jamp.cast_forward(spy(seen, (half, {"cache": half})), O2)
    out, new = fn({}, X, mutable=mutable)
    assert out.dtype == jnp.float32
    assert new["cache"] is half
    assert seen[0][1]["mutable"] == mutable


def test_a_function_of_jax_runs_in_half():
    w = normal(4, 2, seed=1)
    state = jamp.initialize({"w": w}, None, "O2", apply_fn=plain, verbosity=0)
    out = state.apply_fn(state.params, X)
    assert out.dtype == jnp.float32
    assert products(state.apply_fn, state.params, X) == ["float16,float16"]
    # Bitwise what the half program by hand gives, widened.
    by_hand = plain({"w": w.astype(jnp.float16)}, X.astype(jnp.float16))
    assert_same_bits(out, by_hand.astype(jnp.float32))


def test_gradients_through_a_function_are_in_the_params_dtypes():
    state = jamp.initialize(
        {"w": normal(4, 2)}, None, "O5", apply_fn=plain, verbosity=0
    )

    def loss_fn(params):
        return jnp.sum(state.apply_fn(params, X))

    fn = jamp.scaled_value_and_grad(loss_fn)
    loss, grads = fn(state)
    assert loss.dtype == jnp.float32 and dtypes(grads.tree) == ["bfloat16"]
    assert set(products(fn, state)) == {"bfloat16,bfloat16"}
    w = np.float64(state.params["w"])
    y = np.tanh(np.float64(X) @ w)
    expected = np.float64(X).T @ (1 - y * y)
    # Five roundings of bfloat16 on the longest way to one of three terms.
    size = np.abs(np.float64(X)).T @ np.ones_like(y)
    assert np.all(np.abs(np.float64(grads.tree["w"]) - expected) <= 8 * 2.0**-8 * size)


def test_o0_is_float32_in_and_out():
    properties, seen = jamp.Properties.from_opt_level("O0"), []
    fn = jamp.cast_forward(spy(seen, X.astype(jnp.bfloat16)), properties)
    assert fn({}, X.astype(jnp.float16)).dtype == jnp.float32
    assert seen[0][0][1].dtype == jnp.float32
    ours, theirs = (
        jax.make_jaxpr(jamp.cast_forward(plain, properties)),
        jax.make_jaxpr(plain),
    )
    assert str(ours({"w": normal(4, 2)}, X)) == str(theirs({"w": normal(4, 2)}, X))


@pytest.mark.parametrize("options", [{"cast_model_type": False}, {"enabled": False}])
def test_nothing_is_cast_when_casting_is_off(options):
    properties, seen = jamp.Properties.from_opt_level("O2", **options), []
    half = X.astype(jnp.bfloat16)
    out = jamp.cast_forward(spy(seen, half), properties)({}, X)
    assert seen[0][0][1] is X and out is half


@pytest.mark.parametrize("level, half", [("O1", "float16"), ("O4", "bfloat16")])
def test_o1_and_o4_autocast_a_plain_function(level, half):
    fn = jamp.cast_forward(plain, jamp.Properties.from_opt_level(level))
    variables = {"w": normal(4, 2)}
    assert set(products(fn, variables, X)) == {f"{half},{half}"}
    assert fn(variables, X).dtype == jnp.float32


def test_equal_wrappers_are_one_static_argument():
    # TrainState keeps apply_fn as static data: a second hash would retrace every step.
    first, second = jamp.cast_forward(plain, O2), jamp.cast_forward(plain, O2)
    assert first == second and hash(first) == hash(second)
    assert first != jamp.cast_forward(plain, O5)
    assert pickle.loads(pickle.dumps(first)) == first


@pytest.mark.standard_promotion
@pytest.mark.parametrize("kind", ["lambda", "partial", "jit"])
def test_a_function_around_a_linen_model(kind):
    # jamp cannot see that it is a model's: inputs and outputs are cast all the same,
    # and the model inside runs under the policy.
    class Mixed(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.BatchNorm(use_running_average=True, dtype=jnp.float32)(x)
            return Witness(name="witness")(x)

    model = Mixed()
    variables = variables_of(model, X)
    apply_fn = {
        "lambda": lambda variables, x: model.apply(variables, x),
        "partial": functools.partial(model.apply, mutable=False),
        "jit": jax.jit(model.apply),
    }[kind]
    state = state_of(model, variables, "O2", apply_fn=apply_fn)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    out, width = state.apply_fn(variables, X)
    assert out.dtype == jnp.float32 and width == 2


@pytest.mark.standard_promotion  # hk.dropout multiplies by a mask of bools
@pytest.mark.skipif(not HAIKU, reason="needs dm-haiku, which jamp does not")
def test_haiku():
    import haiku as hk

    @hk.transform
    def model(x, scale):
        x = jax.nn.relu(hk.Linear(4)(x))
        x = hk.dropout(hk.next_rng_key(), 0.5, x)
        return hk.Linear(2)(x) * scale.astype(x.dtype), jnp.asarray(x.dtype.itemsize)

    params = model.init(jax.random.key(0), X, X[:, :1])
    state = jamp.initialize(params, None, "O2", apply_fn=model.apply, verbosity=0)
    args = jax.random.key(1), X
    out, width = state.apply_fn(state.params, *args, scale=X[:, :1])
    assert out.dtype == jnp.float32 and width == 2
    by_hand = model.apply(
        jax.tree.map(lambda p: p.astype(jnp.float16), params),
        args[0],
        X.astype(jnp.float16),
        X[:, :1].astype(jnp.float16),
    )
    assert_same_bits(out, by_hand[0].astype(jnp.float32))


def test_the_properties_of_a_state_serve_cast_forward():
    model = Headed()
    variables = variables_of(model, X)
    state = state_of(model, variables, "O3")
    fn = jamp.cast_forward(model.apply, state.properties)
    ours = fn({"params": state.params}, X)
    assert_same_bits(ours, state.apply_fn({"params": state.params}, X))
