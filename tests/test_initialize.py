"""`jamp.initialize`: what it builds, what it refuses, and what it says then."""

import pickle
import re
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from flax.training.train_state import TrainState

import jamp

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
RUNNING = ("O0", "O2", "O3", "O5")
HALF = {"O2": jnp.float16, "O3": jnp.float16, "O5": jnp.bfloat16}
REFUSED = (ValueError, TypeError, RuntimeError)


def params():
    return {
        "Dense_0": {
            "kernel": jnp.array([[0.1, 0.2], [0.3, 0.4]], jnp.float32),
            "bias": jnp.array([1.0, 2.0], jnp.float32),
        },
        "BatchNorm_0": {"scale": jnp.array([1.1, 0.9], jnp.float32)},
    }


def make(level="O2", tree=None, tx=None, **kwargs):
    tree = params() if tree is None else tree
    tx = optax.sgd(0.5, momentum=0.9) if tx is None else tx
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def like(tree, value=1.0):
    return jax.tree.map(lambda x: jnp.full(x.shape, value, x.dtype), tree)


def assert_equal(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


# What a state holds


@pytest.mark.parametrize("level", LEVELS)
def test_dtypes_of_params_per_level(level):
    state = make(level)
    half = HALF.get(level, jnp.float32)
    assert state.params["Dense_0"]["kernel"].dtype == half
    kept = half if level == "O3" else jnp.float32
    assert state.params["BatchNorm_0"]["scale"].dtype == kept


@pytest.mark.parametrize("level", LEVELS)
def test_params_are_the_rounded_users_params(level):
    half = HALF.get(level, jnp.float32)
    got = make(level).params["Dense_0"]["kernel"]
    expected = np.array([[0.1, 0.2], [0.3, 0.4]], np.float32).astype(half)
    np.testing.assert_array_equal(np.asarray(got), expected)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O4", "O5"])
def test_masters_are_the_users_fp32_params_and_not_the_rounded_ones(level):
    assert_equal(jamp.master_params(make(level)), params())


def test_a_leaf_that_is_its_own_master_has_a_hole_in_the_masters():
    masters = make("O2").opt_state.masters
    assert masters["BatchNorm_0"]["scale"] == optax.MaskedNode()
    assert masters["Dense_0"]["kernel"].dtype == jnp.float32


def test_o3_has_no_better_copy_than_its_half_params():
    masters = jamp.master_params(make("O3"))
    rounded = jax.tree.map(
        lambda x: x.astype(jnp.float16).astype(jnp.float32), params()
    )
    assert_equal(masters, rounded)


@pytest.mark.parametrize("level", RUNNING)
def test_optimizer_state_is_fp32(level):
    floats = [
        x
        for x in jax.tree.leaves(make(level).opt_state)
        if jnp.issubdtype(x.dtype, jnp.floating)
    ]
    assert len(floats) >= 3
    assert {str(x.dtype) for x in floats} == {"float32"}


@pytest.mark.parametrize("level", LEVELS)
def test_fresh_counters(level):
    state = make(level)
    assert isinstance(state, jamp.AmpState)
    assert isinstance(state, TrainState)
    assert (state.step, state.skipped_steps, state.last_step_skipped) == (0, 0, False)
    assert state.step.dtype == state.skipped_steps.dtype == jnp.int32
    assert state.last_step_skipped.dtype == jnp.bool_
    assert len(state.loss_scales) == len(state.loss_scale_rules) == 1


@pytest.mark.parametrize("level", LEVELS)
def test_no_leaf_is_weakly_typed(level):
    weak = {"a": jnp.asarray(1.0), "b": jnp.asarray([2.0], jnp.float32), "c": 3.0}
    state = make(level, weak, num_losses=2, ema=jnp.asarray(1.0), epoch=0)
    assert jnp.asarray(1.0).weak_type  # or the test shows nothing
    assert not any(x.weak_type for x in jax.tree.leaves(state))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("twins", [False, True])
def test_no_array_object_occurs_twice(level, twins):
    tree = params()
    if twins:
        tree["Dense_1"] = tree["Dense_0"]  # the user's own tied leaves
    state = make(level, tree, num_losses=2, batch_stats=like(params()), ema=tree)
    leaves = jax.tree.leaves(state)
    assert len({id(x) for x in leaves}) == len(leaves)
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
    theirs = {x.unsafe_buffer_pointer() for x in jax.tree.leaves(tree)}
    assert not theirs & {x.unsafe_buffer_pointer() for x in leaves}


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_value_beyond_half_is_clamped_and_not_inf(dtype):
    tree = {"w": jnp.array([2.0**20, -(2.0**20), 2.0], dtype)}
    state = make("O2", tree, allow_incoming_model_not_fp32=True)
    np.testing.assert_array_equal(np.float32(state.params["w"]), [65504, -65504, 2])
    np.testing.assert_array_equal(jamp.master_params(state)["w"], np.float32(tree["w"]))


@pytest.mark.parametrize("level", RUNNING)
def test_an_optimizer_state_made_of_the_params_is_copied(level):
    def init(tree):
        return {"start": tree, "again": tree}

    tx = optax.GradientTransformation(init, lambda u, s, p=None: (u, s))
    leaves = jax.tree.leaves(make(level, tx=tx))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


def test_everything_static_hashes_by_value():
    tx = optax.sgd(0.5)

    def apply(variables, x):
        return x

    def build():
        return make(
            "O2", tx=tx, apply_fn=apply, keep_fp32=["bias"], loss_scale=jnp.float32(4.0)
        )

    def static(state):
        return state.tx, state.apply_fn, state.properties, state.loss_scale_rules

    assert jax.tree.structure(build()) == jax.tree.structure(build())
    assert static(build()) == static(build())
    # The hash of a treedef leaves static fields out.
    assert hash(static(build())) == hash(static(build()))


@pytest.mark.standard_promotion  # for optax.adamw
def test_int_bool_and_key_leaves_are_held_out_of_the_optimizer():
    tree = {
        "w": jnp.array([1.0, 2.0], jnp.float32),
        "n": jnp.array([3, 4], jnp.int32),
        "flag": jnp.array(True),
        "key": jax.random.key(1),
    }
    state = make("O2", tree, optax.adamw(0.1, weight_decay=0.5))

    def loss_fn(p):
        return (p["w"].astype(jnp.float32) * p["n"].astype(jnp.float32)).sum() / 8.0

    grads = jamp.scaled_grad(loss_fn)(state)
    state = state.apply_gradients(grads=grads)
    assert state.step == 1
    assert state.params["w"].dtype == jnp.float16
    assert not np.array_equal(np.float32(state.params["w"]), [1, 2])
    assert state.params["n"].tolist() == [3, 4]
    assert state.params["n"].dtype == jnp.int32
    assert state.params["flag"].dtype == jnp.bool_
    assert bool(state.params["flag"])
    assert jnp.array_equal(
        jax.random.key_data(state.params["key"]), jax.random.key_data(tree["key"])
    )


@pytest.mark.parametrize("container", [FrozenDict, dict, lambda d: [*d.values()]])
def test_params_keep_the_users_container(container):
    tree = container(params())
    state = make("O2", tree)
    assert jax.tree.structure(state.params) == jax.tree.structure(tree)


def test_none_leaves_survive():
    tree = {"w": jnp.ones(2, jnp.float32), "bias": None}
    state = make("O2", tree).apply_gradients(grads=like(tree))
    assert state.params["bias"] is None
    assert state.params["w"].dtype == jnp.float16


# tx


def test_without_tx_there_is_a_state_for_inference():
    state = jamp.initialize(
        params(), opt_level="O2", apply_fn=lambda v, x: x, verbosity=0
    )
    assert state.params["Dense_0"]["kernel"].dtype == jnp.float16
    assert jax.tree.leaves(state.opt_state) == []
    with pytest.raises(REFUSED, match="tx"):
        state.apply_gradients(grads=like(params()))


def test_tx_and_level_may_be_positional():
    state = jamp.initialize(params(), optax.sgd(0.1), "O5", verbosity=0)
    assert state.properties.opt_level == "O5"


@pytest.mark.parametrize(
    "bad", [0.1, optax.sgd, "adam", object()], ids=lambda x: type(x).__name__
)
def test_a_tx_that_is_no_transformation_is_refused(bad):
    with pytest.raises(TypeError, match=r"(?s)tx.*optax"):
        make("O2", tx=bad)


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_several_transformations_for_one_model_point_to_chain(kind, level):
    txs = kind([optax.clip_by_global_norm(1.0), optax.sgd(0.1)])
    with pytest.raises((TypeError, ValueError), match=r"optax\.chain"):
        make(level, tx=txs)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("where", ["alone", "in_chain"])
def test_a_wrapped_tx_is_refused(level, where):
    tx = jamp.master_weights(optax.sgd(0.1))
    if where == "in_chain":
        tx = optax.chain(optax.clip_by_global_norm(1.0), tx)
    with pytest.raises(REFUSED, match="master_weights"):
        make(level, tx=tx)


# enabled=False


@pytest.mark.parametrize("level", LEVELS)
def test_disabled_leaves_everything_as_it_is(level):
    state = make(level, enabled=False)
    assert state.properties.enabled is False
    assert_equal(state.params, params())
    assert state.loss_scale == 1.0
    state = state.apply_gradients(grads=like(params()))
    assert state.step == 1
    np.testing.assert_allclose(
        state.params["Dense_0"]["bias"], np.float32([0.5, 1.5]), rtol=1e-6
    )


def test_disabled_does_not_scale_and_does_not_cast():
    seen = []

    def loss_fn(p):
        seen.append(p["w"].dtype)
        return (p["w"] * 3.0).sum()

    state = make("O2", {"w": jnp.ones(2, jnp.float32)}, enabled=False)
    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state)
    assert set(seen) == {jnp.dtype(jnp.float32)}
    assert loss == 6.0
    np.testing.assert_array_equal(grads.tree["w"], [3.0, 3.0])


