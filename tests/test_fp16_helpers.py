"""fp16_utils: casts, masters by hand, clipping, FP16Model."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jamp import fp16_utils as fu
from tests.bits import assert_same_bits
from tests.oracles import fp16_optimizer as oracle

F16, BF16, F32 = jnp.float16, jnp.bfloat16, jnp.float32


def tree(dtype=F32):
    """Params of a model with every kind of layer that matters, and a counter."""
    return {
        "conv": {"kernel": jnp.full((2, 3), 0.1, dtype)},
        "bn": {"scale": jnp.full(3, 1.1, dtype), "bias": jnp.full(3, 0.2, dtype)},
        "LayerNorm_0": {"scale": jnp.full(3, 1.2, dtype)},
        "block": {"BatchNorm_0": {"scale": jnp.full(3, 1.3, dtype)}},
        "gain": jnp.asarray(0.3, dtype),
        "steps": jnp.asarray(7, jnp.int32),
    }


def stats(*paths):
    """Running statistics of BatchNorms at these paths."""
    result = {}
    for path in paths:
        at = result
        for name in path.split("/"):
            at = at.setdefault(name, {})
        at |= {"mean": jnp.zeros(3, F32), "var": jnp.ones(3, F32)}
    return result


def dtypes(x):
    """Per path the dtype."""
    leaves = jax.tree_util.tree_leaves_with_path(x)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): str(leaf.dtype)
        for path, leaf in leaves
    }


def expect(half, *fp32):
    """All floats in `half`, but for paths that begin with one of `fp32`."""
    return {
        path: "int32"
        if path == "steps"
        else ("float32" if path.startswith(fp32) else half)
        for path in dtypes(tree())
    }


def host(x):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(x)]


# Casting


def test_tofp16_casts_floats_and_stands_in_a_sequential():
    x = {"x": jnp.full(2, 0.1, F32), "b": jnp.ones(1, BF16), "i": jnp.arange(2)}
    half = fu.tofp16()(x)
    assert {k: v.dtype for k, v in half.items()} == {
        "x": F16,
        "b": F16,
        "i": jnp.int32,
    }
    assert_same_bits(half["x"], jnp.full(2, np.float16(0.1)))
    model = nn.Sequential([fu.tofp16(), nn.Dense(2, param_dtype=F16)])
    out, _ = model.init_with_output(jax.random.key(0), jnp.ones((1, 3), F32))
    assert out.dtype == F16
    assert jax.jit(fu.tofp16())(x["x"]).dtype == F16


def test_network_to_half_leaves_affine_batchnorm_in_fp32():
    half = fu.network_to_half(tree())
    assert dtypes(half) == expect("float16", "bn", "block/BatchNorm_0")
    assert_same_bits(half["bn"], tree()["bn"])
    # Statistics know better than names.
    half = fu.network_to_half(tree(), batch_stats=stats("conv"))
    assert dtypes(half) == expect("float16", "conv")


def test_bn_convert_float_widens_batchnorm_only():
    wide = fu.BN_convert_float(tree(F16))
    assert dtypes(wide) == expect("float16", "bn", "block/BatchNorm_0")
    assert_same_bits(wide["bn"]["scale"], tree(F16)["bn"]["scale"].astype(F32))
    wide = fu.BN_convert_float(tree(F16), batch_stats=stats("block/BatchNorm_0"))
    assert dtypes(wide) == expect("float16", "block/BatchNorm_0")


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_convert_network_casts_all_but_batchnorm(dtype):
    for given in (F32, F16):
        converted = fu.convert_network(tree(given), jnp.dtype(dtype))
        keep = ("bn", "block/BatchNorm_0")
        expected = expect(dtype, *keep) if given == F32 else None
        if expected is not None:
            assert dtypes(converted) == expected
        else:
            assert dtypes(converted)["conv/kernel"] == dtype
    converted = fu.convert_network(tree(), BF16, batch_stats=stats("bn"))
    assert dtypes(converted) == expect("bfloat16", "bn")


def test_convert_module_casts_leaves_at_the_top_only():
    converted = fu.convert_module(tree(), F16)
    expected = expect("float32") | {"gain": "float16"}
    assert dtypes(converted) == expected
    assert converted["conv"]["kernel"] is not None
    assert dtypes(fu.convert_module(tree()["bn"], BF16)) == {
        "scale": "bfloat16",
        "bias": "bfloat16",
    }


def test_casts_run_under_jit():
    assert_same_bits(jax.jit(fu.network_to_half)(tree()), fu.network_to_half(tree()))


# Lists of parameters


def floats(dtype=F32):
    return {"w": jnp.asarray([[1.5, -2.0]], dtype), "b": jnp.asarray([0.1], dtype)}


def test_prep_param_lists_copies_in_fp32():
    half = floats(F16)
    model, masters = fu.prep_param_lists(half)
    assert_same_bits(model, half)
    assert_same_bits(masters, jax.tree.map(lambda p: p.astype(F32), half))
    # Copies, so that either may be donated.
    same = floats(F32)
    _, masters = fu.prep_param_lists(same)
    assert all(
        a.unsafe_buffer_pointer() != b.unsafe_buffer_pointer()
        for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(masters), strict=True)
    )


def test_prep_param_lists_flat_is_one_vector_in_order():
    half = floats(F16)
    model, masters = fu.prep_param_lists(half, flat_master=True)
    assert_same_bits(model, half)
    (flat,) = masters
    assert flat.dtype == F32
    expected = np.concatenate([x.ravel() for x in host(half)]).astype(np.float32)
    np.testing.assert_array_equal(flat, expected)


def test_flat_masters_need_one_dtype():
    mixed = floats(F16) | {"w": floats()["w"]}
    with pytest.raises(ValueError, match="flat_master"):
        fu.prep_param_lists(mixed, flat_master=True)
    model, masters = fu.prep_param_lists(mixed)
    assert model["w"].dtype == masters["b"].dtype == F32


def test_model_grads_are_copied_without_unscaling():
    _, masters = fu.prep_param_lists(floats(F16))
    grads = jax.tree.map(lambda p: jnp.full_like(p, 512.0), floats(F16))
    copied = fu.model_grads_to_master_grads(grads, masters)
    assert_same_bits(copied, jax.tree.map(lambda g: g.astype(F32), grads))
    _, flat = fu.prep_param_lists(floats(F16), flat_master=True)
    (copied,) = fu.model_grads_to_master_grads(grads, flat, flat_master=True)
    assert_same_bits(copied, jnp.full(3, 512.0, F32))


def test_a_missing_gradient_stays_none():
    _, masters = fu.prep_param_lists(floats(F16))
    grads = {"w": jnp.ones((1, 2), F16), "b": None}
    copied = fu.model_grads_to_master_grads(grads, masters)
    assert copied["b"] is None
    assert_same_bits(copied["w"], jnp.ones((1, 2), F32))
    _, flat = fu.prep_param_lists(floats(F16), flat_master=True)
    with pytest.raises(ValueError):
        fu.model_grads_to_master_grads(grads, flat, flat_master=True)


@pytest.mark.parametrize("dtype", [F16, BF16, F32])
@pytest.mark.parametrize("flat", [False, True])
def test_masters_come_back_rounded(dtype, flat):
    model, masters = fu.prep_param_lists(floats(dtype), flat_master=flat)
    masters = jax.tree.map(lambda m: m + jnp.float32(1 / 3), masters)
    after = fu.master_params_to_model_params(model, masters, flat_master=flat)
    for p, before in zip(host(after), host(floats(dtype)), strict=True):
        wanted = before.astype(np.float32) + np.float32(1 / 3)
        assert p.dtype == before.dtype
        assert p.shape == before.shape
        assert p.tobytes() == wanted.astype(before.dtype).tobytes()


@pytest.mark.parametrize("flat", [False, True])
def test_the_legacy_loop_trains_under_jit(flat):
    """apex's manual recipe: scale, copy, unscale, step, copy back."""

    @jax.jit
    def step(model, masters, x):
        def loss_fn(p):
            return 128 * jnp.sum((p["w"].astype(F32) - x) ** 2 + p["b"].astype(F32))

        grads = jax.grad(loss_fn)(model)
        grads = fu.model_grads_to_master_grads(grads, masters, flat_master=flat)
        masters = jax.tree.map(lambda m, g: m - 0.25 * (g / 128), masters, grads)
        model = fu.master_params_to_model_params(model, masters, flat_master=flat)
        return model, masters

    model, masters = fu.prep_param_lists(floats(F16), flat_master=flat)
    for _ in range(3):
        model, masters = step(model, masters, jnp.float32(1.0))
    # w halves its distance to 1; the gradient of b is 2.
    assert model["w"].tolist() == [[1.0625, 0.625]]
    np.testing.assert_allclose(np.float32(model["b"]), 0.1 - 1.5, rtol=1e-3)


