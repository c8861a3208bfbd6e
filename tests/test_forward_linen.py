"""Inside a Linen model under O2, O3 and O5: what is computed in half, and how well."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.typing import DTypeLike

import jamp
from tests.bits import assert_same_bits
from tests.forward_models import (
    CASES,
    HALF,
    IMAGES,
    SEQUENCE,
    SMALL,
    TOKENS,
    Case,
    Headed,
    Normed,
    Recurrent,
    Tied,
    dtypes,
    loss_of,
    mean_square,
    normal,
    products,
    state_of,
    variables_of,
)
from tests.models import CNN, MLP, Transformer

# Flax itself promotes: half inputs meet BatchNorm's float32 parameters.
pytestmark = pytest.mark.standard_promotion

UNIT_ROUNDOFF = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


def grads_of(case, state, route):
    return jamp.scaled_value_and_grad(loss_of(case, state, route), has_aux=True)


@pytest.mark.parametrize("route", ["state.apply_fn", "model.apply"])
@pytest.mark.parametrize("name", CASES)
def test_every_product_is_half_at_o2(name, route):
    case = CASES[name]
    variables = variables_of(case.model, *case.inputs)
    state = state_of(case.model, variables, "O2")
    fn = lambda s: grads_of(case, s, route)(s)  # noqa: E731
    found = products(fn, state)
    assert set(found) == {"float16,float16"}
    # None went missing: the fp32 model's gradient, without jamp, has as many.
    plain = state.replace(apply_fn=case.model.apply)
    loss_fn = jax.grad(loss_of(case, plain, "state.apply_fn"), has_aux=True)
    assert len(found) == len(products(loss_fn, variables["params"]))
    (_, (out, stats)), grads = jax.eval_shape(fn, state)
    assert set(dtypes(out)) == {"float32"}
    assert set(dtypes(stats)) <= {"float32"}
    assert dtypes(grads.tree) == dtypes(state.params)


@pytest.mark.parametrize("level", ["O3", "O5"])
@pytest.mark.parametrize("name", ["cnn", "transformer-float32", "lstm", "scan-remat"])
def test_every_product_is_half_at_o3_and_o5(name, level):
    case = CASES[name]
    variables = variables_of(case.model, *case.inputs)
    state = state_of(case.model, variables, level)
    fn = lambda s: grads_of(case, s, "model.apply")(s)  # noqa: E731
    half = str(jnp.dtype(HALF[level]))
    assert set(products(fn, state)) == {f"{half},{half}"}
    (_, (out, stats)), grads = jax.eval_shape(fn, state)
    assert set(dtypes(out)) == {"float32"}
    assert set(dtypes(stats)) <= {"float32"}
    assert dtypes(grads.tree) == dtypes(state.params)


@pytest.mark.parametrize("name", CASES)
def test_both_routes_are_the_same_program(name):
    # state.apply_fn inside of a loss enters the policy a second time: no effect.
    case = CASES[name]
    state = state_of(case.model, variables_of(case.model, *case.inputs), "O2")
    routes = [
        jax.make_jaxpr(lambda s, route=route: grads_of(case, s, route)(s))(state)
        for route in ("state.apply_fn", "model.apply")
    ]
    assert str(routes[0]) == str(routes[1])


# The same models with dtype=half, as a user would write them by hand.
BY_HAND = {
    "cnn": (CNN((4, 8), 1), lambda d: CNN((4, 8), 1, dtype=d), IMAGES),
    "transformer": (
        Transformer(**SMALL),
        lambda d: Transformer(**SMALL, dtype=d),
        TOKENS,
    ),
    "optimized-lstm": (
        Recurrent(nn.OptimizedLSTMCell),
        lambda d: Recurrent(nn.OptimizedLSTMCell, dtype=d),
        SEQUENCE,
    ),
    "setup": (Tied(dtype=jnp.float32), lambda d: Tied(dtype=d), TOKENS),
}


@pytest.mark.parametrize(
    "name, level", [(name, "O2") for name in BY_HAND] + [("cnn", "O5")]
)
def test_equals_the_half_model_written_by_hand(name, level):
    model, hand, x = BY_HAND[name]
    case = Case(model, (x,), name == "cnn")
    state = state_of(model, variables_of(model, x), level)
    half = HALF[level]
    hand_x = x.astype(half) if jnp.issubdtype(x.dtype, jnp.floating) else x

    @op_by_op
    def by_hand(params):
        def loss_fn(params):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, new = hand(half).apply(variables, hand_x, mutable=["batch_stats"])
            out = jax.tree.map(lambda y: y.astype(jnp.float32), out)
            loss = mean_square(out)
            return loss * 8.0, (loss, out, new.get("batch_stats", {}))

        return jax.grad(loss_fn, has_aux=True)(params)

    @op_by_op
    def by_jamp(state):
        (loss, (out, stats)), grads = grads_of(case, state, "state.apply_fn")(state)
        return grads.tree, (loss, out, stats)

    assert_same_bits(by_jamp(state), by_hand(state.params))


def op_by_op(fn):
    """jit that rounds where the program says so, as XLA does not by default."""
    options = {
        "xla_allow_excess_precision": False,
        "xla_backend_optimization_level": 0,
        "xla_disable_hlo_passes": "fusion",
    }
    return jax.jit(fn, compiler_options=options)


@pytest.mark.parametrize("level", HALF)
def test_error_against_float64_is_that_of_half(level):
    """Rounding errors followed through the layers, each as bad as it can be."""
    model, x = MLP((8, 8, 3)), normal(5, 6)
    variables = variables_of(model, x)
    state = state_of(model, variables, level)
    out = np.asarray(state.apply_fn({"params": state.params}, x), np.float64)

    unit = UNIT_ROUNDOFF[str(jnp.dtype(HALF[level]))]
    exact, error = np.float64(x), unit * np.abs(np.float64(x))
    for layer in range(3):
        params = variables["params"][f"Dense_{layer}"]
        kernel, bias = np.float64(params["kernel"]), np.float64(params["bias"])
        size = np.abs(exact) + error
        # What came in, the kernel's rounding, one per partial sum, the bias's.
        error = error @ np.abs(kernel) + unit * size @ np.abs(kernel)
        error += len(kernel) * unit * size @ np.abs(kernel) + unit * np.abs(bias)
        exact = exact @ kernel + bias
        error += 2 * unit * (np.abs(exact) + error)  # the product, then the sum
        if layer < 2:
            exact = np.maximum(exact, 0)
    assert np.all(np.abs(out - exact) <= error)
    # And it is no float32 run, whose errors are below 1e-5 here.
    assert np.max(np.abs(out - exact)) > 1e-4


@pytest.mark.parametrize("dtype", [None, jnp.float32])
@pytest.mark.parametrize("level", HALF)
def test_batchnorm_in_training(level, dtype):
    model, x = Normed(dtype), normal(64, 4) + 1
    variables = variables_of(model, x)
    state = state_of(model, variables, level)
    kept = "float32" if level != "O3" else "float16"
    assert set(dtypes(state.params["BatchNorm_0"])) == {kept}
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    (out, width), new = state.apply_fn(variables, x, mutable=["batch_stats"])
    assert width == 2 and out.dtype == jnp.float32
    # The statistics are those of the rounded input, to float32's precision.
    seen, before = np.float64(x.astype(HALF[level])), state.batch_stats["BatchNorm_0"]
    after = new["batch_stats"]["BatchNorm_0"]
    for name, batch in (("mean", seen.mean(0)), ("var", seen.var(0))):
        expected = 0.9 * np.float64(before[name]) + 0.1 * batch
        assert after[name].dtype == jnp.float32
        np.testing.assert_allclose(after[name], expected, rtol=2e-6)


@pytest.mark.parametrize("level", HALF)
def test_batchnorm_in_evaluation(level):
    model, x = Normed(), normal(8, 4) + 1
    variables = variables_of(model, x)
    state = state_of(model, variables, level)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    out, width = state.apply_fn(variables, x, train=False)
    assert width == 2 and out.dtype == jnp.float32
    half = np.dtype(HALF[level])
    norm, dense = state.params["BatchNorm_0"], state.params["Dense_0"]
    stats = state.batch_stats["BatchNorm_0"]
    y = np.float64(x.astype(half)) - np.float64(stats["mean"])
    y *= np.float64(norm["scale"]) / np.sqrt(np.float64(stats["var"]) + 1e-5)
    y += np.float64(norm["bias"])
    expected = y @ np.float64(dense["kernel"]) + np.float64(dense["bias"])
    # y, four products with their partial sums, the sum and the bias are rounded.
    size = np.abs(y) @ np.abs(np.float64(dense["kernel"])) + np.abs(expected) + 1
    assert np.all(np.abs(out - expected) <= 8 * UNIT_ROUNDOFF[half.name] * size)


def test_batchnorm_without_params_gives_half():
    # There is nothing to keep, and apex casts it; Flax's statistics are float32 still.
    model = Normed(jnp.float32, affine=False)
    state = state_of(model, variables_of(model, SEQUENCE), "O2")
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    (out, width), new = state.apply_fn(variables, SEQUENCE, mutable=["batch_stats"])
    assert width == 2 and out.dtype == jnp.float32
    assert dtypes(new) == ["float32"] * 2


def test_a_module_without_params_reads_its_dtype_as_half():
    class Scores(nn.Module):
        dtype: DTypeLike = jnp.float32

        def __call__(self, q, k):
            q, k = nn.dtypes.promote_dtype(q, k, dtype=self.dtype)
            return jnp.einsum("bqc,bkc->bqk", q, k)

    class Attention(nn.Module):
        @nn.compact
        def __call__(self, x):
            return Scores()(nn.Dense(4)(x), nn.Dense(4)(x))

    state = state_of(Attention(), variables_of(Attention(), SEQUENCE), "O2")
    found = products(lambda p: state.apply_fn({"params": p}, SEQUENCE), state.params)
    assert found == ["float16,float16"] * 3


@pytest.mark.parametrize("dtype", [None, jnp.float32, jnp.float16])
def test_a_kept_head_computes_in_float32(dtype):
    # Its logits keep their float32 bits: no rounding to half on the way out.
    model, x = Headed(head_dtype=dtype), normal(5, 6)
    variables = variables_of(model, x)
    state = state_of(model, variables, "O2", keep_fp32="head")
    assert set(dtypes(state.params["head"])) == {"float32"}
    case = Case(model, (x,))
    found = products(lambda s: grads_of(case, s, "model.apply")(s), state)
    # The body's product and its gradient; the head's, and its two gradients.
    assert found.count("float16,float16") == 2
    assert found.count("float32,float32") == 3
    logits, seen = state.apply_fn(
        {"params": state.params},
        x,
        capture_intermediates=True,
        mutable=["intermediates"],
    )
    body = seen["intermediates"]["body"]["__call__"][0]
    assert body.dtype == jnp.float16
    head = jax.tree.map(np.float64, variables["params"]["head"])
    expected = np.maximum(np.float64(body), 0) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_a_kept_head_does_not_take_its_parents_half():
    # The parent reads its dtype=float32 as half, and hands that on to the kept head.
    class Parent(nn.Module):
        dtype: DTypeLike = jnp.float32

        @nn.compact
        def __call__(self, x):
            return Headed(self.dtype, self.dtype)(nn.Dense(4, dtype=self.dtype)(x))

    model, x = Parent(), normal(5, 6)
    state = state_of(model, variables_of(model, x), "O2", keep_fp32="head")
    found = products(lambda p: state.apply_fn({"params": p}, x), state.params)
    assert found == ["float16,float16", "float16,float16", "float32,float32"]


def test_a_kept_bias_does_not_pull_its_product_up():
    model, x = Headed(), normal(5, 6)
    state = state_of(model, variables_of(model, x), "O2", keep_fp32="bias$")
    assert sorted(dtypes(state.params)) == ["float16"] * 2 + ["float32"] * 2
    case = Case(model, (x,))
    found = products(lambda s: grads_of(case, s, "model.apply")(s), state)
    assert set(found) == {"float16,float16"}


def test_a_kept_block_is_float32_throughout():
    model, x = Transformer(**SMALL), TOKENS
    keep = "MultiHeadDotProductAttention"
    state = state_of(model, variables_of(model, x), "O2", keep_fp32=keep)
    found = products(lambda p: state.apply_fn({"params": p}, x), state.params)
    # Query, key, value, scores, mixture, out; then two of the MLP, and the logits.
    assert found == ["float32,float32"] * 6 + ["float16,float16"] * 3


def test_simple_cell_keeps_the_carry_that_scan_was_given():
    # nn.RNN(nn.SimpleCell(dtype=float16)) raises in Flax; under a policy it runs.
    model = Recurrent(nn.SimpleCell)
    state = state_of(model, variables_of(model, SEQUENCE), "O2")
    found = products(lambda p: state.apply_fn({"params": p}, SEQUENCE), state.params)
    assert set(found) == {"float16,float16"}


def test_a_helper_method_keeps_the_users_float32():
    # Casting the arguments of a module's own methods would undo the user's island.
    seen = []

    class Careful(nn.Module):
        @nn.compact
        def __call__(self, x):
            scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
            return self.normalize(x.astype(jnp.float32)).astype(x.dtype) * scale

        def normalize(self, x):
            seen.append(x.dtype)
            return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.Dense(2)(Careful()(nn.Dense(4)(x)))

    state = state_of(Outer(), variables_of(Outer(), SEQUENCE), "O2")
    seen.clear()
    state.apply_fn({"params": state.params}, SEQUENCE)
    assert seen == [jnp.float32]


def test_decoding_with_a_cache_that_was_cast():
    # init makes a float32 cache, which half keys cannot be written into.
    class Decoder(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.MultiHeadDotProductAttention(2, decode=True)(x)

    model = Decoder()
    variables = variables_of(model, SEQUENCE)
    state = state_of(model, variables, "O2")
    half = jamp.cast_model(variables, jnp.float16)
    token = {"params": state.params, "cache": half["cache"]}
    out, new = state.apply_fn(token, SEQUENCE[:, :1], mutable=["cache"])
    assert out.dtype == jnp.float32
    assert dtypes(new) == ["int32", "float16", "float16"]
    assert new["cache"]["MultiHeadDotProductAttention_0"]["cache_index"] == 1