def test_disabled_has_nothing_to_say_about_other_arguments():
    # Warnings are errors here.
    state = make("O2", enabled=False, min_loss_scale=1.0, max_loss_scale=2.0**20)
    assert state.loss_scale == 1.0


def test_disabled_accepts_half_params():
    tree = {"w": jnp.ones(2, jnp.float16)}
    assert make("O2", tree, enabled=False).params["w"].dtype == jnp.float16


@pytest.mark.parametrize("level", LEVELS)
def test_disabled_prints_nothing_about_a_level_it_does_not_run(level, capsys):
    jamp.initialize(params(), optax.sgd(0.1), level, enabled=False)
    assert "After processing overrides" not in capsys.readouterr().out


# Params that are refused


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_params_are_refused_with_their_path(level, dtype):
    tree = params()
    tree["Dense_0"]["kernel"] = tree["Dense_0"]["kernel"].astype(dtype)
    with pytest.raises(REFUSED) as caught:
        make(level, tree)
    message = str(caught.value)
    assert re.search("Dense_0.*kernel", message)
    assert "bias" not in message
    assert jnp.dtype(dtype).name in message
    assert "allow_incoming_model_not_fp32" in message


def test_numpys_default_float64_becomes_fp32():
    state = make("O0", {"w": np.full(2, 0.1)})
    assert state.params["w"].dtype == jnp.float32


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_float64_params_are_refused_under_x64_unless_allowed(level):
    with jax.enable_x64(True):
        tree = {"w": jnp.full(2, 0.1, jnp.float64)}
        with pytest.raises(REFUSED, match="(?s)w.*float64.*allow_incoming"):
            make(level, tree)
        state = make(level, tree, allow_incoming_model_not_fp32=True)
        assert state.params["w"].dtype == HALF.get(level, jnp.float32)


