"""Properties and opt levels: defaults, overrides, messages, printing."""

import dataclasses
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
F16, BF16, F32 = (jnp.dtype(d) for d in (jnp.float16, jnp.bfloat16, jnp.float32))

# apex_semantics 1.2, columns O4 and O5 from ROCm's fork. `patch_functions` is compared
# by truth: ROCm's O5 sets it to False and then to None.
DEFAULTS = {
    "O0": (F32, False, None, None, False, 1.0),
    "O1": (None, True, F16, None, None, "dynamic"),
    "O2": (F16, False, None, True, True, "dynamic"),
    "O3": (F16, False, None, False, False, 1.0),
    "O4": (None, True, BF16, None, None, 1.0),
    "O5": (BF16, False, None, True, True, 1.0),
}
# apex's seven, in the order of apex_semantics 1.1.
PRINTED = (
    "enabled",
    "opt_level",
    "cast_model_type",
    "patch_functions",
    "keep_batchnorm_fp32",
    "master_weights",
    "loss_scale",
)
BRIEFS = {
    "O0": "O0:  Pure FP32 training.",
    "O1": "O1:  Insert automatic casts around",
    "O2": "O2:  FP16 training with FP32 batchnorm and FP32 master weights.",
    "O3": "O3:  Pure FP16 training.",
    "O4": "O4:  Insert automatic casts around",
    "O5": "O5:  BFLOAT16 training with FP32 batchnorm and FP32 master weights.",
}


def properties(level, **overrides):
    return jamp.Properties.from_opt_level(level, **overrides)


def small_params():
    return {"dense": {"kernel": jnp.ones((2, 3), jnp.float32)}}


# Defaults


@pytest.mark.parametrize("level", LEVELS)
def test_defaults_of_each_level(level):
    p = properties(level)
    model_type, patches, patch_type, batchnorm, masters, scale = DEFAULTS[level]
    assert p.enabled is True
    assert p.opt_level == level
    assert p.cast_model_type == model_type
    assert bool(p.patch_functions) is patches
    assert p.patch_functions_type == patch_type
    assert p.keep_batchnorm_fp32 is batchnorm
    assert p.master_weights is masters
    assert p.loss_scale == scale
    assert type(p.loss_scale) is type(scale)
    assert p.cast_model_outputs is None
    assert not p.keep_fp32


@pytest.mark.parametrize("level", LEVELS)
def test_dtypes_are_stored_as_dtype_objects(level):
    p = properties(level)
    for dtype in (p.cast_model_type, p.patch_functions_type):
        assert dtype is None or isinstance(dtype, np.dtype)


@pytest.mark.parametrize("level", LEVELS)
def test_none_means_not_given(level):
    nothing = dict(
        cast_model_type=None,
        patch_functions=None,
        keep_batchnorm_fp32=None,
        master_weights=None,
        loss_scale=None,
        cast_model_outputs=None,
        keep_fp32=None,
    )
    assert properties(level, **nothing) == properties(level)


@pytest.mark.parametrize("level", LEVELS)
def test_initialize_stores_the_same_properties(level):
    state = jamp.initialize(
        small_params(), optax.sgd(0.1), level, loss_scale="8.0", verbosity=0
    )
    assert state.properties == properties(level, loss_scale="8.0")


def test_the_default_level_is_o1():
    state = jamp.initialize(small_params(), optax.sgd(0.1), verbosity=0)
    assert state.properties == properties("O1")


# Overrides: the table at the end of apex_semantics 1.3, with O4 as O1 and O5 as O2.