def test_to_python_float():
    for x in (jnp.asarray(1.5, F16), jnp.asarray([1.5]), np.float32(1.5), 1.5):
        value = fu.to_python_float(x)
        assert type(value) is float
        assert value == 1.5
    with pytest.raises(ValueError):
        fu.to_python_float(jnp.ones(2))


# Clipping


def gradients():
    rng = np.random.default_rng(0)
    return {
        "w": jnp.asarray(rng.normal(size=(3, 2)), F32),
        "b": jnp.asarray(rng.normal(size=4), F32),
    }


@pytest.mark.parametrize("norm_type", [1, 2, 2.5, np.inf, "inf"])
@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_clip_grad_norm_is_that_of_torch(norm_type, max_norm):
    norm, clipped = jax.jit(fu.clip_grad_norm, static_argnums=2)(
        gradients(), max_norm, norm_type
    )
    before, expected = oracle.clip(host(gradients()), max_norm, float(norm_type))
    np.testing.assert_allclose(norm, before, rtol=1e-6)
    for got, wanted in zip(host(clipped), expected, strict=True):
        assert got.dtype == np.float32
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
    if max_norm == 1e3:
        assert_same_bits(clipped, gradients())


def test_clip_grad_norm_takes_half_none_and_nothing():
    half = {"w": jnp.full(4096, 8.0, F16), "b": None}
    norm, clipped = fu.clip_grad_norm(half, 1.0)
    assert norm == 512  # in float16 the sum of squares would be inf
    assert clipped["b"] is None
    assert clipped["w"].dtype == F16
    np.testing.assert_allclose(np.float32(clipped["w"]), 8 / 512, rtol=1e-3)
    norm, clipped = fu.clip_grad_norm({}, 1.0)
    assert norm == 0
    assert clipped == {}