def test_half_params_are_refused_with_their_group():
    trees = {"d": params(), "g": {"head": {"w": jnp.ones(2, jnp.float16)}}}
    with pytest.raises(REFUSED, match="g.*head.*w.* float16"):
        make("O2", trees, {"d": optax.sgd(0.1), "g": optax.sgd(0.1)})


@pytest.mark.parametrize("level", RUNNING)
def test_half_params_may_be_allowed(level):
    tree = {"w": jnp.array([0.5, 2.0], jnp.float16)}
    state = make(level, tree, allow_incoming_model_not_fp32=True)
    assert state.params["w"].dtype == HALF.get(level, jnp.float32)
    np.testing.assert_array_equal(jamp.master_params(state)["w"], [0.5, 2.0])
    assert jamp.master_params(state)["w"].dtype == jnp.float32


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_state_passed_in_again_is_refused(level):
    state = make(level)
    with pytest.raises(REFUSED, match=r"(?s)AmpState.*(state\.params|master_params)"):
        jamp.initialize(state, optax.sgd(0.1), level, verbosity=0)


def test_a_state_as_one_of_several_models_is_refused():
    with pytest.raises(REFUSED, match="AmpState"):
        make("O2", [params(), make("O2")], [optax.sgd(0.1), optax.sgd(0.1)])


