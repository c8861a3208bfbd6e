"""Casting params and whole variables dicts: which leaves go half, and how."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

import jamp
from tests.bits import assert_same_bits

HALVES = [jnp.float16, jnp.bfloat16]


def ones(*shape):
    return np.ones(shape, np.float32)


NORM = {"scale": ones(3), "bias": ones(3)}
STATS = {"mean": ones(3), "var": ones(3)}
DENSE = {"kernel": ones(3, 3), "bias": ones(3)}
NETWORK = {
    "Conv_0": DENSE,
    "BatchNorm_0": NORM,
    "block": {"Dense_0": DENSE, "BatchNorm_3": NORM, "LayerNorm_0": NORM},
}
NETWORK_STATS = {"BatchNorm_0": STATS, "block": {"BatchNorm_3": STATS}}
NETWORK_KEPT = "BatchNorm_0 block/BatchNorm_3"
VARIABLES = {"params": NETWORK, "batch_stats": NETWORK_STATS}
VARIABLES_KEPT = "batch_stats params/BatchNorm_0 params/block/BatchNorm_3"
HEADED = {"Dense_0": DENSE, "head": DENSE}


class Pair(NamedTuple):
    left: Any
    right: Any


PAIR = Pair([ones(1), ones(2)], {"head": ones(3)})


def in_float32(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in leaves
        if leaf.dtype == jnp.float32
    }


def under(kept, tree):
    """The paths of a tree at or below those that `kept` names."""
    return {
        path
        for path in in_float32(tree)
        if any(f"{path}/".startswith(f"{k}/") for k in kept.split())
    }


KEEP = {"keep_batchnorm_fp32": True}
BATCHNORMS = "BatchNorm BatchNorm_3 bn1 bn_1 bn batch_norm batchnorm2"
OTHERS = """LayerNorm_0 GroupNorm_0 InstanceNorm_0 RMSNorm_0 norm carbon_1 subnet Urbn
Dense_0 batch scale_by_batch"""
WHITENED = {"whitening": NORM, "Dense_0": DENSE}
WHITENED_STATS = {"whitening": STATS}
IN_ENCODER = {"encoder": {"kernel": ones(2), "whitening": NORM}}
QUANTIZED = {"VectorQuantizer_0": DENSE, "BatchNorm_0": NORM}
QUANTIZED_STATS = {"VectorQuantizer_0": {"ema": ones(3)}, "BatchNorm_0": STATS}
# A tree, BatchNorm's statistics, and the modules that stay in float32.
BATCHNORM_ROWS = [
    (NETWORK, None, NETWORK_KEPT),
    (NETWORK, NETWORK_STATS, NETWORK_KEPT),
    (VARIABLES, None, VARIABLES_KEPT),
    (freeze(VARIABLES), None, VARIABLES_KEPT),
    ({"params": NETWORK}, None, "params/BatchNorm_0 params/block/BatchNorm_3"),
    ({"params": NETWORK}, {}, ""),
    ({"m": dict.fromkeys(BATCHNORMS.split(), NORM)}, None, "m"),
    ({"m": dict.fromkeys(OTHERS.split(), NORM)}, None, ""),
    # A BatchNorm of any name has a mean and a variance; its parent does not.
    (WHITENED, WHITENED_STATS, "whitening"),
    ({"params": WHITENED}, WHITENED_STATS, "params/whitening"),
    (IN_ENCODER, {"encoder": WHITENED_STATS}, "encoder/whitening"),
    (QUANTIZED, QUANTIZED_STATS, "BatchNorm_0"),
    ({"params": NORM, "batch_stats": STATS}, None, "params batch_stats"),
]
# A tree, what to keep, and what is kept.
KEEP_ROWS = [
    (HEADED, "head", "head"),
    (HEADED, re.compile(r"^head/kernel$"), "head/kernel"),
    (HEADED, "kernel", "head/kernel Dense_0/kernel"),
    (HEADED, ["head/bias", r"Dense_\d+/bias"], "head/bias Dense_0/bias"),
    (HEADED, lambda path, leaf: leaf.ndim == 2, "head/kernel Dense_0/kernel"),
    (PAIR, r"^left/1$", "left/1"),
    (VARIABLES, "Dense_0/kernel", "batch_stats params/block/Dense_0/kernel"),
    (NETWORK, None, ""),
    (freeze(VARIABLES), None, "batch_stats"),
    ([ones(2), (None, {"x": np.ones(())}), {}], None, ""),
]
ROWS = [(tree, KEEP | {"batch_stats": stats}, k) for tree, stats, k in BATCHNORM_ROWS]
ROWS += [(tree, {"keep_fp32": keep}, kept) for tree, keep, kept in KEEP_ROWS]
ROWS += [(NETWORK, KEEP | {"keep_fp32": "Conv_0/b"}, f"{NETWORK_KEPT} Conv_0/bias")]


@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("row", range(len(ROWS)))
def test_what_is_not_kept_goes_half(row, half):
    tree, options, kept = ROWS[row]
    out = jamp.cast_model(tree, half, **options)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert in_float32(out) == under(kept, tree)
    names = {str(x.dtype) for x in jax.tree.leaves(out)}
    assert names <= {"float32", jnp.dtype(half).name}
    # Tracing, and casting again, give the same.
    abstract = jax.eval_shape(lambda: jamp.cast_model(tree, half, **options))
    assert jax.eval_shape(lambda: out) == abstract
    assert_same_bits(jamp.cast_model(out, half, **options), out)


def test_integers_bools_keys_and_complex_numbers_are_untouched():
    tree = {
        "int": jnp.array([1, 2**20 + 1], jnp.int32),
        "bool": jnp.array([True, False]),
        "key": jax.random.key(7),
        "complex": jnp.array([1 + 2j], jnp.complex64),
    }
    out = jamp.cast_model(tree | {"float": ones(2)}, jnp.float16)
    assert out.pop("float").dtype == jnp.float16
    assert_same_bits(out, tree)


@pytest.mark.parametrize("x64", [False, True])
def test_floats_of_any_width_are_cast(x64):
    with jax.enable_x64(x64):
        wide = jnp.ones(2, jnp.float64) if x64 else np.ones(2)
        tree = {"w": wide, "b": jnp.ones(2, jnp.bfloat16), "bn1": {"scale": wide}}
        out = jamp.cast_model(tree, jnp.float16, keep_batchnorm_fp32=True)
        assert out["w"].dtype == out["b"].dtype == jnp.float16
        assert out["bn1"]["scale"].dtype == jnp.float32


def test_a_predicate_sees_every_float_leaf_and_gradients_are_float32():
    seen = {}
    keep = lambda path, leaf: seen.update({path: leaf.shape})  # noqa: E731
    jamp.cast_model(
        {"a": ones(2, 3), "b": [ones(1), np.arange(2)]}, "float16", keep_fp32=keep
    )
    assert seen == {"a": (2, 3), "b/0": (1,)}

    def loss(params):
        half = jamp.cast_model(params, jnp.float16)
        return (half["w"] * half["w"]).astype(jnp.float32).sum()

    grads = jax.grad(loss)({"w": jnp.array([1.0, 2.0], jnp.float32)})
    assert_same_bits(grads, {"w": np.float32([2.0, 4.0])})


REFUSED = [
    (jnp.int32, None, "found cast_model_type=.*int32"),
    ("float17", None, "float17"),
    # With the paths that there are to match.
    ("float16", "haed", "keep_fp32='haed' matches no leaf.*head/"),
    ("float16", ["head", re.compile("haed")], "haed.*head/bias, "),
    ("float16", "(head", r"keep_fp32='\(head' is not a regex"),
    ("float16", 3, "keep_fp32 must be a regex.*found 3"),
    ("float16", ["head", 3], "found 3"),
    ("float16", {"head": True}, "found {'head': True}"),
]


@pytest.mark.parametrize("dtype, keep_fp32, words", REFUSED)
def test_what_is_refused(dtype, keep_fp32, words):
    error = TypeError if "found 3" in words or "True" in words else ValueError
    with pytest.raises(error, match=words):
        jamp.cast_model({"params": {"head": DENSE}}, dtype, keep_fp32=keep_fp32)
