"""Test fp16_utils: casts, masters by hand, clipping, FP16Model and the scalers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jamp import fp16_utils as fu
from tests.fp16_utils.fp16 import BF16, F16, F32, host
from tests.oracles import fp16_optimizer as oracle
from tests.support.bits import assert_same_bits


def tree(dtype=F32):
    """Returns params of every relevant kind of layer, and a counter."""
    return {
        "conv": {"kernel": jnp.full((2, 3), 0.1, dtype)},
        "bn": {"scale": jnp.full(3, 1.1, dtype), "bias": jnp.full(3, 0.2, dtype)},
        "LayerNorm_0": {"scale": jnp.full(3, 1.2, dtype)},
        "block": {"BatchNorm_0": {"scale": jnp.full(3, 1.3, dtype)}},
        "gain": jnp.asarray(0.3, dtype),
        "steps": jnp.asarray(7, jnp.int32),
    }


STATS = {"mean": jnp.zeros(3, F32), "var": jnp.ones(3, F32)}
NAMED = ("bn", "block/BatchNorm_0")
# The call, the dtypes before and after, and the paths that stay float32.
CASTS = [
    (fu.network_to_half, F32, F16, NAMED),
    # Statistics override names.
    (lambda p: fu.network_to_half(p, {"conv": STATS}), F32, F16, ("conv",)),
    (fu.BN_convert_float, F16, F16, NAMED),
    (lambda p: fu.convert_network(p, BF16), F32, BF16, NAMED),
    (lambda p: fu.convert_network(p, F32, {"bn": STATS}), F16, F32, NAMED),
    # Converts only the leaves at the top.
    (lambda p: fu.convert_module(p, BF16), F32, BF16, ("conv", "LayerNorm", *NAMED)),
]


@pytest.mark.parametrize("call, given, half, fp32", CASTS)
def test_casts_leave_batchnorm_in_fp32(call, given, half, fp32):
    def expected(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        dtype = F32 if name.startswith(fp32) else half
        return leaf if name == "steps" else leaf.astype(dtype)

    before = tree(given)
    wanted = jax.tree.map_with_path(expected, before)
    assert_same_bits(jax.jit(call)(before), wanted)


def floats(dtype=F32):
    return {"w": jnp.asarray([[1.5, -2.0]], dtype), "b": jnp.asarray([0.1], dtype)}


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("dtype", [F16, BF16, F32, None])
def test_masters_are_copies_in_fp32_and_come_back_rounded(dtype, flat):
    def as_masters(tree):
        """Returns a float32 tree, or a list of one vector of all leaves."""
        wide = jax.tree.map(lambda x: x.astype(F32), tree)
        leaves = [x.ravel() for x in jax.tree.leaves(wide)]
        return [jnp.concatenate(leaves)] if flat else wide

    given = floats(dtype) if dtype else floats(F16) | {"b": floats(BF16)["b"]}
    model, masters = fu.prep_param_lists(given, flat_master=flat)
    assert_same_bits(model, given)
    assert_same_bits(masters, as_masters(given))
    # Copies, so that either may be donated.
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves((given, masters))]
    assert len(set(pointers)) == len(pointers)
    grads = jax.tree.map(lambda p: p * 512, given)  # not unscaled
    copied = fu.model_grads_to_master_grads(grads, masters, flat_master=flat)
    assert_same_bits(copied, as_masters(grads))
    if not flat:  # a missing gradient stays None
        copied = fu.model_grads_to_master_grads(grads | {"b": None}, masters)
        assert_same_bits(copied, as_masters(grads) | {"b": None})
    masters = jax.tree.map(lambda m: m + jnp.float32(1 / 3), masters)
    after = fu.master_params_to_model_params(model, masters, flat_master=flat)
    third = jax.tree.map(lambda p: p.astype(F32) + jnp.float32(1 / 3), given)
    assert_same_bits(after, jax.tree.map(lambda m, p: m.astype(p.dtype), third, given))


def test_a_model_and_a_first_layer_compute_in_half():
    given = {"x": jnp.asarray([[0.5, 3.0]]), "n": jnp.arange(2)}
    half = given | {"x": given["x"].astype(F16)}
    assert_same_bits(fu.tofp16()(given), half)
    w = jnp.asarray([[2.0, 0.25], [1.0, -4.0]], F16)
    model = jax.jit(fu.FP16Model(lambda w, x, *, by: (x @ w) * by))
    assert_same_bits(model(w, given["x"], by=2.0), jnp.asarray([[8.0, -23.75]], F16))


@pytest.mark.parametrize("norm_type", [1, 2, 2.5, np.inf, "inf"])
def test_clip_grad_norm_matches_torch(norm_type):
    x = jnp.asarray(np.random.default_rng(0).normal(size=10) / 4, F32)  # less than 1
    grads = {"w": x[:6].reshape(3, 2), "b": x[6:]}
    clip = jax.jit(fu.clip_grad_norm, static_argnums=2)
    for max_norm in (0.1, 1e3):
        norm, clipped = clip(grads, max_norm, norm_type)
        before, expected = oracle.clip(host(grads), max_norm, float(norm_type))
        np.testing.assert_allclose(norm, before, rtol=1e-6)
        for got, wanted in zip(host(clipped), expected, strict=True):
            assert got.dtype == np.float32
            np.testing.assert_allclose(got, wanted, rtol=1e-6)
    assert_same_bits(clipped, grads)


def test_clip_grad_norm_takes_half_and_none():
    half = {"w": jnp.full(4096, 8.0, F16), "b": None}
    norm, clipped = fu.clip_grad_norm(half, 1.0)
    assert norm == 512  # in float16 the sum of squares would be inf
    assert_same_bits(clipped, {"w": jnp.full(4096, 1 / 64, F16), "b": None})


def test_clip_grad_norm_loses_no_nan():
    """XLA's maximum on a CPU loses NaN from 4,096 elements on."""
    norm = jax.jit(lambda g: fu.clip_grad_norm(g, 1.0, "inf")[0])
    grads = jnp.ones(5000)
    for value in (jnp.nan, jnp.inf, 7.0):
        found = norm({"w": grads.at[7].set(value), "b": grads})
        np.testing.assert_array_equal(found, value)