def test_a_module_passed_as_params_is_refused():
    with pytest.raises((TypeError, ValueError), match=r"(?s)params"):
        make("O2", nn.Dense(3))


def test_keep_fp32_that_matches_nothing_is_refused():
    with pytest.raises(ValueError, match="(?s)keep_fp32.*haed"):
        make("O2", keep_fp32="haed")


def test_keep_fp32_reaches_the_cast():
    state = make("O2", keep_fp32="Dense_0/bias")
    assert state.params["Dense_0"]["bias"].dtype == jnp.float32
    assert state.params["Dense_0"]["kernel"].dtype == jnp.float16


def test_batch_stats_name_the_batchnorms():
    tree = {"whitening": {"scale": jnp.ones(2, jnp.float32)}}
    stats = {"whitening": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}
    assert make("O2", tree).params["whitening"]["scale"].dtype == jnp.float16
    state = make("O2", tree, batch_stats=stats)
    assert state.params["whitening"]["scale"].dtype == jnp.float32


@pytest.mark.parametrize("level", LEVELS)
def test_batch_stats_stay_fp32_at_every_level(level):
    state = make(
        level, batch_stats={"BatchNorm_0": {"mean": jnp.zeros(2, jnp.float32)}}
    )
    assert state.batch_stats["BatchNorm_0"]["mean"].dtype == jnp.float32


# Containers of groups


@pytest.mark.parametrize(
    "pack",
    [list, tuple, lambda pair: dict(zip("gd", pair, strict=True))],
    ids=["list", "tuple", "dict"],
)
@pytest.mark.parametrize("level", RUNNING)
def test_groups_keep_their_container(pack, level):
    trees = pack([params(), {"w": jnp.ones(3, jnp.float32)}])
    txs = pack([optax.sgd(0.1, momentum=0.9), optax.sgd(1.0)])
    state = make(level, trees, txs)
    assert jax.tree.structure(state.params) == jax.tree.structure(trees)
    one_each = jax.tree.structure(pack([0, 0]))
    assert type(state.opt_state) is type(trees)
    assert jax.tree.structure(state.skipped_steps) == one_each
    assert jax.tree.structure(state.last_step_skipped) == one_each


