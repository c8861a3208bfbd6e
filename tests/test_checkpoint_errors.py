"""Checkpoints that do not fit: an error names what, and nothing is changed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

import jamp
from tests.bits import assert_same_bits, copy

pytestmark = [
    pytest.mark.message,
    pytest.mark.standard_promotion,  # for optax.adam on half trees
]

ADAM = optax.adam(1e-2)


def make(level="O2", tx=ADAM, tree=None, **kwargs):
    if tree is None:
        tree = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.full(2, 0.1)}}
    kwargs = {"ema": jnp.zeros(2)} | kwargs
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def saved(level="O2", **kwargs):
    """Through msgpack: dicts that may be changed."""
    checkpoint = jamp.to_checkpoint(make(level, **kwargs))
    return serialization.msgpack_restore(serialization.msgpack_serialize(checkpoint))


def changed(path, value=None):
    """A checkpoint with another value at a path; None takes the entry out."""
    checkpoint = saved()
    *folders, last = path.split("/")
    entry = checkpoint
    for name in folders:
        entry = entry[name]
    entry[last] = value
    if value is None:
        del entry[last]
    return checkpoint


def several(number):
    return {"tree": [jnp.ones(2)] * number, "tx": [ADAM] * number}


def plain(**changes):
    """Of plain Flax."""
    return {"params": saved()["params"]} | changes


BIAS, MU = "params/dense/bias", "opt_state/0/mu/dense/bias"
F16, F32, F64 = np.float16, np.float32, np.float64
TWO = np.ones(2, F32)
HALF = TrainState.create(apply_fn=None, params={"w": jnp.ones(2, F16)}, tx=ADAM)
RBG, KEY = jax.random.key(1, impl="rbg"), jax.random.key(1)
NOTHING = {"tx": None}
CAST = "float16, expected float32.*cast to float32 first"
RAW = "flax.serialization.from_state_dict.*same opt level.*to_checkpoint"
TAKES = "jamp.to_checkpoint gave, or .*TrainState; got .*keys"
# Words of the message, in their order; the checkpoint, made when needed; the target.
WRONG = [
    (f"{BIAS} is missing.*model", lambda: changed(BIAS), {}),
    ("params/dense/gain is unexp", lambda: changed("params/dense/gain", TWO), {}),
    (rf"{BIAS}.*\(3,\).*\(2,\)", lambda: changed(BIAS, np.ones(3, F32)), {}),
    (rf"{MU}.*\(1, 2\).*\(2,\)", lambda: changed(MU, np.ones((1, 2), F32)), {}),
    (f"{BIAS}.*{CAST}", lambda: changed(BIAS, np.ones(2, F16)), {}),
    (f"{BIAS}.*float64, exp.*float32", lambda: changed(BIAS, np.ones(2, F64)), {}),
    ("/count.*float32, exp.*int32", lambda: changed("opt_state/0/count", F32(1)), {}),
    (": step is missing", lambda: changed("step"), {}),
    ("hysteresis is missing", lambda: changed("loss_scaler0/hysteresis"), {}),
    ("opt_state/0/count is missing", lambda: changed("opt_state"), {}),
    ("fields/ema is missing", lambda: changed("fields"), {}),
    ("fields/rng is unexp.* fields", lambda: saved(rng=jnp.zeros(2)), {}),
    (r"fields/rng.*\(4,\).*\(2,\)", lambda: saved(rng=RBG), {"rng": KEY}),
    (f"{MU} is missing.*opt_state/0/trace", lambda: saved(tx=optax.sgd(0.1, 0.9)), {}),
    ("opt_state/0/count is missing.*optimizer", lambda: saved(**NOTHING), {}),
    ("has 1 loss.* state 3.*num_losses=1", lambda: saved(), {"num_losses": 3}),
    ("loss_scaler0/loss_scale is miss", lambda: changed("loss_scaler0"), {}),
    ("last_step_skipped/0 is missing.*run that saved it", lambda: saved(), several(2)),
    ("version 2,.* 1 .*newer jamp", lambda: changed("version", np.int32(2)), {}),
    ("version 3,.*newer jamp", lambda: {"version": np.int32(3), "weights": {}}, {}),
    (RAW, lambda: serialization.to_state_dict(make()), {}),
    (f"{TAKES}.*'dense'", lambda: {"dense": {"bias": TWO}}, {}),
    (rf"{TAKES}.*\[\]", lambda: {}, {}),
    (f"params/w.*{CAST}", lambda: HALF, {"tree": {"w": jnp.ones(2)}}),
    (f"{MU} is missing.*optimizer", lambda: plain(opt_state={"0": {}, "1": {}}), {}),
    ("fields/stats/mean is unexp", lambda: plain(stats={"mean": TWO}), {}),
    ("step is 1.5", lambda: plain(step=1.5), {}),
]


@pytest.mark.parametrize("words, checkpoint, options", WRONG)
def test_what_does_not_fit_is_named_and_nothing_changes(words, checkpoint, options):
    checkpoint, target = checkpoint(), make(**options)
    before, held = copy(target), jax.tree.map(np.array, checkpoint)
    with pytest.raises(ValueError, match=words):
        jamp.from_checkpoint(target, checkpoint)
    assert_same_bits(copy(target), before)
    assert_same_bits(jax.tree.map(np.array, checkpoint), held)


def test_several_differences_are_told_at_once_but_not_all_of_many():
    checkpoint = changed(BIAS)
    del checkpoint["step"]
    for target in (make(), make("O0"), make("O3"), make("O5"), jax.eval_shape(make)):
        with pytest.raises(ValueError, match=f"2 place.*{BIAS}.*step"):
            jamp.from_checkpoint(target, checkpoint)
    other = {f"layer{k}": {"w": jnp.ones(2)} for k in range(100)}
    with pytest.raises(ValueError, match="layer0") as error:
        jamp.from_checkpoint(make(tree=other), saved())
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize(
    "call, words",
    [
        (lambda s, c: jamp.from_checkpoint(c, s), "AmpState first.*got dict"),
        (lambda s, c: jamp.from_checkpoint(s, TWO), "to_checkpoint.*got ndarray"),
        (lambda s, c: jamp.from_checkpoint(s, [c]), "to_checkpoint.*got list"),
        (lambda s, c: jamp.to_checkpoint(s.params), "AmpState, got dict"),
    ],
)
def test_the_arguments_the_wrong_way_round(call, words):
    with pytest.raises(TypeError, match=words):
        call(make(), saved())


# Flax's own functions, which look at no dtype


O5, REMAINDER = {"level": "O5"}, {"level": "O5", "store_remainder": True}
# Options of the state, those of the target, and words of the message.
OTHER_STATES = [
    ({}, O5, r"bias.*dtype float16.*bfloat16"),
    (O5, {}, r"bias.*dtype bfloat16.* float16"),
    (O5, REMAINDER, "masters.*float32.*uint16"),
    (REMAINDER, O5, "masters.*uint16.*float32"),
    ({"tree": {"w": jnp.ones(3)}}, {"tree": {"w": TWO}}, r"w .*\(3,\).*\(2,\)"),
    ({"level": "O0"}, {}, "opt_state"),
    ({}, {"level": "O0"}, "opt_state"),
    ({"rng": TWO}, {}, "rng is unexpected"),
    ({"num_losses": 2}, {}, "loss_scales"),
]


@pytest.mark.parametrize("given, wanted, words", OTHER_STATES)
def test_flax_puts_no_leaf_where_another_dtype_or_shape_belongs(given, wanted, words):
    state, target = make(**given), make(**wanted)
    before = copy(target)
    with pytest.raises(ValueError, match=f"{words}.*same.*jamp.to_checkpoint"):
        serialization.from_bytes(target, serialization.to_bytes(state))
    assert_same_bits(copy(target), before)
