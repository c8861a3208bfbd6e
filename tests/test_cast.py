"""Casting params and whole variables dicts; which leaves stay in fp32."""

import re
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict, freeze

import jamp

HALVES = [jnp.float16, jnp.bfloat16]


def ones(*shape):
    return jnp.ones(shape, jnp.float32)


def norm():
    return {"scale": ones(3), "bias": ones(3)}


def statistics():
    return {"mean": jnp.zeros(3, jnp.float32), "var": ones(3)}


def dense():
    return {"kernel": ones(3, 3), "bias": ones(3)}


def dtypes(tree):
    """{path: dtype name} of the leaves."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): str(
            jnp.result_type(leaf)
        )
        for path, leaf in leaves
    }


def in_fp32(tree):
    return {path for path, dtype in dtypes(tree).items() if dtype == "float32"}


# What is cast


@pytest.mark.parametrize("dtype", [*HALVES, jnp.float32])
def test_every_float_leaf_gets_the_dtype(dtype):
    params = {"Conv_0": dense(), "BatchNorm_0": norm(), "LayerNorm_0": norm()}
    out = jamp.cast_model(params, dtype)
    assert jax.tree.structure(out) == jax.tree.structure(params)
    assert set(dtypes(out).values()) == {jnp.dtype(dtype).name}


@pytest.mark.parametrize("dtype", HALVES)
def test_values_are_rounded_to_nearest_even(dtype):
    x = np.random.default_rng(0).standard_normal(64).astype(np.float32)
    # Halfway cases: 1 + ulp/2 rounds down to 1, 1 + 3 ulp/2 up to 1 + 2 ulp.
    ulp = float(jnp.finfo(dtype).eps)
    x[:2] = 1 + ulp / 2, 1 + 3 * ulp / 2
    out = jamp.cast_model({"w": jnp.asarray(x)}, dtype)["w"]
    np.testing.assert_array_equal(np.float32(out[:2]), np.float32([1, 1 + 2 * ulp]))
    np.testing.assert_array_equal(
        np.float32(out), np.float32(x.astype(jnp.dtype(dtype)))
    )


@pytest.mark.parametrize("name", ["float16", np.dtype("float16"), np.float16], ids=repr)
def test_the_dtype_may_be_given_in_any_spelling(name):
    assert jamp.cast_model({"w": ones(2)}, name)["w"].dtype == jnp.float16


def test_integers_bools_keys_and_complex_numbers_are_untouched():
    tree = {
        "float": ones(2),
        "int": jnp.array([1, 2**20 + 1], jnp.int32),
        "byte": jnp.array([200], jnp.uint8),
        "bool": jnp.array([True, False]),
        "key": jax.random.key(7),
        "raw_key": jax.random.key_data(jax.random.key(7)),
        "complex": jnp.array([1 + 2j], jnp.complex64),
    }
    out = jamp.cast_model(tree, jnp.float16)
    assert out["float"].dtype == jnp.float16
    for name in set(tree) - {"float"}:
        assert out[name].dtype == tree[name].dtype, name
    for name in set(tree) - {"float", "key"}:
        np.testing.assert_array_equal(
            np.float64(out[name].real), np.float64(tree[name].real)
        )
    assert jax.random.key_data(out["key"]).tolist() == tree["raw_key"].tolist()
    assert out["complex"][0].imag == 2


def test_float64_arrays_are_cast_too():
    out = jamp.cast_model({"w": np.ones(2, np.float64)}, jnp.float16)
    assert out["w"].dtype == jnp.float16


def test_float64_arrays_are_cast_too_under_x64():
    with jax.enable_x64(True):
        tree = {
            "w": jnp.ones(2, jnp.float64),
            "bn1": {"scale": jnp.ones(2, jnp.float64)},
        }
        assert tree["w"].dtype == jnp.float64
        out = jamp.cast_model(tree, jnp.float16, keep_batchnorm_fp32=True)
        assert out["w"].dtype == jnp.float16
        # Kept means "not made half": at least fp32 must be left.
        assert out["bn1"]["scale"].dtype in (jnp.float32, jnp.float64)


def test_half_arrays_of_the_other_kind_are_cast():
    out = jamp.cast_model({"w": jnp.ones(2, jnp.bfloat16)}, jnp.float16)
    assert out["w"].dtype == jnp.float16


def test_casting_twice_changes_nothing():
    once = jamp.cast_model({"w": jnp.array([0.1, 3.0], jnp.float32)}, jnp.float16)
    twice = jamp.cast_model(once, jnp.float16)
    np.testing.assert_array_equal(once["w"], twice["w"])


# Containers


class Pair(NamedTuple):
    left: Any
    right: Any


@pytest.mark.parametrize(
    "tree",
    [
        {"a": {"b": ones(2)}},
        FrozenDict({"a": {"b": ones(2)}}),
        [ones(2), (ones(1), {"x": ones(3)})],
        Pair(ones(2), [Pair(ones(1), None)]),
        {"a": None, "b": ones(1), "c": (None, ())},
        ones(2),
        {},
    ],
    ids=lambda tree: str(jax.tree.structure(tree)),
)
def test_structure_and_container_types_survive(tree):
    out = jamp.cast_model(tree, jnp.float16)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert type(out) is type(tree) or isinstance(tree, jax.Array)
    assert all(x.dtype == jnp.float16 for x in jax.tree.leaves(out))


def test_keep_fp32_reaches_into_tuples_and_namedtuples():
    tree = Pair([ones(1), ones(2)], {"head": ones(3)})
    out = jamp.cast_model(tree, jnp.float16, keep_fp32=r"^left/1$")
    assert in_fp32(out) == {"left/1"}


# The keep-batchnorm rule


def network():
    params = {
        "Conv_0": dense(),
        "BatchNorm_0": norm(),
        "block": {"Dense_0": dense(), "BatchNorm_3": norm(), "LayerNorm_0": norm()},
    }
    batch_stats = {
        "BatchNorm_0": statistics(),
        "block": {"BatchNorm_3": statistics()},
    }
    kept = {
        f"{path}/{leaf}"
        for path in ("BatchNorm_0", "block/BatchNorm_3")
        for leaf in ("scale", "bias")
    }
    return params, batch_stats, kept


@pytest.mark.parametrize("dtype", HALVES)
def test_batchnorm_stays_fp32_by_its_name(dtype):
    params, _, kept = network()
    out = jamp.cast_model(params, dtype, keep_batchnorm_fp32=True)
    assert in_fp32(out) == kept
    assert set(dtypes(out).values()) == {"float32", jnp.dtype(dtype).name}


def test_batchnorm_stays_fp32_by_its_statistics():
    params, batch_stats, kept = network()
    out = jamp.cast_model(
        params, jnp.float16, keep_batchnorm_fp32=True, batch_stats=batch_stats
    )
    assert in_fp32(out) == kept


@pytest.mark.parametrize("keep", [True, False])
def test_a_variables_dict_is_cast_and_its_statistics_stay_fp32(keep):
    params, batch_stats, kept = network()
    variables = {"params": params, "batch_stats": batch_stats}
    out = jamp.cast_model(variables, jnp.float16, keep_batchnorm_fp32=keep)
    assert jax.tree.structure(out) == jax.tree.structure(variables)
    assert in_fp32(out["params"]) == (kept if keep else set())
    assert in_fp32(out["batch_stats"]) == set(dtypes(batch_stats))


@pytest.mark.parametrize("keep", [True, False])
def test_a_frozen_variables_dict_works_the_same(keep):
    params, batch_stats, kept = network()
    variables = freeze({"params": params, "batch_stats": batch_stats})
    out = jamp.cast_model(variables, jnp.float16, keep_batchnorm_fp32=keep)
    assert isinstance(out, FrozenDict)
    assert in_fp32(out["params"]) == (kept if keep else set())
    assert in_fp32(out["batch_stats"]) == set(dtypes(batch_stats))


def test_variables_without_statistics_fall_back_on_names():
    params, _, kept = network()
    out = jamp.cast_model({"params": params}, jnp.float16, keep_batchnorm_fp32=True)
    assert in_fp32(out["params"]) == kept


@pytest.mark.parametrize(
    "name",
    ["BatchNorm", "BatchNorm_3", "bn1", "bn_1", "bn", "batch_norm", "batchnorm2"],
)
def test_names_that_mean_batchnorm(name):
    out = jamp.cast_model({"m": {name: norm()}}, jnp.float16, keep_batchnorm_fp32=True)
    assert in_fp32(out) == {f"m/{name}/scale", f"m/{name}/bias"}


@pytest.mark.parametrize(
    "name",
    ["LayerNorm_0", "GroupNorm_0", "InstanceNorm_0", "RMSNorm_0", "norm"]
    + ["carbon_1", "subnet", "Urbn", "Dense_0", "batch", "scale_by_batch"],
)
def test_names_that_do_not_mean_batchnorm(name):
    out = jamp.cast_model({name: norm()}, jnp.float16, keep_batchnorm_fp32=True)
    assert in_fp32(out) == set()


def test_a_batchnorm_of_any_name_is_recognised_through_its_statistics():
    params = {"whitening": norm(), "Dense_0": dense()}
    batch_stats = {"whitening": statistics()}
    by_field = jamp.cast_model(
        params, jnp.float16, keep_batchnorm_fp32=True, batch_stats=batch_stats
    )
    assert in_fp32(by_field) == {"whitening/scale", "whitening/bias"}
    variables = {"params": params, "batch_stats": batch_stats}
    whole = jamp.cast_model(variables, jnp.float16, keep_batchnorm_fp32=True)
    assert in_fp32(whole["params"]) == {"whitening/scale", "whitening/bias"}


def test_statistics_that_are_no_mean_and_var_prove_nothing():
    params = {"VectorQuantizer_0": dense(), "BatchNorm_0": norm()}
    batch_stats = {"VectorQuantizer_0": {"ema": ones(3)}, "BatchNorm_0": statistics()}
    out = jamp.cast_model(
        params, jnp.float16, keep_batchnorm_fp32=True, batch_stats=batch_stats
    )
    assert in_fp32(out) == {"BatchNorm_0/scale", "BatchNorm_0/bias"}


def test_a_batchnorm_that_is_the_whole_model():
    variables = {"params": norm(), "batch_stats": statistics()}
    out = jamp.cast_model(variables, jnp.float16, keep_batchnorm_fp32=True)
    assert in_fp32(out) == set(dtypes(variables))


def test_the_parent_of_a_batchnorm_is_no_batchnorm():
    params = {"encoder": {"kernel": ones(2), "whitening": norm()}}
    batch_stats = {"encoder": {"whitening": statistics()}}
    out = jamp.cast_model(
        params, jnp.float16, keep_batchnorm_fp32=True, batch_stats=batch_stats
    )
    assert in_fp32(out) == {"encoder/whitening/scale", "encoder/whitening/bias"}


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(3, name="bnd")(x)
        x = nn.BatchNorm(use_running_average=False, name="standardise")(x)
        x = nn.BatchNorm(use_running_average=False, use_scale=False)(x)
        return nn.LayerNorm()(x)


def test_linen_variables_keep_exactly_their_batchnorms():
    variables = jax.eval_shape(Network().init, jax.random.key(0), ones(2, 3))
    variables = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), variables)
    out = jamp.cast_model(variables, jnp.float16, keep_batchnorm_fp32=True)
    kept = {"standardise/scale", "standardise/bias", "BatchNorm_0/bias"}
    assert in_fp32(out["params"]) == kept
    assert in_fp32(out["batch_stats"]) == set(dtypes(variables["batch_stats"]))


# keep_fp32


@pytest.mark.parametrize(
    "keep_fp32, kept",
    [
        ("head", {"head/kernel", "head/bias"}),
        (r"^head/kernel$", {"head/kernel"}),
        (r"kernel", {"head/kernel", "Dense_0/kernel"}),
        ([r"head/bias", r"Dense_\d+/bias"], {"head/bias", "Dense_0/bias"}),
        ((r"head/bias",), {"head/bias"}),
        (lambda path, leaf: leaf.ndim == 2, {"head/kernel", "Dense_0/kernel"}),
        (lambda path, leaf: path == "Dense_0/bias", {"Dense_0/bias"}),
    ],
    ids=["name", "exact", "leaves", "list", "tuple", "by_leaf", "by_path"],
)
def test_keep_fp32_takes_a_regex_a_list_or_a_predicate(keep_fp32, kept):
    params = {"Dense_0": dense(), "head": dense()}
    assert in_fp32(jamp.cast_model(params, jnp.float16, keep_fp32=keep_fp32)) == kept


def test_keep_fp32_adds_to_the_batchnorm_rule():
    params, _, kept = network()
    out = jamp.cast_model(
        params, jnp.float16, keep_batchnorm_fp32=True, keep_fp32="Conv_0/bias"
    )
    assert in_fp32(out) == kept | {"Conv_0/bias"}


def test_keep_fp32_works_on_a_variables_dict():
    params, batch_stats, _ = network()
    variables = {"params": params, "batch_stats": batch_stats}
    out = jamp.cast_model(variables, jnp.float16, keep_fp32="Dense_0/kernel")
    assert in_fp32(out["params"]) == {"block/Dense_0/kernel"}


def test_a_predicate_sees_every_float_leaf_and_its_path():
    seen = {}

    def predicate(path, leaf):
        seen[path] = leaf.shape
        return False

    params = {"a": {"w": ones(2, 3)}, "b": [ones(1), ones(4)]}
    jamp.cast_model(params, jnp.float16, keep_fp32=predicate)
    assert seen == {"a/w": (2, 3), "b/0": (1,), "b/1": (4,)}


@pytest.mark.parametrize("keep_fp32", ["haed", ["head", "haed"]], ids=str)
def test_a_regex_that_matches_nothing_is_an_error(keep_fp32):
    with pytest.raises(ValueError, match="(?s)keep_fp32.*haed") as caught:
        jamp.cast_model({"head": dense()}, jnp.float16, keep_fp32=keep_fp32)
    assert "head/" in str(caught.value)  # what there is to match


def test_a_broken_regex_is_named():
    with pytest.raises((ValueError, re.error), match=r"(?s)keep_fp32.*\(head"):
        jamp.cast_model({"head": dense()}, jnp.float16, keep_fp32="(head")


@pytest.mark.parametrize("bad", [3, [3], {"head": True}], ids=repr)
def test_keep_fp32_of_another_type_is_refused(bad):
    with pytest.raises((TypeError, ValueError), match="keep_fp32"):
        jamp.cast_model({"head": dense()}, jnp.float16, keep_fp32=bad)


# Error paths


@pytest.mark.parametrize("bad", [jnp.int32, "float17", "half-ish", bool], ids=repr)
def test_a_dtype_that_is_no_float_is_refused(bad):
    with pytest.raises((TypeError, ValueError)) as caught:
        jamp.cast_model({"w": ones(1)}, bad)
    spelling = bad if isinstance(bad, str) else jnp.dtype(bad).name
    assert spelling in str(caught.value)


# Transformations


def test_eval_shape_predicts_the_dtypes():
    params, batch_stats, _ = network()
    variables = {"params": params, "batch_stats": batch_stats, "n": jnp.int32(3)}

    def cast(tree):
        return jamp.cast_model(
            tree, jnp.float16, keep_batchnorm_fp32=True, keep_fp32="Conv_0/bias"
        )

    abstract = jax.eval_shape(cast, variables)
    assert dtypes(abstract) == dtypes(cast(variables))
    assert "Conv_0/bias" in {p.removeprefix("params/") for p in in_fp32(abstract)}


def test_gradients_flow_through_the_cast_in_fp32():
    def loss(params):
        half = jamp.cast_model(params, jnp.float16)
        return (half["w"] * half["w"]).astype(jnp.float32).sum()

    grads = jax.grad(loss)({"w": jnp.array([1.0, 2.0], jnp.float32)})
    assert grads["w"].dtype == jnp.float32
    np.testing.assert_array_equal(grads["w"], [2.0, 4.0])


# Donation


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
@pytest.mark.parametrize("kind", ["jax", "numpy"])
def test_donating_a_state_leaves_the_users_arrays_alone(level, kind):
    make = jnp.asarray if kind == "jax" else np.array
    params = {
        "Dense_0": {"kernel": make(np.full(64, 0.1, np.float32))},
        "BatchNorm_0": {"scale": make(np.full(64, 0.3, np.float32))},
        "count": make(np.arange(64, dtype=np.int32)),
    }
    stats = {"BatchNorm_0": {"mean": make(np.zeros(64, np.float32))}}
    state = jamp.initialize(
        params, optax.sgd(0.1, momentum=0.9), level, batch_stats=stats, verbosity=0
    )

    @jax.jit
    def overwrite(s):
        return jax.tree.map(lambda x: x + jnp.ones((), x.dtype), s)

    donating = jax.jit(overwrite, donate_argnums=0)
    donating(state)
    np.testing.assert_array_equal(
        params["Dense_0"]["kernel"], np.full(64, 0.1, np.float32)
    )
    np.testing.assert_array_equal(
        params["BatchNorm_0"]["scale"], np.full(64, 0.3, np.float32)
    )
    np.testing.assert_array_equal(params["count"], np.arange(64))
    np.testing.assert_array_equal(stats["BatchNorm_0"]["mean"], np.zeros(64))
