"""Test that checkpoints of all states load, and that others raise errors."""

import functools
import operator
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training.train_state import TrainState

import jamp
from tests.optimizers.fused import OPTIMIZERS, first, fresh
from tests.support.bits import assert_same_bits, copy
from tests.support.states import State, like, make

pytestmark = pytest.mark.standard_promotion  # for optax.adam

TX = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 10))
HALF = {"w": jnp.asarray([1.5, 1 + 2.0**-8], jnp.float16), "n": jnp.full(2, 1.1)}


def trained(level="O2", **kwargs):
    """Returns a state after a step and a pending skip."""
    params = {"dense": {"kernel": jnp.asarray([[0.1, 1 + 2.0**-8, -0.3]])}}
    stats, bn = {"mean": jnp.ones(2)}, {"bn": {"scale": jnp.full(2, 1.1)}}
    params |= bn
    state = make(level, params, TX, stats=stats, **kwargs)
    for x in (0.5, np.inf):
        stats = {"mean": stats["mean"] + x}
        state = state.apply_gradients(grads=like(params, x), stats=stats)
    return state


def groups():
    trees = {key: {"w": jnp.full(2, x)} for key, x in (("g", 1.1), ("d", 2.2))}
    txs = dict.fromkeys(trees, TX)
    state = make("O2", trees, txs, num_losses=2)
    return state.apply_gradients(grads=like(trees, 1.0))


def gradients():
    state = make("O2", {"w": jnp.ones(2)}, TX)
    return jamp.scaled_grad(lambda p: jnp.float32(p["w"]).sum())(state)


def fused():
    """Returns a state of each fused optimizer after a step."""
    params = {"kernel": jnp.asarray([[0.1, 1 + 2.0**-8, -0.3]]), "gain": jnp.ones(())}
    return {name: first(fresh(name), params)[1] for name in OPTIMIZERS}


STATES = {
    "O2": trained,
    "remainders": lambda: trained("O5", store_remainder=True),
    "groups": groups,
    "LossScaleState": lambda: jamp.DynamicLossScale(init_scale=8.0).init(),
    "MasterWeightsState": lambda: jamp.master_weights(TX).init(HALF),
    "gradients": gradients,
    "fused": fused,
}


@functools.cache
def made(name):
    return STATES[name]()


@pytest.mark.parametrize("name", STATES)
def test_a_state_comes_back_through_flax(name):
    state = made(name)
    target = jax.tree.map(jnp.zeros_like, state)
    again = serialization.from_bytes(target, serialization.to_bytes(state))
    assert type(again) is type(state)
    assert_same_bits(again, state)


def test_all_states_come_back_through_orbax_and_typed_keys_too(tmp_path):
    def with_keys(seed):
        keys = jax.random.key(seed), jax.random.key(seed, impl="rbg")
        return make("O2", {"n": HALF["n"]}, TX, key=keys)

    states = {name: made(name) for name in STATES}
    target = jax.tree.map(jnp.zeros_like, states) | {"keys": with_keys(6)}
    states |= {"keys": with_keys(5)}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "states", states)
        checkpointer.wait_until_finished()
        for like in (target, jax.eval_shape(lambda: target)):
            assert_same_bits(checkpointer.restore(tmp_path / "states", like), states)


def test_a_donated_state_takes_its_checkpoint_with_it():
    state = trained()
    checkpoint = jamp.to_checkpoint(state)
    copied = jax.tree.map(jnp.copy, checkpoint)
    jax.jit(lambda state: state, donate_argnums=0)(state)
    assert checkpoint["params"]["dense"]["kernel"].is_deleted()
    restored = jamp.from_checkpoint(trained(), copied)
    assert_same_bits(jamp.to_checkpoint(restored)["params"], copied["params"])


def test_the_state_dict_holds_masters_scale_and_counters_by_name():
    # apex_semantics 6.8: apex's checkpoints have no masters.
    state = made("O2")
    d = serialization.to_state_dict(state)
    names = "step params opt_state loss_scales skipped_steps last_step_skipped stats"
    assert {name for name, x in d.items() if x is not None} == set(names.split())
    scale = {"scale": 2.0**15, "unskipped": 0, "hysteresis": 0, "consecutive_skips": 1}
    assert d["loss_scales"]["0"] == scale
    assert (d["step"], d["skipped_steps"], d["last_step_skipped"]) == (1, 1, True)
    kernel = d["opt_state"]["masters"]["dense"]["kernel"]
    assert kernel.dtype == jnp.float32
    assert not np.array_equal(kernel, np.float32(state.params["dense"]["kernel"]))