def test_each_group_has_its_own_optimizer():
    trees = {
        "g": {"w": jnp.zeros(2, jnp.float32)},
        "d": {"w": jnp.zeros(2, jnp.float32)},
    }
    state = make("O2", trees, {"g": optax.sgd(1.0), "d": optax.sgd(0.25)})
    state = state.apply_gradients(grads=like(trees))
    np.testing.assert_array_equal(np.float32(state.params["g"]["w"]), [-1, -1])
    np.testing.assert_array_equal(np.float32(state.params["d"]["w"]), [-0.25, -0.25])


def test_groups_may_share_one_optimizer_object():
    tx = optax.sgd(1.0)
    trees = [{"w": jnp.zeros(2, jnp.float32)}, {"w": jnp.ones(2, jnp.float32)}]
    state = make("O2", trees, [tx, tx]).apply_gradients(grads=like(trees))
    np.testing.assert_array_equal(np.float32(state.params[0]["w"]), [-1, -1])
    np.testing.assert_array_equal(np.float32(state.params[1]["w"]), [0, 0])


@pytest.mark.parametrize("given", [None, {}, {"g": 0}, {"g": 0, "d": 0}], ids=str)
def test_batch_stats_of_some_groups_or_none(given):
    trees = {
        "g": {"whitening": {"scale": jnp.ones(2, jnp.float32)}},
        "d": {"dense": {"kernel": jnp.ones(2, jnp.float32)}},
    }
    stats = {"whitening": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}
    fields = {} if given is None else {"batch_stats": dict.fromkeys(given, stats)}
    state = make("O2", trees, {"g": optax.sgd(0.1), "d": optax.sgd(0.1)}, **fields)
    known = bool(given) and "g" in given
    kept = jnp.float32 if known else jnp.float16
    assert state.params["g"]["whitening"]["scale"].dtype == kept
    assert state.params["d"]["dense"]["kernel"].dtype == jnp.float16


def test_keep_fp32_means_the_same_for_groups():
    def two():
        return {"g": params(), "d": {"head": {"kernel": jnp.ones(2, jnp.float32)}}}

    txs = {"g": optax.sgd(0.1), "d": optax.sgd(0.1)}
    state = make("O2", two(), txs, keep_fp32="head/kernel")
    assert state.params["d"]["head"]["kernel"].dtype == jnp.float32
    assert state.params["g"]["Dense_0"]["kernel"].dtype == jnp.float16
    # A pattern that keeps nothing is refused, and one that is accepted keeps something.
    accepted = 0
    for pattern in ("^head/kernel$", "^d/head/kernel$", "^1/head/kernel$"):
        try:
            state = make("O2", two(), txs, keep_fp32=pattern)
        except ValueError as error:
            assert pattern in str(error)
        else:
            accepted += 1
            assert state.params["d"]["head"]["kernel"].dtype == jnp.float32
    assert accepted >= 1


@pytest.mark.parametrize("pack", [list, tuple], ids=["list", "tuple"])
def test_a_sequence_of_params_with_one_tx_is_one_group(pack):
    trees = pack([params(), {"w": jnp.ones(3, jnp.float32)}])
    state = make("O2", trees)
    assert jax.tree.structure(state.params) == jax.tree.structure(trees)
    assert state.skipped_steps.shape == ()


def test_a_dict_of_models_with_one_tx_is_one_group():
    state = make("O2", {"encoder": params(), "decoder": params()})
    assert state.skipped_steps.shape == ()
    assert state.params["decoder"]["Dense_0"]["kernel"].dtype == jnp.float16


MISMATCHES = [
    ([{}, {}], (0, 0), r"list.*tuple"),
    (({}, {}), [0, 0], r"tuple.*list"),
    ([{}, {}, {}], [0, 0], r"3.*2"),
    ([{}], [0, 0], r"1.*2"),
    ({"g": {}, "d": {}}, {"g": 0, "e": 0}, r"'?d'?.*'?e'?|'?e'?.*'?d'?"),
    ({"g": {}, "d": {}}, {"g": 0}, r"d"),
    ({"g": {}, "d": {}}, [0, 0], r"dict.*list|optax\.chain"),
    ([{}, {}], {"g": 0, "d": 0}, r"list.*dict"),
]


