"""Test `jamp.initialize`: states, errors, warnings and the report."""

import functools
from collections import OrderedDict, namedtuple
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jamp
from jamp._policy.levels import describe
from tests.support.bits import assert_same_bits
from tests.support.states import HALF, LEVELS, RUNNING, SGD, State

LISTS = jamp.AutocastLists()
W = {"w": np.ones(2, np.float32)}
HALF_W = {"w": np.ones(2, np.float16)}
STATS = {"mean": np.zeros(2, np.float32), "var": np.ones(2, np.float32)}


def params():
    return {
        "Dense_0": {
            "kernel": np.array([[0.1, 0.2], [0.3, 0.4]], np.float32),
            "bias": np.array([1.0, 2.0], np.float32),
        },
        "BatchNorm_0": {"scale": np.array([1.1, 0.9], np.float32)},
    }


def make(level="O2", tree=None, tx=SGD, **kwargs):
    tree = params() if tree is None else tree
    options = {"verbosity": 0, "state_class": State} | kwargs
    return jamp.initialize(tree, tx, level, **options)


@pytest.mark.parametrize("level", LEVELS)
def test_a_fresh_state(level):
    state, half = make(level), HALF.get(level, np.float32)
    rounded = jax.tree.map(lambda x: x.astype(half), params())
    if level != "O3":
        rounded["BatchNorm_0"] = params()["BatchNorm_0"]
    assert_same_bits(state.params, rounded)
    # Masters are the given params before rounding. O3 has none.
    wide = jax.tree.map(np.float32, rounded) if level == "O3" else params()
    assert_same_bits(jamp.master_params(state), wide)
    moments = [x.dtype for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert len(moments) >= 3 and set(moments) == {np.dtype("float32")}
    counters = state.step, state.skipped_steps, state.last_step_skipped
    assert_same_bits(counters, (np.int32(0), np.int32(0), np.bool_(False)))
    scale = np.float32(2.0**16 if level in ("O1", "O2") else 1.0)
    assert_same_bits(state.loss_scale, scale)
    assert isinstance(state, jamp.AmpState) and isinstance(state, TrainState)


def test_a_state_has_the_properties_of_its_level_and_overrides():
    casts = dict(cast_model_type=jnp.bfloat16, keep_batchnorm_fp32="False")
    others = dict(master_weights=False, loss_scale="8.0", keep_fp32=["Dense_0"])
    patches = dict(patch_functions=False, lists=LISTS, promote="narrowest")
    rows = [("O2", casts | others | {"cast_model_outputs": "float16"})]
    rows += [("O1", patches), ("O2", {"enabled": False}), ("O1", {})]
    for level, given in rows:
        expected = jamp.Properties.from_opt_level(level, **given)
        assert make(level, **given).properties == expected
    assert jamp.initialize(W, SGD, verbosity=0).properties == expected  # the default


@pytest.mark.parametrize("level", RUNNING)
def test_no_leaf_is_weakly_typed(level):
    weak = {"a": jnp.asarray(1.0), "b": jnp.asarray([2.0]), "c": 3.0, "d": np.ones(2)}
    state = make(level, weak, num_losses=2, ema=jnp.asarray(1.0), epoch=0)
    assert jnp.asarray(1.0).weak_type
    assert not any(x.weak_type for x in jax.tree.leaves(state))
    half = HALF.get(level, jnp.float32)  # also for NumPy's default float64
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype(half)}


@pytest.mark.parametrize("level", ["O0", "O2"])
@pytest.mark.parametrize("array", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_a_state_shares_no_array(level, array):
    """Tied leaves, and moments that are params, must be copied for donation."""
    dense = {"kernel": array(np.full(64, 0.1, np.float32)), "n": array(np.arange(64))}
    tree = {"Dense_0": dense, "Dense_1": dense, "BatchNorm_0": {"scale": array(1.0)}}
    tx = optax.GradientTransformation(
        lambda p: {"start": p, "again": p}, lambda u, s, p=None: (u, s)
    )
    state = make(level, tree, tx, num_losses=2, batch_stats=tree, ema=tree)
    addresses = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    theirs = {np.asarray(x).ctypes.data for x in jax.tree.leaves(tree)}
    assert len(set(addresses)) == len(addresses)
    assert theirs.isdisjoint(addresses)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_disabled_leaves_everything_as_it_is(level):
    def loss_fn(p):
        return sum((x * x.dtype.type(3)).sum().astype("f4") for x in p.values())

    # A warning about the other arguments would be an error.
    tree = {"w": np.ones(2, np.float32), "half": np.ones(2, np.float16)}
    state = make(level, tree, optax.sgd(0.5), enabled=False, min_loss_scale=1.0)
    assert_same_bits(state.params, tree)
    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state)
    assert (state.loss_scale, loss) == (1.0, 12.0)
    assert_same_bits(grads, {k: np.full(2, 3, np.float32) for k in tree})
    state = state.apply_gradients(grads=grads)
    assert state.step == 1
    assert_same_bits(state.params, {k: -x / 2 for k, x in tree.items()})