ADAM = optax.adam(1e-2)


def whole(level="O2", tx=ADAM, tree=None, **kwargs):
    if tree is None:
        tree = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.full(2, 0.1)}}
    kwargs = {"ema": jnp.zeros(2)} | kwargs
    return jamp.initialize(tree, tx, level, verbosity=0, state_class=State, **kwargs)


def saved(level="O2", **kwargs):
    """Returns a checkpoint as mutable dicts, through msgpack."""
    checkpoint = jamp.to_checkpoint(whole(level, **kwargs))
    return serialization.msgpack_restore(serialization.msgpack_serialize(checkpoint))


def changed(path, value=None):
    """Returns a checkpoint with another value at a path; None drops the entry."""
    checkpoint = saved()
    *folders, last = path.split("/")
    entry = functools.reduce(operator.getitem, folders, checkpoint)
    entry[last] = value
    if value is None:
        del entry[last]
    return checkpoint


BIAS, MU = "params/dense/bias", "opt_state/0/mu/dense/bias"
F16, F32 = np.float16, np.float32
TWO = np.ones(2, F32)
IN_HALF = TrainState.create(apply_fn=None, params={"w": jnp.ones(2, F16)}, tx=ADAM)
IN_BF16 = {"w": jnp.ones(2, jnp.bfloat16)}
LIKE = {"tree": {"w": jnp.ones(2)}}
PURE = r"bfloat16, expected float32.*params and moments are half.*jax\.tree\.map\(la"
RBG, KEY = jax.random.key(1, impl="rbg"), jax.random.key(1)
MODELS = {"tree": [jnp.ones(2)] * 2, "tx": [ADAM] * 2}
CAST = "float16, expected float32.*cast them first"
RAW = "flax.serialization.from_state_dict.*same opt level.*to_checkpoint"
TAKES = "result of jamp.to_checkpoint, or .*TrainState; got .*keys"
# A pattern for the message, a function that makes the checkpoint, and target options.
WRONG = [
    (f"{BIAS} is missing.*model", lambda: changed(BIAS), {}),
    (rf"{BIAS}.*\(3,\).*\(2,\)", lambda: changed(BIAS, np.ones(3, F32)), {}),
    (f"{BIAS}.*{CAST}", lambda: changed(BIAS, np.ones(2, F16)), {}),
    ("fields/ema is missing", lambda: changed("fields"), {}),
    ("fields/rng is unexp.* fields", lambda: saved(rng=jnp.zeros(2)), {}),
    (r"fields/rng.*\(4,\).*\(2,\)", lambda: saved(rng=RBG), {"rng": KEY}),
    (f"{MU} is missing.*opt_state/0/trace", lambda: saved(tx=optax.sgd(0.1, 0.9)), {}),
    ("opt_state/0/count is missing.*optimizer", lambda: saved(tx=None), {}),
    ("has 1 loss.* state 3.*num_losses=1", lambda: saved(), {"num_losses": 3}),
    ("last_step_skipped/0 is missing.*run that saved it", lambda: saved(), MODELS),
    ("version 2,.* 1 .*newer jamp", lambda: changed("version", np.int32(2)), {}),
    *[
        (f"version is {bad!r}", lambda bad=bad: saved() | {"version": bad}, {})
        for bad in (None, np.nan, np.inf, 0, 1.5, "1", -3)
    ],
    (RAW, lambda: serialization.to_state_dict(whole()), {}),
    (f"{TAKES}.*'dense'", lambda: {"dense": {"bias": TWO}}, {}),
    (f"params/w.*{CAST}", lambda: IN_HALF, {"tree": {"w": jnp.ones(2)}}),
    ("step is 1.5", lambda: {"params": saved()["params"], "step": 1.5}, {}),
    ("opt_level is .*99.* 0 to 6", lambda: changed("opt_level", np.int32(99)), {}),
    (PURE, lambda: TrainState.create(apply_fn=None, params=IN_BF16, tx=ADAM), LIKE),
]


@pytest.mark.parametrize("words, checkpoint, options", WRONG)
def test_a_misfit_is_named_and_nothing_changes(words, checkpoint, options):
    checkpoint, target = checkpoint(), whole(**options)
    before, held = copy(target), jax.tree.map(np.array, checkpoint)
    with pytest.raises(ValueError, match=words):
        jamp.from_checkpoint(target, checkpoint)
    assert_same_bits(copy(target), before)
    assert_same_bits(jax.tree.map(np.array, checkpoint), held)


