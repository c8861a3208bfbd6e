"""Test the dtypes and the accuracy of Linen models at O2, O3 and O5."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp
from tests.policy.forward_models import (
    CASES,
    SMALL,
    TOKENS,
    Headed,
    Normed,
    dtypes,
    forward,
    loss_of,
    normal,
    products,
    state_of,
    variables_of,
)
from tests.support import programs
from tests.support.models import Transformer
from tests.support.states import HALF

# Flax itself promotes: half inputs meet BatchNorm's float32 parameters.
pytestmark = [pytest.mark.slow, pytest.mark.standard_promotion]

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}
X = normal(5, 6)


def gradient(x, apply=None):
    """Returns a function from a state to loss, outputs, statistics and gradients."""
    return lambda state: jamp.scaled_value_and_grad(
        loss_of(state, x, apply=apply), has_aux=True
    )(state)


def plain_gradient(state, x, apply):
    """Returns the same function of params without jamp."""
    return jax.value_and_grad(loss_of(state, x, apply=apply), has_aux=True)


@pytest.mark.parametrize("name", CASES)
def test_every_product_of_a_model_is_half_and_none_is_missing(name):
    model, x = CASES[name]
    variables = variables_of(model, x)
    for level in HALF if name == "cnn" else ["O2"]:
        state = state_of(model, level=level, variables=variables)
        trace = jax.make_jaxpr(gradient(x, model.apply), return_shape=True)
        jaxpr, ((_, (out, stats)), grads) = trace(state)
        found = [{p.lhs, p.rhs} for p in programs.products_of(jaxpr.jaxpr)]
        plain = plain_gradient(state, x, model.apply)
        count = len(products(plain, variables["params"]))
        assert found == [{jnp.dtype(HALF[level]).name}] * count
        assert set(dtypes(out)) == {"float32"} and set(dtypes(stats)) <= {"float32"}
        assert set(dtypes(grads)) == {"float32"}
        if level == "O2":
            # state.apply_fn inside a loss is not cast a second time.
            again = programs.products(gradient(x), state)
            assert [{p.lhs, p.rhs} for p in again] == found


@pytest.mark.parametrize("name", ["cnn", "scan-remat"])
def test_o0_adds_nothing_to_a_float32_model(name):
    model, x = CASES[name]
    variables = variables_of(model, x)
    state = state_of(model, level="O0", variables=variables)
    ours, plain = (
        jax.make_jaxpr(plain_gradient(state, x, apply))(state.params)
        for apply in (state.apply_fn, model.apply)
    )
    assert str(ours) == str(plain)
    # A loss that calls the model itself is also the same program.
    off = state_of(model, level="O0", variables=variables, cast_model_type=False)
    trace = jax.make_jaxpr(gradient(x, model.apply))
    assert str(trace(state)) == str(trace(off))


@pytest.mark.parametrize(
    "level, dtype", [("O2", None), ("O2", jnp.float32), ("O3", None), ("O5", None)]
)
def test_batchnorm(level, dtype):
    # BatchNorm reads and computes float32. The next layer runs in half.
    model, x = Normed(dtype), normal(64, 4) + 1
    state, half = state_of(model, x, level=level), np.dtype(HALF[level])
    found = products(lambda s: forward(s, x, train=False), state)
    assert set(found) == {f"{half},{half}"}
    norm, dense = state.params["BatchNorm_0"], state.params["Dense_0"]
    assert set(dtypes(norm)) == {"float32" if level != "O3" else "float16"}
    out, new = forward(state, x, mutable=["batch_stats"])
    assert out.dtype == jnp.float32
    seen, before = np.float64(x), state.batch_stats["BatchNorm_0"]
    after = new["batch_stats"]["BatchNorm_0"]
    for name, batch in (("mean", seen.mean(0)), ("var", seen.var(0))):
        expected = 0.9 * np.float64(before[name]) + 0.1 * batch
        assert after[name].dtype == jnp.float32
        np.testing.assert_allclose(after[name], expected, rtol=2e-6)

    out = forward(state, x, train=False)
    y = seen - np.float64(before["mean"])
    y *= np.float64(norm["scale"]) / np.sqrt(np.float64(before["var"]) + 1e-5)
    y += np.float64(norm["bias"])
    expected = y @ np.float64(dense["kernel"]) + np.float64(dense["bias"])
    # y, four terms with their partial sums, the sum and the bias are rounded.
    size = np.abs(y) @ np.abs(np.float64(dense["kernel"])) + np.abs(expected) + 1
    assert np.all(np.abs(out - expected) <= 8 * UNIT_ROUNDOFF[half.name] * size)


BLOCK = "MultiHeadDotProductAttention"


@pytest.mark.parametrize(
    "model, x, keep_fp32, expected",
    [
        (Headed(), X, "head", "half float"),
        (Headed(head_dtype=jnp.float32), X, "head", "half float"),
        # A kept bias does not widen its matmul.
        (Headed(), X, "bias$", "half half"),
        # Query, key, value, scores, mixture and out are kept, unlike MLP and logits.
        (Transformer(**SMALL), TOKENS, BLOCK, "float " * 6 + "half half half"),
    ],
)
def test_only_matmuls_of_kept_params_are_float32(model, x, keep_fp32, expected):
    state = state_of(model, x, keep_fp32=keep_fp32)
    found = products(gradient(x, model.apply), state)
    forwards = products(lambda s: forward(s, x), state)
    names = {"half": "float16,float16", "float": "float32,float32"}
    assert forwards == [names[word] for word in expected.split()]
    assert set(found) == set(forwards)


def test_a_kept_head_with_a_half_dtype_warns():
    state = state_of(Headed(head_dtype=jnp.float16), X, keep_fp32="head")
    with pytest.warns(jamp.PrecisionWarning, match="keep_fp32 keeps .* 'Headed/head'"):
        found = products(lambda s: forward(s, X), state)
    assert found == ["float16,float16"] * 2


def test_a_kept_heads_logits_are_not_rounded_to_half_on_the_way_out():
    model = Headed()
    variables = variables_of(model, X)
    state = state_of(model, variables=variables, keep_fp32="head")
    capture = {"capture_intermediates": True, "mutable": ["intermediates"]}
    logits, seen = forward(state, X, **capture)
    body = seen["intermediates"]["body"]["__call__"][0]
    head = jax.tree.map(np.float64, variables["params"]["head"])
    expected = np.maximum(np.float64(body), 0) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)