# FP16Model


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, tokens):
        assert x.dtype == F16
        assert tokens.dtype == jnp.int32
        x = nn.BatchNorm(use_running_average=True)(x.astype(F32)).astype(F16)
        return nn.Dense(2, dtype=F16)(x) + tokens[:, None].astype(F16)


@pytest.mark.standard_promotion  # Flax's layers
def test_fp16model_runs_in_half_and_leaves_the_output():
    x, tokens = jnp.full((2, 3), 0.1, F32), jnp.arange(2)
    variables = Net().init(jax.random.key(0), x.astype(F16), tokens)
    forward = fu.FP16Model(Net().apply)
    out = jax.jit(forward)(variables, x, tokens)
    assert out.dtype == F16
    half = variables | {"params": fu.convert_network(variables["params"], F16)}
    assert_same_bits(out, jax.jit(Net().apply)(half, x.astype(F16), tokens))


def test_the_names_are_those_of_apex():
    assert {
        "BN_convert_float",
        "network_to_half",
        "prep_param_lists",
        "model_grads_to_master_grads",
        "master_params_to_model_params",
        "tofp16",
        "to_python_float",
        "clip_grad_norm",
        "convert_module",
        "convert_network",
        "FP16Model",
        "FP16_Optimizer",
        "LossScaler",
        "DynamicLossScaler",
    } <= set(dir(fu))