VARIABLES = {"params": W, "batch_stats": {"bn": STATS}}
TWO, TWO_TX = {"g": W, "d": W}, {"g": SGD, "d": SGD}
WRAPPED = jamp.master_weights(SGD)
PAIR, TWO_OF = namedtuple("PAIR", "g d")(W, W), "list, tuple or dict of them, got"
TYPE_ERRORS = [
    (dict(tx=optax.sgd), "tx must be an optax tra"),
    (dict(tree=[W, W], tx=[SGD, 0.1]), "tx holds 0.1, which is not an optax"),
    (dict(tree=PAIR, tx=PAIR._replace(g=SGD, d=SGD)), TWO_OF),
    (dict(tree=OrderedDict(TWO), tx=OrderedDict(TWO_TX)), TWO_OF),
    (dict(tree=nn.Dense(3)), r"params is Dense\(.*, which is not an array.*\.init\(ke"),
    (dict(tree=[W, {"a": {"b": "x"}}]), r"params\[1\]\['a'\]\['b'\] is 'x'"),
    (dict(tree=VARIABLES), r'batch_stats.*variables\["params"\]'),
    (dict(tree={"g": VARIABLES}, tx={"g": SGD}), "Flax variables with batch_stats"),
    (dict(extra="text"), "extra field extra is 'text'.*not an array.*pytree_node=Fal"),
    (dict(extra={"a": len}), r"extra field extra\['a'\] is"),
    (dict(tree=jamp.initialize(W, None, verbosity=0)), "params is an AmpSt.*master_p"),
    (dict(apply_fn=nn.Dense(3)), "apply_fn is a Dense, a Linen.*`apply_fn=model.app"),
    (dict(apply_fn="text"), "apply_fn is 'text', which is not callable.*`model.apply`"),
    (dict(apply_fn=OrderedDict(g=len)), "apply_fn is OrderedD.*list, tuple or dict"),
    (dict(state_class=TrainState), "state_class must be jamp.AmpState or a subcl"),
    (dict(opt_state=1), "cannot take 'opt_state', which it sets itself"),
]
VALUE_ERRORS = [
    (dict(level="O9"), "Unexpected optimization level 'O9'"),
    (dict(tx=[SGD, SGD]), r"same container.*optax\.chain"),
    (dict(tx={None: SGD}), r"tx has the key None.* for one group"),
    (dict(tree={None: W}, tx={None: SGD}), r"tx has the key None.* for one group"),
    (dict(tx=(SGD, SGD), tree=np.ones(2)), "one ndarray of params"),
    (dict(tree=[W, W], tx=(SGD, SGD)), "a list of length 2.*a tuple of length 2"),
    (dict(tree=[W, W, W], tx=[SGD, SGD]), "length 3.*length 2"),
    (dict(tree=TWO, tx={"g": SGD, "e": SGD}), r"keys \['g', 'd'\].*keys \['g', 'e'\]"),
    (dict(tree=TWO, tx=[SGD, SGD]), "a dict.*a list"),
    (dict(tx=WRAPPED), "master weights already.*master_weights=False"),
    (dict(tx=optax.chain(optax.clip(1.0), WRAPPED)), "master weights already"),
    (dict(num_losses=0), "num_losses must be a positive integer, got 0"),
    (dict(num_losses=True), "num_losses must be a positive integer, got True"),
    (dict(level="O2", min_loss_scale=-1.0), "min_scale.*-1.0"),
    (dict(level="O2", max_loss_scale=0.0), "max_scale.*0.0"),
    (dict(keep_fp32="haed"), "keep_fp32='haed' matches no leaf"),
    (dict(tree=TWO, tx=TWO_TX, keep_fp32="^w$"), "in these paths: d/w, g/w"),
    (dict(tree={"d": W, "g": {"h": HALF_W}}, tx=TWO_TX), r"\['g'\]\['h'\].* float16"),
]


