"""Test opt levels: properties, overrides, and which leaves become half."""

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.core import freeze

import jamp
from tests.support.bits import assert_same_bits

F16, BF16, F32 = (jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32))
FP8 = jamp.Fp8(keep="head", grad_weight=False, smallest=256)
LISTS, RULE = jamp.AutocastLists(), jamp.DynamicLossScale(window=7)

# apex_semantics 1.2, columns O4 and O5 from ROCm's fork: model and autocast dtypes,
# keep_batchnorm_fp32, master_weights, loss_scale (None: a scale of 1 that checks).
DEFAULTS = {
    "O0": (F32, None, None, False, 1.0),
    "O1": (None, F16, None, None, "dynamic"),
    "O2": (F16, None, True, True, "dynamic"),
    "O3": (F16, None, False, False, 1.0),
    "O4": (None, BF16, None, None, None),
    "O5": (BF16, None, True, True, None),
    "O6": (BF16, None, True, True, None),
}
LEVELS = tuple(DEFAULTS)
AUTOCAST = ("O1", "O4")
CASTING = ("O0", "O2", "O3", "O5", "O6")


def properties(level, **overrides):
    return jamp.Properties.from_opt_level(level, **overrides)


def complaints(level, **overrides):
    """Returns one line per complaint."""
    with pytest.raises(jamp.OptLevelError) as caught:
        properties(level, **overrides)
    return str(caught.value).splitlines()


@pytest.mark.parametrize("level", LEVELS)
def test_defaults_of_each_level(level):
    model, autocast, batchnorm, masters, scale = DEFAULTS[level]
    expected = {
        "enabled": True,
        "opt_level": level,
        "cast_model_type": model,
        "patch_functions": level in AUTOCAST,
        "patch_functions_type": autocast,
        "keep_batchnorm_fp32": batchnorm,
        "master_weights": masters,
        "stochastic_rounding": False,
        "reduce_dtype": None,
        "fp8": jamp.Fp8() if level == "O6" else None,
        "loss_scale": scale,
        "cast_model_outputs": None,
        "keep_fp32": (),
        "lists": None,
        "promote": "narrowest" if level in ("O2", "O3", "O5", "O6") else "widest",
    }
    # A repr tells 1 from 1.0 and a dtype from its scalar type.
    assert repr(vars(properties(level))) == repr(expected)
    nothing = dict.fromkeys(set(expected) - {"enabled", "opt_level"})
    del nothing["patch_functions_type"]
    assert properties(level, **nothing) == properties(level)


# apex's options, from the table at the end of apex_semantics 1.3, and jamp's own.
ACCEPTED = [
    ("cast_model_type", jnp.float16, F16, CASTING),
    ("cast_model_type", np.dtype("float32"), F32, LEVELS[:-1]),
    ("cast_model_type", False, False, LEVELS[:-1]),
    ("patch_functions", True, True, AUTOCAST),
    ("patch_functions", False, False, LEVELS),
    ("keep_batchnorm_fp32", "True", True, CASTING),
    ("master_weights", False, False, CASTING),
    ("loss_scale", "1e3", 1000.0, LEVELS),
    ("loss_scale", 2.0**-126, 2.0**-126, LEVELS),
    ("cast_model_outputs", jnp.float16, F16, LEVELS),
    ("cast_model_outputs", "float64", np.dtype("float64"), LEVELS),
    ("keep_fp32", ["head", "embed"], ("head", "embed"), LEVELS),
    ("fp8", True, jamp.Fp8(), LEVELS[1:]),
    ("fp8", FP8, FP8, LEVELS[1:]),
    ("fp8", False, None, LEVELS),
    ("lists", LISTS, LISTS, LEVELS[1:]),
    ("promote", "narrowest", "narrowest", LEVELS[1:]),
    ("loss_scale", RULE, RULE, LEVELS),
    ("reduce_dtype", "float32", F32, LEVELS[1:]),
]
REASONS = {
    "cast_model_type": r"weights.* FP32.*opt_level='O2'.*type was {}|^fp8 needs",
    "patch_functions": r"patch_functions=True.*opt_level='O1'",
    "keep_batchnorm_fp32": r"batchnorm.* FP32.*should be None.*fp32 was {}",
    "master_weights": r"doesn't make sense to use master_weights with O[14].*was {}",
    "fp8": r"^fp8 needs matmuls in half, and O0 with these options has none",
    "reduce_dtype": r"^reduce_dtype needs gradients in half, and O0 has none",
    "lists": r"^lists needs operations in half, and O0 has none",
    "promote": r"^promote needs operations in half, and O0 has none",
}