@pytest.mark.parametrize("trees, txs, words", MISMATCHES, ids=str)
def test_mismatched_containers_are_refused(trees, txs, words):
    leaf = {"w": jnp.ones(2, jnp.float32)}
    trees = jax.tree.map(lambda _: leaf, trees, is_leaf=lambda x: x == {})
    txs = jax.tree.map(lambda _: optax.sgd(0.1), txs)
    with pytest.raises((TypeError, ValueError), match=f"(?s){words}") as caught:
        make("O2", trees, txs)
    assert "tx" in str(caught.value)


# Losses and scales


@pytest.mark.parametrize("num_losses", [1, 3])
def test_one_scale_per_loss(num_losses):
    state = make("O2", num_losses=num_losses)
    assert len(state.loss_scales) == len(state.loss_scale_rules) == num_losses
    scales = state.loss_scale if num_losses > 1 else (state.loss_scale,)
    assert isinstance(scales, tuple)
    assert [float(s) for s in scales] == [2.0**16] * num_losses


@pytest.mark.parametrize("bad", [0, -1, 1.5, "2", None], ids=repr)
def test_num_losses_must_be_a_positive_integer(bad):
    words = rf"(?s)num_losses.*{re.escape(str(bad))}"
    with pytest.raises((TypeError, ValueError), match=words):
        make("O2", num_losses=bad)


@pytest.mark.parametrize(
    "given, rule",
    [
        ("dynamic", jamp.DynamicLossScale()),
        ("128.0", jamp.StaticLossScale(128.0)),
        (64, jamp.StaticLossScale(64.0)),
        (jamp.DynamicLossScale(window=5), jamp.DynamicLossScale(window=5)),
        (jamp.StaticLossScale(2.0, check=True), jamp.StaticLossScale(2.0, check=True)),
    ],
    ids=repr,
)
@pytest.mark.parametrize("level", LEVELS)
def test_loss_scale_becomes_a_rule(level, given, rule):
    state = make(level, loss_scale=given)
    assert state.loss_scale_rules == (rule,)
    assert_equal(state.loss_scales, (rule.init(),))


@pytest.mark.parametrize("level", LEVELS)
def test_default_scale_of_each_level(level):
    expected = 2.0**16 if level in ("O1", "O2") else 1.0
    assert make(level).loss_scale == expected
    assert make(level).loss_scale.dtype == jnp.float32


def test_floor_and_ceiling_reach_the_rules():
    state = make("O2", min_loss_scale=16.0, max_loss_scale=2.0**20, num_losses=2)
    assert [(r.min_scale, r.max_scale) for r in state.loss_scale_rules] == [
        (16.0, 2.0**20),
        (16.0, 2.0**20),
    ]


def test_the_ceiling_also_caps_the_initial_scale():
    assert make("O2", max_loss_scale=2.0**10).loss_scale == 2.0**10


def test_a_floor_of_zero_means_no_floor():
    state = make("O2", min_loss_scale=0)
    down = state.loss_scale_rules[0].update(state.loss_scales[0], jnp.asarray(False))
    assert down.scale == 2.0**15


def test_a_static_scale_ignores_the_floor_and_says_so():
    with pytest.warns(UserWarning, match="(?s)min_loss_scale.*16"):
        state = make("O2", loss_scale=2.0, min_loss_scale=16.0)
    assert state.loss_scale == 2.0


def test_a_static_scale_ignores_the_ceiling():
    state = make("O2", loss_scale=2.0, max_loss_scale=1.0)
    assert state.loss_scale == 2.0


@pytest.mark.parametrize(
    "name, value", [("min_loss_scale", -1.0), ("max_loss_scale", 0.0)], ids=str
)
def test_senseless_floor_or_ceiling_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"(?s)(min|max)_(loss_)?scale.*{value}"):
        make("O2", **{name: value})