def test_arguments_that_make_no_sense_are_refused():
    # A row without a level runs at O0 and O2.
    for error, rows in ((TypeError, TYPE_ERRORS), (ValueError, VALUE_ERRORS)):
        for given, words in rows:
            for level in [given["level"]] if "level" in given else ["O0", "O2"]:
                with pytest.raises(error, match=f"(?s){words}"):
                    make(**{"level": level} | given)


TYPOS = (
    "loss_sale loss_scale, lossscale loss_scale, models params, optimizer tx, "
    "losses num_losses, model params, batch_stat batch_stats"
)


def test_an_undeclared_keyword_error_shows_the_declaration():
    for typo, keyword in map(str.split, TYPOS.split(",")):
        with pytest.raises(TypeError, match=f"{typo!r}. Did you mean {keyword!r}"):
            make(**{typo: 1})
    declaration = r"'z'\. A .*`class State\(jamp.AmpState\): z: A"
    with pytest.raises(TypeError, match=declaration):
        make(z=1, state_class=jamp.AmpState)
    with pytest.raises(TypeError, match=r"class State\(Mine\): ema: Any"):
        make(ema=W, state_class=Mine)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])
@pytest.mark.parametrize("level", RUNNING)
def test_only_float32_params_come_in_unless_others_are_allowed(level, dtype):
    with jax.enable_x64(dtype == "float64"):
        tree = params() | {"w": jnp.array([0.5, 2.0], dtype)}
        with pytest.raises(ValueError) as caught:
            make(level, tree)
        message = str(caught.value)
        assert message.startswith(f"Found params['w'] with dtype {dtype}, expected flo")
        assert "kernel" not in message and "allow_incoming_model_not" in message
        state = make(level, tree, allow_incoming_model_not_fp32=True)
        half = np.array([0.5, 2.0], HALF.get(level, np.float32))
        assert_same_bits(state.params["w"], half)
        assert_same_bits(jamp.master_params(state)["w"], half.astype(np.float32))


def test_verbosity_prints_nothing_one_line_or_the_report_of_apex(capsys):
    properties = functools.partial(jamp.Properties.from_opt_level, "O5")
    brief = "BFLOAT16 training with FP32 batchnorm and FP32 master weights."
    expected = [
        f"Selected optimization level O5:  {brief}",
        "Defaults for this optimization level are:",
        *describe(properties()),
        "Processing user overrides (additional kwargs that are not None)...",
        "After processing overrides, optimization options are:",
        *describe(properties(loss_scale="128.0")),
    ]
    for trees, txs in ((params(), SGD), ([W, W], [SGD, SGD])):
        options = {"loss_scale": "128.0", "num_losses": 2, "verbosity": 2}
        jamp.initialize(trees, txs, "O5", **options)
        out, err = capsys.readouterr()
        assert [line for line in out.splitlines() if line] == expected and not err
    make()
    make(verbosity=1, enabled=False)
    assert capsys.readouterr() == ("", "")
    lines = [
        "jamp O1: float32 params, autocast to float16, dynamic loss scale",
        "jamp O6: bfloat16 params, float32 BatchNorm, float32 masters, fp8 matmuls, "
        "loss scale 1.0 (checked)",
        "jamp O4: float32 params, autocast to bfloat16, loss scale 1.0 (unchecked)",
    ]
    make("O1", verbosity=1)
    jamp.initialize(W, SGD, "O6")
    make("O4", verbosity=1, loss_scale=1)
    assert capsys.readouterr().out.splitlines() == lines


WHITENED, STATISTICS = {"whitening": {"scale": W["w"]}}, {"whitening": STATS}
GAN = {"g": WHITENED, "d": {"dense": W}}