def test_an_error_lists_several_differences_but_not_a_hundred():
    checkpoint = changed(BIAS)
    del checkpoint["step"]
    with pytest.raises(ValueError, match=f"2 place.*{BIAS}.*step"):
        jamp.from_checkpoint(jax.eval_shape(whole), checkpoint)
    other = {f"layer{k}": {"w": jnp.ones(2)} for k in range(100)}
    with pytest.raises(ValueError, match="layer0") as error:
        jamp.from_checkpoint(whole(tree=other), saved())
    assert len(str(error.value)) < 1000


class Versioned(TrainState):
    version: jax.Array


def test_a_flax_state_may_have_a_field_version():
    kwargs = {"params": {"w": jnp.full(2, 0.1)}, "tx": ADAM, "version": jnp.int32(7)}
    plain = Versioned.create(apply_fn=None, **kwargs)
    target = whole(tree={"w": jnp.ones(2)}, version=jnp.int32(0), ema=plain.params["w"])
    for form in (plain, serialization.to_state_dict(plain)):
        found = jamp.from_checkpoint(target, form)
        assert found.version == 7
        assert_same_bits(jamp.master_params(found), plain.params)


def test_a_pure_bfloat16_run_loads_as_the_error_says():
    plain = TrainState.create(apply_fn=None, params=IN_BF16, tx=ADAM)
    for form in (plain, serialization.to_state_dict(plain)):
        with pytest.raises(ValueError) as error:
            jamp.from_checkpoint(whole(**LIKE), form)
        (shown,) = re.findall("`(jax.tree.map.*)`", str(error.value))
        cast = eval(shown, {"jax": jax, "checkpoint": form})
        found = jamp.from_checkpoint(whole(**LIKE), cast)
        assert_same_bits(found.params["w"], jnp.ones(2, F16))


REPLICATED = {
    "replicated": lambda: jax.tree.map(lambda x: jnp.stack([x, x]), whole()),
    "an ensemble": lambda: jax.vmap(lambda w: whole(tree=w))(jnp.ones((2, 3))),
}


@pytest.mark.parametrize("kind", REPLICATED)
def test_a_replicated_state_and_an_ensemble_are_refused(kind):
    state = REPLICATED[kind]()
    for call in (
        jamp.to_checkpoint,
        lambda state: jamp.from_checkpoint(state, saved()),
        lambda state: state.load_params(state.params, reset_optimizer=True),
        lambda state: jamp.incremental_update(state, state, 0.5),
        lambda state: jamp.incremental_update(state, jamp.master_params(state), 0.5),
        jamp.state_dict,
        lambda state: jamp.load_state_dict(state, {}),
    ):
        with pytest.raises(ValueError, match=r"shape \(2,\).*unreplicate.*x\[i\]"):
            call(state)
    average = jax.vmap(lambda s: jamp.incremental_update(s, s, 0.5))(state)
    assert_same_bits(average.params, state.params)


def test_arguments_in_the_wrong_order_are_refused():
    state, checkpoint = whole(), saved()
    for call, args, words in (
        (jamp.from_checkpoint, (checkpoint, state), "AmpState .*got dict"),
        (jamp.from_checkpoint, (state, TWO), "to_checkpoint.*got ndarray"),
        (jamp.from_checkpoint, (state, [checkpoint]), "to_checkpoint.*got list"),
        (jamp.to_checkpoint, (state.params,), "AmpState .*got dict"),
    ):
        with pytest.raises(TypeError, match=words):
            call(*args)


O5, REMAINDER = {"level": "O5"}, {"level": "O5", "store_remainder": True}
# Options of the state, options of the target, and a pattern for the message.
OTHER_STATES = [
    ({}, O5, r"bias.*dtype float16.*bfloat16"),
    (REMAINDER, O5, "masters.*uint16.*float32"),
    ({"tree": {"w": jnp.ones(3)}}, {"tree": {"w": TWO}}, r"w .*\(3,\).*\(2,\)"),
    ({"rng": TWO}, {}, "rng is unexpected"),
    ({"num_losses": 2}, {}, "loss_scales"),
]


@pytest.mark.parametrize("given, wanted, words", OTHER_STATES)
def test_flax_puts_no_leaf_where_another_dtype_or_shape_belongs(given, wanted, words):
    state, target = whole(**given), whole(**wanted)
    before = copy(target)
    with pytest.raises(ValueError, match=f"{words}.*same.*jamp.to_checkpoint"):
        serialization.from_bytes(target, serialization.to_bytes(state))
    assert_same_bits(copy(target), before)