ANYWHERE = dict.fromkeys(LEVELS, True)
NOT_UNDER_AUTOCAST = {level: level not in ("O1", "O4") for level in LEVELS}
ONLY_UNDER_AUTOCAST = {level: level in ("O1", "O4") for level in LEVELS}
OVERRIDES = [
    ("cast_model_type", jnp.float16, F16, NOT_UNDER_AUTOCAST),
    ("cast_model_type", jnp.bfloat16, BF16, NOT_UNDER_AUTOCAST),
    ("cast_model_type", jnp.float32, F32, ANYWHERE),
    ("cast_model_type", np.dtype("float32"), F32, ANYWHERE),
    ("cast_model_type", False, False, ANYWHERE),
    ("patch_functions", True, True, ONLY_UNDER_AUTOCAST),
    ("patch_functions", False, False, ANYWHERE),
    ("keep_batchnorm_fp32", True, True, NOT_UNDER_AUTOCAST),
    ("keep_batchnorm_fp32", False, False, NOT_UNDER_AUTOCAST),
    ("keep_batchnorm_fp32", "True", True, NOT_UNDER_AUTOCAST),
    ("keep_batchnorm_fp32", "False", False, NOT_UNDER_AUTOCAST),
    ("master_weights", True, True, NOT_UNDER_AUTOCAST),
    ("master_weights", False, False, NOT_UNDER_AUTOCAST),
    ("loss_scale", "dynamic", "dynamic", ANYWHERE),
    ("loss_scale", 128.0, 128.0, ANYWHERE),
    ("loss_scale", 128, 128.0, ANYWHERE),
    ("loss_scale", 0.5, 0.5, ANYWHERE),
    ("loss_scale", "128.0", 128.0, ANYWHERE),
    ("loss_scale", "1e3", 1000.0, ANYWHERE),
    ("cast_model_outputs", jnp.float16, F16, ANYWHERE),
]
CELLS = [
    pytest.param(
        level, name, value, stored, accepted[level], id=f"{level}-{name}={value}"
    )
    for name, value, stored, accepted in OVERRIDES
    for level in LEVELS
]
REASONS = {
    "cast_model_type": r"weights.*FP32.*opt_level='?O2'?.*cast_model_type was .*",
    "patch_functions": r"patch_functions=True.*opt_level='O1'",
    "keep_batchnorm_fp32": r"batchnorm.*FP32.*should be None.*fp32 was ",
    "master_weights": r"doesn't make sense to use master_weights with O[14]",
}


@pytest.mark.parametrize("level, name, value, stored, accepted", CELLS)
def test_override_is_accepted_or_refused(level, name, value, stored, accepted):
    if accepted:
        got = getattr(properties(level, **{name: value}), name)
        assert got == stored
        assert type(got) is type(stored)
    else:
        words = REASONS[name] + (stored.name if name == "cast_model_type" else "")
        with pytest.raises(jamp.OptLevelError, match=f"(?s){words}"):
            properties(level, **{name: value})


@pytest.mark.parametrize("level", LEVELS)
def test_an_override_changes_nothing_else(level):
    for name, value, _, accepted in OVERRIDES:
        if accepted[level]:
            before = dataclasses.asdict(properties(level))
            after = dataclasses.asdict(properties(level, **{name: value}))
            del before[name], after[name]
            assert after == before


def test_enabled_is_stored():
    assert properties("O2", enabled=True).enabled is True
    assert properties("O2", enabled=False).enabled is False


@pytest.mark.parametrize("bad", ["true", "yes", "", 2, 0.5])
@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_keep_batchnorm_fp32_takes_only_booleans_and_their_names(level, bad):
    words = (
        rf"(?s)keep_batchnorm_fp32.*boolean.*'True' or 'False'.*{re.escape(str(bad))}"
    )
    with pytest.raises(jamp.OptLevelError, match=words):
        properties(level, keep_batchnorm_fp32=bad)


@pytest.mark.parametrize("text", ["True", "False"])
def test_master_weights_as_a_string_never_reads_backwards(text):
    try:
        got = properties("O2", master_weights=text).master_weights
    except (ValueError, TypeError) as error:
        assert "master_weights" in str(error)
    else:
        assert got is (text == "True")


@pytest.mark.parametrize(
    "bad",
    [True, False, 0, 0.0, -1.0, float("nan"), float("inf")]
    + ["0", "-3", "nan", "inf", "abc", "", "True"],
    ids=repr,
)
@pytest.mark.parametrize("level", LEVELS)
def test_loss_scale_must_be_a_positive_finite_number(level, bad):
    with pytest.raises(ValueError, match=rf"(?s)loss_scale.*{re.escape(str(bad))}"):
        properties(level, loss_scale=bad)


@pytest.mark.parametrize("bad", [1e39, "1e+39", 1e-46])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_loss_scale_beyond_fp32_is_refused(level, bad):
    # As fp32 they are inf and 0.
    with pytest.raises(ValueError, match=rf"(?s)scale.*{re.escape(str(bad))}"):
        jamp.initialize(
            small_params(), optax.sgd(0.1), level, loss_scale=bad, verbosity=0
        )


@pytest.mark.parametrize(
    "bad",
    [[128.0], {"scale": 1}, {1.0}, object(), optax.sgd(0.1), jamp.StaticLossScale],
    ids=["list", "dict", "set", "object", "optax", "class"],
)
def test_loss_scale_of_a_strange_type_is_refused(bad):
    with pytest.raises((TypeError, ValueError), match="loss_scale"):
        properties("O2", loss_scale=bad)