@pytest.mark.parametrize(
    "tree, tx, fields, kept",
    [
        (WHITENED, SGD, {}, [False]),
        (WHITENED, SGD, {"batch_stats": STATISTICS}, [True]),
        ({"params": WHITENED}, SGD, {"batch_stats": STATISTICS}, [True]),
        (GAN, TWO_TX, {}, [False, False]),
        (GAN, TWO_TX, {"batch_stats": dict.fromkeys("gd", STATISTICS)}, [False, True]),
        (GAN, TWO_TX, {"keep_fp32": "^d/dense/w$"}, [True, False]),
    ],
)
def test_batch_stats_and_keep_fp32_say_what_stays_float32(tree, tx, fields, kept):
    for level in RUNNING:
        state = make(level, tree, tx, **fields)
        half = HALF.get(level, jnp.float32)
        by_statistics = level == "O3" and "batch_stats" in fields
        expected = [jnp.float32 if k and not by_statistics else half for k in kept]
        assert [x.dtype for x in jax.tree.leaves(state.params)] == expected
        if "batch_stats" in fields:
            assert_same_bits(state.batch_stats, fields["batch_stats"])


def test_one_transformation_for_several_models_makes_one_group():
    for trees in ([params(), W], (params(), W), {"g": params(), "d": W}):
        state = make("O2", trees)
        assert jax.tree.structure(state.params) == jax.tree.structure(trees)
        assert state.skipped_steps.shape == ()
        assert jax.tree.leaves(state.params)[-1].dtype == jnp.float16


DYNAMIC, STATIC = jamp.DynamicLossScale, jamp.StaticLossScale
FLOOR_AND_CEILING = {"min_loss_scale": 16.0, "max_loss_scale": 2.0**20}
SCALES = [
    ({}, DYNAMIC(), 2.0**16),
    ({"loss_scale": "128.0"}, STATIC(128.0), 128.0),
    ({"loss_scale": DYNAMIC(2.0, window=5)}, DYNAMIC(2.0, window=5), 2.0),
    (FLOOR_AND_CEILING, DYNAMIC(min_scale=16.0, max_scale=2.0**20), 2.0**16),
    ({"min_loss_scale": 2.0**18}, DYNAMIC(2.0**18, min_scale=2.0**18), 2.0**18),
    # A floor of 0 sets no floor.
    ({"min_loss_scale": 0}, DYNAMIC(min_scale=0), 2.0**16),
]


@pytest.mark.parametrize("losses", [1, 3])
def test_one_rule_per_loss(losses):
    for given, rule, first in SCALES:
        state = make("O2", num_losses=losses, **given)
        assert state.loss_scale_rules == (rule,) * losses
        assert_same_bits(state.loss_scales, (rule.init(),) * losses)
        assert state.loss_scale == ((first,) * losses if losses > 1 else first)


# A level, options, and the warning.
UNUSED = [
    (
        *("O2", {"loss_scale": rule, f"{end}_loss_scale": value}),
        f"{end}_loss_scale={value} has no effect: .*2.0.* or {end}_scale to the rule",
    )
    for rule in (2.0, DYNAMIC(2.0))
    for end, value in (("min", 16.0), ("max", 1.0), ("max", None))
]
UNUSED += [
    (level, {"store_remainder": True} | options, f"no effect: {why}. It is for O5 and")
    for level, options, why in (
        ("O4", {}, "O4 keeps no master weights"),
        ("O5", {"tx": None}, "there is no tx"),
        ("O5", {"master_weights": False}, "master_weights is False"),
    )
]


@pytest.mark.parametrize("level, options, words", UNUSED)
def test_an_option_without_effect_warns_with_the_reason(level, options, words):
    with pytest.warns(jamp.UnusedOptionWarning, match=words):
        state = make(level, **options)
    assert state.loss_scale == (2.0 if "loss_scale" in options else 1.0)
    make(level, enabled=False, **options)


class Mine(jamp.AmpState):
    needed: Any
    schedule: Any = flax.struct.field(pytree_node=False, default=None)


def test_a_subclass_declares_fields_and_static_ones_take_any_value():
    constant = optax.constant_schedule(0.5)
    fields = {"needed": W, "batch_stats": STATS, "schedule": constant}
    state = make(state_class=Mine, **fields)
    assert type(state) is Mine and state.schedule(0) == 0.5
    assert_same_bits(jax.tree.map(lambda x: x, state).batch_stats, STATS)
    with pytest.raises(TypeError, match="needed"):
        make(state_class=Mine)