@pytest.mark.parametrize(
    "kwargs, steps, rate",
    [
        ({}, 6000, 0.001),
        ({"init_scale": 8.0, "scale_window": 3}, 2000, 0.3),
        ({"init_scale": 2.0**16, "scale_factor": 4.0, "scale_window": 5}, 2000, 0.15),
    ],
)
def test_a_dynamic_scaler_follows_apex_through_random_overflows(kwargs, steps, rate):
    scaler, model = fu.DynamicLossScaler(**kwargs), oracle.DynamicLossScaler(**kwargs)
    flags = np.random.default_rng(1).random(steps) < rate

    def step(state, flag):
        return scaler.update_scale(state, flag), state

    last, before = jax.jit(lambda s, f: lax.scan(step, s, f))(scaler.init(), flags)
    expected = [model.cur_scale]
    for flag in flags:
        model.update_scale(bool(flag))
        expected.append(model.cur_scale)
    np.testing.assert_array_equal(np.append(before.scale, last.scale), expected)
    assert len(set(expected)) > 2


def test_scaled_gradients_are_rounded_once():
    scaler = fu.DynamicLossScaler(2.0**16)  # which is inf in float16
    scaled = scaler.scale_gradient(scaler.init(), [jnp.asarray([1e-5, 0, 2], F16)])
    wanted = [float(np.float16(1e-5)) * 65536.0, 0.0, np.inf]
    assert_same_bits(scaled, [jnp.asarray(wanted, F16)])


@pytest.mark.parametrize("bad", [None, np.inf, -np.inf, np.nan])
def test_has_overflow_looks_at_every_element(bad):
    scaler = fu.DynamicLossScaler()
    # The sums of the finite leaves overflow float16 and float32.
    grads = {
        "h": jnp.full(8, 60000.0, F16),
        "w": jnp.full((2, 2), 3e38, F32).at[1, 0].set(3e38 if bad is None else bad),
        "none": None,
    }
    found = jax.jit(scaler.has_overflow)(grads)
    assert_same_bits(found, jnp.asarray(bad is not None))
    assert not scaler.has_overflow({})


HALF = floats(F16)
to_masters, to_model = fu.model_grads_to_master_grads, fu.master_params_to_model_params
REFUSED = [
    (lambda: fu.convert_module([1], F16), r"mapping of .* got \[1\]"),
    (lambda: fu.convert_module({}, "int8"), "^`dtype` must be .*got 'int8'"),
    (lambda: fu.prep_param_lists({"n": jnp.arange(2)}), r"params\['n'\] is .* floats"),
    (lambda: to_masters({"w": None}, [jnp.ones(3)], True), "none may be missing"),
    (lambda: to_model(HALF, {"w": HALF["w"]}), "must be like the params"),
    (lambda: to_model(HALF, [jnp.ones(7)], True), "has shape .7,., expected .3,."),
    (lambda: fu.to_python_float(jnp.ones(2)), "array of size 1"),
    (lambda: fu.clip_grad_norm(HALF, 1.0, 0), "must be positive, got 0"),
    (lambda: fu.DynamicLossScaler(scale_window=0), "window"),
    (lambda: fu.DynamicLossScaler(scale_factor=1), "greater than 1, got 1"),
    (lambda: fu.DynamicLossScaler(0.25), "min_scale.* must not exceed"),
]


@pytest.mark.parametrize("call, words", REFUSED)
def test_what_is_refused(call, words):
    with pytest.raises((TypeError, ValueError), match=words):
        call()