@pytest.mark.parametrize(
    "rule", [jamp.DynamicLossScale(window=7), jamp.StaticLossScale(64.0)], ids=repr
)
@pytest.mark.parametrize("level", LEVELS)
def test_loss_scale_takes_a_rule_object(level, rule):
    assert properties(level, loss_scale=rule).loss_scale == rule


def test_loss_scale_takes_a_jax_scalar_and_stays_hashable():
    p = properties("O2", loss_scale=jnp.float32(128.0))
    assert p == properties("O2", loss_scale=128.0)
    assert hash(p) == hash(properties("O2", loss_scale=128.0))


@pytest.mark.parametrize("bad", ["float17", jnp.int32, "int8", True, 16], ids=repr)
@pytest.mark.parametrize("name", ["cast_model_type", "cast_model_outputs"])
def test_a_dtype_must_be_a_floating_dtype(name, bad):
    with pytest.raises((TypeError, ValueError), match=name):
        properties("O2", **{name: bad})


def test_an_unknown_override_is_named():
    with pytest.raises((TypeError, ValueError), match="loss_sale"):
        properties("O2", loss_sale=1.0)


# Messages


@pytest.mark.parametrize(
    "bad",
    ["O4x", 0, "o2", None, "O6", "02", "", "O2 ", 2, b"O2", True, ["O2"]],
    ids=repr,
)
@pytest.mark.parametrize("through", ["properties", "initialize"])
def test_unknown_level_lists_the_levels_and_the_letter(through, bad):
    with pytest.raises(jamp.OptLevelError) as caught:
        if through == "properties":
            properties(bad)
        else:
            jamp.initialize(small_params(), optax.sgd(0.1), bad, verbosity=0)
    message = str(caught.value)
    assert "Unexpected optimization level" in message
    assert str(bad) in message
    assert all(level in message for level in LEVELS)
    assert "letter O, not the number zero" in message


def test_the_error_is_a_value_error_and_apexs_runtime_error():
    assert issubclass(jamp.OptLevelError, ValueError)
    assert issubclass(jamp.OptLevelError, RuntimeError)


@pytest.mark.parametrize("level", ["O1", "O4"])
def test_all_inconsistencies_are_reported_at_once(level):
    with pytest.raises(jamp.OptLevelError) as caught:
        properties(
            level,
            cast_model_type=jnp.float16,
            keep_batchnorm_fp32=True,
            master_weights=True,
        )
    message = str(caught.value)
    assert "cast_model_type was" in message
    assert "keep_batchnorm_fp32 was True" in message
    assert "doesn't make sense to use master_weights" in message


def test_inconsistencies_and_bad_values_are_reported_at_once():
    with pytest.raises(jamp.OptLevelError) as caught:
        properties(
            "O2", patch_functions=True, keep_batchnorm_fp32="maybe", loss_scale=-2
        )
    message = str(caught.value)
    assert "patch_functions" in message
    assert "maybe" in message
    assert "loss_scale" in message
    assert "-2" in message


def test_one_inconsistency_does_not_mention_the_others():
    with pytest.raises(jamp.OptLevelError) as caught:
        properties("O1", master_weights=True, loss_scale=128.0)
    assert "batchnorm" not in str(caught.value)
    assert "loss_scale" not in str(caught.value)


def test_initialize_makes_the_same_checks():
    with pytest.raises(
        jamp.OptLevelError, match="(?s)keep_batchnorm_fp32.*master_weights"
    ):
        jamp.initialize(
            small_params(),
            optax.sgd(0.1),
            "O1",
            keep_batchnorm_fp32="False",
            master_weights=False,
            verbosity=0,
        )


# Values


def make(level="O2"):
    return properties(
        level,
        loss_scale=jamp.DynamicLossScale(window=3),
        cast_model_outputs=jnp.float16,
        keep_fp32=["head", "embed"],
    )


@pytest.mark.parametrize(
    "name", [*PRINTED, "patch_functions_type", "cast_model_outputs", "new_name"]
)
def test_properties_are_immutable(name):
    with pytest.raises(AttributeError):
        setattr(make(), name, None)


def test_an_unknown_property_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no_such_property"):
        _ = make().no_such_property


def test_equality_and_hash_are_by_value():
    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() is not make()


def test_a_list_of_patterns_is_frozen():
    assert make() == properties(
        "O2",
        loss_scale=jamp.DynamicLossScale(window=3),
        cast_model_outputs="float16",
        keep_fp32=("head", "embed"),
    )