# Extra fields


def test_extra_fields_land_on_the_state_and_change_with_a_step():
    state = make("O2", batch_stats={"mean": jnp.zeros(2, jnp.float32)})
    new = {"mean": jnp.ones(2, jnp.float32)}
    state = state.apply_gradients(grads=like(params()), batch_stats=new)
    np.testing.assert_array_equal(state.batch_stats["mean"], [1, 1])


@pytest.mark.parametrize("finite", [True, False])
def test_a_field_may_hold_prng_keys(finite):
    state = make("O2", key=jax.random.key(0), raw=jax.random.PRNGKey(0))
    grads = like(params(), 1.0 if finite else jnp.inf)
    state = state.apply_gradients(
        grads=grads, key=jax.random.key(1), raw=jax.random.PRNGKey(1)
    )
    expected = jax.random.key_data(jax.random.key(int(finite)))
    np.testing.assert_array_equal(jax.random.key_data(state.key), expected)
    np.testing.assert_array_equal(state.raw, expected)


def test_states_with_the_same_fields_share_one_picklable_class():
    a = make("O2", batch_stats=jnp.ones(1), ema=jnp.ones(2))
    b = make("O3", ema=jnp.zeros(3), batch_stats=jnp.ones(1))
    c = make("O2", ema=jnp.zeros(3))
    assert type(a) is type(b)
    assert type(a) is not type(c)
    assert issubclass(type(a), jamp.AmpState)
    assert pickle.loads(pickle.dumps(type(a))) is type(a)


class Mine(jamp.AmpState):
    batch_stats: Any


def test_a_declared_class_is_used():
    state = make("O2", state_class=Mine, batch_stats=jnp.ones(2, jnp.float32))
    assert type(state) is Mine
    np.testing.assert_array_equal(state.batch_stats, [1, 1])


def test_a_declared_class_declares_all_its_fields():
    with pytest.raises(TypeError, match=r"(?s)Mine.*ema"):
        make("O2", state_class=Mine, batch_stats=jnp.ones(1), ema=jnp.ones(2))


def test_a_declared_field_left_out_is_an_error():
    with pytest.raises(TypeError, match="batch_stats"):
        make("O2", state_class=Mine)


class Named(jamp.AmpState):
    schedule: Any = flax.struct.field(pytree_node=False, default=None)


def test_a_declared_static_field_takes_any_value():
    # Common on a TrainState; only fields of the pytree are arrays.
    state = make("O2", state_class=Named, schedule=optax.constant_schedule(0.5))
    assert state.schedule(0) == 0.5
    copy = jax.tree.map(lambda x: x, state)
    assert copy.schedule(0) == 0.5


@pytest.mark.parametrize("value", ["text", len], ids=["text", "function"])
def test_a_field_that_is_no_array_is_named(value):
    with pytest.raises(TypeError, match="note"):
        make("O2", note=value)


@pytest.mark.parametrize("bad", [TrainState, dict, 3], ids=["TrainState", "dict", "3"])
def test_state_class_must_be_an_amp_state(bad):
    with pytest.raises(TypeError, match=r"(?s)state_class.*AmpState"):
        make("O2", state_class=bad)


@pytest.mark.parametrize(
    "typo, keyword",
    [
        ("loss_sale", "loss_scale"),
        ("lossscale", "loss_scale"),
        ("patch_torch_functions", "patch_functions"),
        ("keep_batchnorm_fp23", "keep_batchnorm_fp32"),
        ("keep_batch_norm_fp32", "keep_batchnorm_fp32"),
        ("master_weight", "master_weights"),
        ("opt_levels", "opt_level"),
        ("num_loss", "num_losses"),
        ("cast_model_output", "cast_model_outputs"),
        ("cast_model_types", "cast_model_type"),
        ("min_loss_scales", "min_loss_scale"),
        ("aply_fn", "apply_fn"),
    ],
)
def test_a_name_close_to_a_keyword_is_a_type_error(typo, keyword):
    with pytest.raises(TypeError, match=rf"(?s){typo}.*{keyword}"):
        make("O2", **{typo: 1})