@pytest.mark.parametrize("name, value, stored, accepting", ACCEPTED, ids=str)
def test_an_override_is_stored_alone_or_refused(name, value, stored, accepting):
    for level in LEVELS:
        if level in accepting:
            expected = dataclasses.replace(properties(level), **{name: stored})
            assert repr(properties(level, **{name: value})) == repr(expected)
        else:
            (line,) = complaints(level, **{name: value})
            assert re.search(REASONS[name].format(stored), line)


NO_DTYPES = ["float17", jnp.int32, "int8", True, 16]
REFUSED = {
    "cast_model_type": (
        "must be one of float32, float16, bfloat16 or False",
        [*NO_DTYPES, "float64"],
    ),
    "cast_model_outputs": ("must be one of float32, float16", [*NO_DTYPES, False]),
    "patch_functions": ("must be a boolean or None", ["True", 1]),
    "keep_batchnorm_fp32": (
        "must be a boolean, the string 'True' or 'False', or None",
        ["true", "yes", "", 2, 0.5, []],
    ),
    # bool("False") is True, so strings are refused.
    "master_weights": ("must be a boolean or None", ["True", "False"]),
    "loss_scale": (
        "must be 'dynamic', a positive finite number of at most 2**126",
        [True, 0, -1.0, float("nan"), float("inf"), "0", "nan", "abc", "", b"2"]
        + ["1e+39", 2.0**127, 2.0**-127, [128.0], jamp.StaticLossScale],
    ),
    "keep_fp32": ("must be a regex, a predicate", [3]),
    "fp8": ("must be a bool or a jamp.Fp8", ["True", 1]),
    "lists": ("must be a jamp.AutocastLists", ["matmul"]),
    "promote": ("must be 'widest' or 'narrowest'", ["wide"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_means_nothing_is_refused(name):
    words, values = REFUSED[name]
    for value in values:
        level = "O1" if name in ("lists", "promote") else "O2"
        (line,) = complaints(level, **{name: value})
        start = line.replace("`", "")
        assert start.startswith(f"{name} {words}") and repr(value) in line


def test_all_complaints_are_made_at_once_and_no_others():
    three = {"patch_functions": True, "keep_batchnorm_fp32": "maybe", "loss_scale": -2}
    mixed = complaints("O2", **three)
    for line, words in zip(mixed, ("'maybe'", "-2", "patch_functions"), strict=True):
        assert words in line
    assert issubclass(jamp.OptLevelError, ValueError)
    assert issubclass(jamp.OptLevelError, RuntimeError)  # apex's
    with pytest.raises(TypeError, match="loss_sale"):
        properties("O2", loss_sale=1.0)
    with pytest.raises(TypeError, match="keyword 'dynamic_loss_scale'.*='dynamic'"):
        properties("O2", dynamic_loss_scale=True)


@pytest.mark.parametrize("bad", ["O7", "02", 2, "", None, "bf16", np.float16], ids=str)
def test_an_unknown_level_is_refused_with_a_list_of_all(bad):
    (line,) = complaints(bad)
    assert line.startswith(f"Unexpected optimization level {bad!r}")
    assert all(level in line for level in LEVELS)
    assert "letter O, not the number zero" in line


def test_properties_are_immutable_values():
    def make(scale=4.0):
        rule = jamp.DynamicLossScale(scale, window=3)
        return properties("O2", loss_scale=rule, keep_fp32=["head", "embed"])

    again = pickle.loads(pickle.dumps(make()))
    assert make() == again != make(2.0)
    assert hash(make()) == hash(again)
    off = jamp.Properties(enabled=False, opt_level=None)
    assert properties("O2", enabled=False, loss_scale=4.0) == off
    for name in ("loss_scale", "new_name"):
        with pytest.raises(AttributeError):
            setattr(make(), name, None)


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
HEADED, DENSE_0 = {"Dense_0": DENSE, "head": DENSE}, "Dense_0/kernel"


def in_float32(tree, kept=""):
    """Returns the paths of float32 leaves at or below the paths in `kept`."""
    below = tuple(f"{path}/" for path in kept.split()) if kept else ""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    paths = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in leaves
        if leaf.dtype == jnp.float32
    }
    return {path for path in paths if f"{path}/".startswith(below)}


BATCHNORMS = "BatchNorm BatchNorm_3 bn1 bn_1 bn batch_norm batchnorm2"
OTHERS = """LayerNorm_0 GroupNorm_0 InstanceNorm_0 RMSNorm_0 norm carbon_1 subnet Urbn
Dense_0 batch scale_by_batch"""
IN_ENCODER = {"encoder": {"kernel": ones(2), "whitening": NORM}}
ENCODER_STATS = {"encoder": {"whitening": STATS}}
HAIKU = {"net/norm1": NORM, "net/norm2": NORM, "net/linear": DENSE}
EMA = {"average": ones(2), "hidden": ones(2)}
HAIKU_STATE = {"net/norm1/~/mean_ema": EMA, "net/norm1/~/var_ema": EMA}
HAIKU_STATE |= {"net/norm2/~/mean_ema": EMA}  # no variance
KEEP = {"keep_batchnorm_fp32": True}
# A tree, options, and the paths that stay float32.
ROWS = [
    (NETWORK, KEEP, NETWORK_KEPT),
    (VARIABLES, KEEP, VARIABLES_KEPT),
    (freeze(VARIABLES), KEEP, VARIABLES_KEPT),
    ({"params": NETWORK}, KEEP | {"batch_stats": {}}, ""),
    ({"m": dict.fromkeys(BATCHNORMS.split(), NORM)}, KEEP, "m"),
    ({"m": dict.fromkeys(OTHERS.split(), NORM)}, KEEP, ""),
    # A BatchNorm of any name has a mean and a variance, unlike its parent.
    (IN_ENCODER, KEEP | {"batch_stats": ENCODER_STATS}, "encoder/whitening"),
    ({"params": NORM, "batch_stats": STATS}, KEEP, "params batch_stats"),
    (HAIKU, KEEP | {"batch_stats": HAIKU_STATE}, "net/norm1"),
    (HEADED, {"keep_fp32": re.compile(r"^head/kernel$")}, "head/kernel"),
    (HEADED, {"keep_fp32": ["head/bias", r"Dense_\d+/bias"]}, "head/bias Dense_0/bias"),
    (HEADED, {"keep_fp32": lambda path, x: "Dense" in path and x.ndim == 2}, DENSE_0),
    ([ones(2), (None, {"x": np.ones(())}), {}], {}, ""),
    (NETWORK, KEEP | {"keep_fp32": "Conv_0/b"}, f"{NETWORK_KEPT} Conv_0/bias"),
]


@pytest.mark.parametrize("row", range(len(ROWS)))
def test_what_is_not_kept_goes_half(row):
    half = HALVES[row % 2]
    tree, options, kept = ROWS[row]
    out = jamp.cast_model(tree, half, **options)
    assert jax.tree.structure(out) == jax.tree.structure(tree)
    assert in_float32(out) == (in_float32(tree, kept) if kept else set())
    names = {str(x.dtype) for x in jax.tree.leaves(out)}
    assert names <= {"float32", jnp.dtype(half).name}
    # Tracing and a second cast give the same result.
    abstract = jax.eval_shape(lambda: jamp.cast_model(tree, half, **options))
    assert jax.eval_shape(lambda: out) == abstract
    assert_same_bits(jamp.cast_model(out, half, **options), out)


def test_an_equinox_batchnorm_is_recognized_by_its_class():
    eqx = pytest.importorskip("equinox")  # absent in `make dist`
    norm = eqx.nn.BatchNorm(2, "batch", mode="batch")
    layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    params = eqx.filter({"norm1": norm, "layers": [layer]}, eqx.is_inexact_array)
    for stats in (None, {}):
        half = jamp.cast_model(params, F16, keep_batchnorm_fp32=True, batch_stats=stats)
        assert {x.dtype for x in jax.tree.leaves(half["norm1"])} == {F32}
        assert {x.dtype for x in jax.tree.leaves(half["layers"])} == {F16}


def test_keep_batchnorm_fp32_without_a_batchnorm_warns():
    given = {"keep_batchnorm_fp32": True, "verbosity": 0}
    for params, fields in (
        ({"norm1": NORM, "layer": DENSE}, {}),
        ({"bn": NORM}, {"batch_stats": {}}),
    ):
        with pytest.warns(jamp.UnusedOptionWarning, match="no BatchNorm.*batch_stats="):
            jamp.initialize(params, None, "O2", **given, **fields)
        jamp.initialize(params, None, "O2", verbosity=0, **fields)  # its default
    jamp.initialize({"bn": NORM}, None, "O2", **given)
    jamp.initialize({"norm1": NORM}, None, "O0", **given)


REFUSED_CASTS = [
    (jnp.int32, None, "got .*int32"),
    ("float64", None, "^`dtype` must be .*float16, bfloat16, got 'float64'"),
    (False, None, "bfloat16, got False"),
    # The error lists the paths.
    ("float16", ["head", re.compile("haed")], "haed.*head/bias, "),
    ("float16", "(head", r"keep_fp32='\(head' is not a regex"),
    ("float16", 3, "keep_fp32 must be a regex.*got 3"),
]


@pytest.mark.parametrize("dtype, keep_fp32, words", REFUSED_CASTS)
def test_bad_casts_are_refused(dtype, keep_fp32, words):
    error = TypeError if "got 3" in words else ValueError
    with pytest.raises(error, match=words):
        jamp.cast_model({"params": {"head": DENSE}}, dtype, keep_fp32=keep_fp32)