@pytest.mark.parametrize(
    "change",
    [
        dict(loss_scale=4.0),
        dict(keep_batchnorm_fp32=False),
        dict(master_weights=False),
        dict(cast_model_type=False),
        dict(cast_model_outputs=jnp.float16),
        dict(keep_fp32="head"),
        dict(enabled=False),
    ],
    ids=repr,
)
def test_every_property_counts_in_equality(change):
    assert properties("O2", **change) != properties("O2")


def test_levels_differ():
    assert len({properties(level) for level in LEVELS}) == len(LEVELS)


@pytest.mark.parametrize("level", ["O0", "O2", "O3", "O5"])
def test_pickle_keeps_value_and_hash(level):
    copy = pickle.loads(pickle.dumps(make(level)))
    assert copy == make(level)
    assert hash(copy) == hash(make(level))


def test_properties_are_static_for_jit():
    traces = []

    def scaled(x, p):
        traces.append(p)
        return x * (2.0 if p.master_weights else 3.0)

    f = jax.jit(scaled, static_argnums=1)
    assert f(1.0, properties("O2")) == 2.0
    assert f(1.0, properties("O2")) == 2.0
    assert f(1.0, properties("O3")) == 3.0
    assert len(traces) == 2


# Printing


def printed(capsys, *args, **kwargs):
    capsys.readouterr()
    jamp.initialize(small_params(), optax.sgd(0.1), *args, **kwargs)
    out, err = capsys.readouterr()
    assert err == ""
    return [line.rstrip() for line in out.splitlines() if line.strip()]


def fields(lines):
    """{name: value} of property lines, in order; the name takes 22 columns."""
    assert all(line[22:25] == " : " for line in lines), lines
    return {line[:22].rstrip(): line[25:] for line in lines}


def blocks(lines):
    """The two lists of property lines, after checking the four headings."""
    i = lines.index("Defaults for this optimization level are:")
    j = lines.index(
        "Processing user overrides (additional kwargs that are not None)..."
    )
    k = lines.index("After processing overrides, optimization options are:")
    assert (i, k) == (1, j + 1)
    assert lines[0].startswith("Selected optimization level ")
    return fields(lines[i + 1 : j]), fields(lines[k + 1 :])


@pytest.mark.parametrize("level", LEVELS)
def test_verbosity_1_prints_level_defaults_and_options(capsys, level):
    lines = printed(capsys, level, verbosity=1)
    defaults, options = blocks(lines)
    assert lines[0].startswith(f"Selected optimization level {BRIEFS[level]}")
    assert defaults == options
    assert [name for name in defaults if name in PRINTED] == list(PRINTED)
    assert defaults["enabled"] == "True"
    assert defaults["opt_level"] == level
    assert defaults["loss_scale"] == str(DEFAULTS[level][5])
    assert defaults["keep_batchnorm_fp32"] == str(DEFAULTS[level][3])
    assert defaults["master_weights"] == str(DEFAULTS[level][4])
    model_type = DEFAULTS[level][0]
    expected = str(model_type) if model_type is None else model_type.name
    assert expected in defaults["cast_model_type"]


def test_printing_shows_defaults_and_then_the_overrides(capsys):
    lines = printed(
        capsys, "O2", loss_scale="128.0", keep_batchnorm_fp32="False", verbosity=1
    )
    defaults, options = blocks(lines)
    assert (defaults["loss_scale"], options["loss_scale"]) == ("dynamic", "128.0")
    assert defaults["keep_batchnorm_fp32"] == "True"
    assert options["keep_batchnorm_fp32"] == "False"
    assert defaults["master_weights"] == options["master_weights"] == "True"


def test_verbosity_1_is_the_default(capsys):
    assert printed(capsys, "O2") == printed(capsys, "O2", verbosity=1)


@pytest.mark.parametrize("level", LEVELS)
def test_verbosity_0_is_silent(capsys, level):
    assert printed(capsys, level, verbosity=0) == []


def test_only_process_0_prints(capsys, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda *args, **kwargs: 1)
    assert printed(capsys, "O2", verbosity=1) == []


def test_several_groups_print_once(capsys):
    capsys.readouterr()
    jamp.initialize(
        [small_params(), small_params()],
        [optax.sgd(0.1), optax.sgd(0.2)],
        "O2",
        num_losses=2,
        verbosity=1,
    )
    assert capsys.readouterr().out.count("Selected optimization level") == 1