@pytest.mark.parametrize(
    "name",
    ["batch_stats", "ema_params", "dropout_key", "rngs", "metrics", "cache", "epoch"]
    + ["carry", "num_batches", "loss_history", "best_loss", "target"],
)
def test_ordinary_field_names_are_accepted(name):
    assert getattr(make("O2", **{name: jnp.ones(2)}), name).shape == (2,)


@pytest.mark.parametrize(
    "name",
    ["opt_state", "loss_scales", "skipped_steps", "properties", "loss_scale_rules"],
)
def test_the_states_own_fields_cannot_be_passed(name):
    with pytest.raises((TypeError, ValueError), match=name):
        make("O2", **{name: 1})


@pytest.mark.parametrize("name", ["apply_gradients", "replace", "create"])
def test_a_field_must_not_hide_a_method(name):
    with pytest.raises((TypeError, ValueError), match=name):
        make("O2", **{name: jnp.ones(1)})


# Under transformations


@pytest.mark.parametrize("level", LEVELS)
def test_eval_shape_predicts_the_state(level):
    tx = optax.sgd(0.5, momentum=0.9)

    def build(tree):
        return make(level, tree, tx, num_losses=2, batch_stats=like(tree))

    real, abstract = build(params()), jax.eval_shape(build, params())
    assert jax.tree.structure(abstract) == jax.tree.structure(real)
    shapes = [(x.shape, x.dtype) for x in jax.tree.leaves(abstract)]
    assert shapes == [(x.shape, x.dtype) for x in jax.tree.leaves(real)]


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_an_ensemble_under_vmap_skips_lane_by_lane(level):
    tx, rule = optax.sgd(0.5), jamp.DynamicLossScale(init_scale=4.0)
    stacked = {"w": jnp.array([[1.0, 2.0], [3.0, 4.0]], jnp.float32)}
    grads = {"w": jnp.array([[1.0, 1.0], [jnp.inf, 1.0]], jnp.float32)}
    states = jax.vmap(lambda p: make(level, p, tx, loss_scale=rule))(stacked)
    states = jax.vmap(lambda s, g: s.apply_gradients(grads=g))(states, grads)
    np.testing.assert_array_equal(np.float32(states.params["w"]), [[0.5, 1.5], [3, 4]])
    assert states.skipped_steps.tolist() == [0, 1]
    assert states.loss_scale.tolist() == [4.0, 2.0]


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_initialize_under_jit_gives_the_same_state(level):
    tx = optax.sgd(0.5, momentum=0.9)
    build = jax.jit(lambda tree: make(level, tree, tx, batch_stats=like(tree)))
    assert_equal(build(params()), make(level, tx=tx, batch_stats=like(params())))


@pytest.mark.parametrize("wrap", [lambda v: v, lambda v: [v]], ids=["one", "group"])
def test_variables_with_statistics_are_refused_as_params(wrap):
    variables = {"params": params(), "batch_stats": {"bn": {"mean": jnp.zeros(2)}}}
    with pytest.raises(TypeError, match=r'(?s)batch_stats.*variables\["params"\]'):
        make("O3", wrap(variables), wrap(optax.sgd(0.1)))


def test_nested_params_match_their_statistics():
    tree = {"params": {"whitening": {"scale": jnp.ones(2, jnp.float32)}}}
    stats = {"whitening": {"mean": jnp.zeros(2), "var": jnp.ones(2)}}
    state = make("O2", tree, batch_stats=stats)
    assert state.params["params"]["whitening"]["scale"].dtype == jnp.float32


def test_a_floor_above_the_first_scale_raises_it():
    assert make("O2", min_loss_scale=2.0**18).loss_scale == 2.0**18
