"""Opt levels: the properties of each, what may override them, and what is refused."""

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jamp

F16, BF16, F32 = (jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32))
LISTS, RULE = jamp.AutocastLists(), jamp.DynamicLossScale(window=7)

# apex_semantics 1.2, columns O4 and O5 from ROCm's fork: model and autocast dtypes,
# keep_batchnorm_fp32, master_weights, loss_scale.
DEFAULTS = {
    "O0": (F32, None, None, False, 1.0),
    "O1": (None, F16, None, None, "dynamic"),
    "O2": (F16, None, True, True, "dynamic"),
    "O3": (F16, None, False, False, 1.0),
    "O4": (None, BF16, None, None, 1.0),
    "O5": (BF16, None, True, True, 1.0),
}
LEVELS = tuple(DEFAULTS)
AUTOCAST = ("O1", "O4")
CASTING = ("O0", "O2", "O3", "O5")


def properties(level, **overrides):
    return jamp.Properties.from_opt_level(level, **overrides)


def complaints(level, **overrides):
    """One line for each."""
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
        "loss_scale": scale,
        "cast_model_outputs": None,
        "keep_fp32": (),
        "lists": None,
        "promote": "narrowest" if level in ("O2", "O3", "O5") else "widest",
    }
    # A repr tells 1 from 1.0 and a dtype from its scalar type.
    assert repr(vars(properties(level))) == repr(expected)
    nothing = dict.fromkeys(set(expected) - {"enabled", "opt_level"})
    del nothing["patch_functions_type"]
    assert properties(level, **nothing) == properties(level)


def test_a_line_describes_each_of_apexs_properties_and_what_else_is_set():
    lines = properties("O5", keep_fp32="head", cast_model_type=False).describe()
    apexs = "enabled True, opt_level O5, cast_model_type False, patch_functions False"
    apexs += ", keep_batchnorm_fp32 True, master_weights True, loss_scale 1.0"
    expected = [pair.split() for pair in apexs.split(", ")]
    expected += [["keep_fp32", "('head',)"]]
    assert lines == [f"{name:<22} : {value}" for name, value in expected]


# The table at the end of apex_semantics 1.3, with O4 as O1 and O5 as O2; then ours.
ACCEPTED = [
    ("cast_model_type", jnp.float16, F16, CASTING),
    ("cast_model_type", np.dtype("float32"), F32, LEVELS),
    ("cast_model_type", False, False, LEVELS),
    ("patch_functions", True, True, AUTOCAST),
    ("patch_functions", False, False, LEVELS),
    ("keep_batchnorm_fp32", False, False, CASTING),
    ("keep_batchnorm_fp32", "True", True, CASTING),
    ("keep_batchnorm_fp32", "False", False, CASTING),
    ("master_weights", False, False, CASTING),
    ("loss_scale", "dynamic", "dynamic", LEVELS),
    ("loss_scale", 128, 128.0, LEVELS),
    ("loss_scale", "1e3", 1000.0, LEVELS),
    ("loss_scale", jnp.float32(128.0), 128.0, LEVELS),
    ("loss_scale", 2.0**-126, 2.0**-126, LEVELS),
    ("cast_model_outputs", jnp.float16, F16, LEVELS),
    ("cast_model_outputs", "float64", np.dtype("float64"), LEVELS),
    ("keep_fp32", "head", ("head",), LEVELS),
    ("keep_fp32", ["head", "embed"], ("head", "embed"), LEVELS),
    ("lists", LISTS, LISTS, LEVELS[1:]),
    ("promote", "narrowest", "narrowest", LEVELS[1:]),
    ("loss_scale", RULE, RULE, LEVELS),
]
REASONS = {
    "cast_model_type": r"weights.* FP32.*opt_level='O2'.*cast_model_type was {}",
    "patch_functions": r"patch_functions=True.*opt_level='O1'",
    "keep_batchnorm_fp32": r"batchnorm.* FP32.*should be None.*fp32 was {}",
    "master_weights": r"doesn't make sense to use master_weights with O[14].*was {}",
    "lists": r"^lists says what runs in half, and at O0 nothing does",
    "promote": r"^promote says what runs in half, and at O0 nothing does",
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
    # Strings here would read backwards: bool("False") is True.
    "master_weights": ("must be a boolean or None", ["True", "False"]),
    "loss_scale": (
        "must be 'dynamic', a positive finite number of at most 2**126",
        [True, 0, -1.0, float("nan"), float("inf"), "0", "nan", "abc", "", b"2"]
        + ["1e+39", 2.0**127, 2.0**-127, [128.0], {1.0}, jamp.StaticLossScale, float],
    ),
    "keep_fp32": ("must be a regex, a predicate", [3]),
    "lists": ("must be a jamp.AutocastLists", ["matmul"]),
    "promote": ("must be 'widest' or 'narrowest'", ["wide"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_means_nothing_is_refused(name):
    words, values = REFUSED[name]
    for value in values:
        level = "O1" if name in ("lists", "promote") else "O2"
        (line,) = complaints(level, **{name: value})
        assert line.startswith(f"{name} {words}") and repr(value) in line


def test_all_complaints_are_made_at_once_and_no_others():
    casts = {"cast_model_type": F16, "keep_batchnorm_fp32": True}
    three = complaints("O1", **casts, master_weights=True, loss_scale=128.0)
    assert [line.count("was ") for line in three] == [1, 1, 1]
    mixed = complaints(
        "O2", patch_functions=True, keep_batchnorm_fp32="maybe", loss_scale=-2
    )
    for line, words in zip(mixed, ("'maybe'", "-2", "patch_functions"), strict=True):
        assert words in line
    assert issubclass(jamp.OptLevelError, ValueError)
    assert issubclass(jamp.OptLevelError, RuntimeError)  # apex's
    with pytest.raises(TypeError, match="loss_sale"):
        properties("O2", loss_sale=1.0)
    for bad in ("O4x", 0, "o2", None, "02", "", "O2 ", 2, b"O2", True, ["O2"]):
        (line,) = complaints(bad)
        assert line.startswith(f"Unexpected optimization level {bad!r}")
        assert all(level in line for level in LEVELS)
        assert "letter O, not the number zero" in line


def test_properties_are_immutable_values():
    def make(scale=4.0):
        rule = jamp.DynamicLossScale(scale, window=3)
        return properties("O2", loss_scale=rule, keep_fp32=["head", "embed"])

    traces = []
    f = jax.jit(lambda x, p: traces.append(p) or x, static_argnums=1)
    for p in (make(), make(), pickle.loads(pickle.dumps(make())), make(2.0)):
        f(1.0, p)
    assert traces == [make(), make(2.0)]
    off = jamp.Properties(enabled=False, opt_level=None)
    assert properties("O2", enabled=False, loss_scale=4.0) == off
    for name in ("loss_scale", "new_name"):
        with pytest.raises(AttributeError):
            setattr(make(), name, None)
