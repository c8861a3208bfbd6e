"""Checkpoints that do not fit: an error names what, and nothing is changed."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.training.train_state import TrainState

import jamp
from jamp import optimizers as jo
from tests.bits import assert_same_bits

pytestmark = pytest.mark.standard_promotion  # for optax.adam on half trees

ADAM = optax.adam(1e-2)


def make(level="O2", tx=ADAM, tree=None, **kwargs):
    if tree is None:
        tree = {"dense": {"kernel": jnp.ones((3, 2)), "bias": jnp.full(2, 0.1)}}
    kwargs.setdefault("ema", jnp.zeros(2))
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def saved(level="O2", **kwargs):
    """Through msgpack: dicts that may be changed."""
    checkpoint = jamp.to_checkpoint(make(level, **kwargs))
    return serialization.msgpack_restore(serialization.msgpack_serialize(checkpoint))


def changed(path, value=None, **kwargs):
    """A checkpoint with another value at a path; None takes the entry out."""
    checkpoint = saved(**kwargs)
    *folders, last = path.split("/")
    entry = checkpoint
    for name in folders:
        entry = entry[name]
    if value is None:
        del entry[last]
    else:
        entry[last] = value
    return checkpoint


BIAS = "params/dense/bias"
MU = "opt_state/0/mu/dense/bias"
F16 = jnp.float16

# The checkpoint, the target's options, and words of the message; made when needed.
WRONG = {
    "no leaf": lambda: (changed(BIAS), {}, [f"{BIAS} is missing", "model"]),
    "a leaf too many": lambda: (
        changed("params/dense/gain", np.ones(2, np.float32)),
        {},
        ["params/dense/gain is unexpected", "model"],
    ),
    "a leaf for a folder": lambda: (
        changed("params/dense", np.ones(2, np.float32)),
        {},
        ["params/dense is unexpected", f"{BIAS} is missing"],
    ),
    "a shape of the params": lambda: (
        changed(BIAS, np.ones(3, np.float32)),
        {},
        [BIAS, r"\(3,\)", r"expected \(2,\)"],
    ),
    "a shape that would broadcast": lambda: (
        changed(BIAS, np.ones((), np.float32)),
        {},
        [BIAS, r"\(\)", r"expected \(2,\)"],
    ),
    "a shape of the moments": lambda: (
        changed(MU, np.ones((1, 2), np.float32)),
        {},
        [MU, r"\(1, 2\)", r"expected \(2,\)"],
    ),
    "half params": lambda: (
        changed(BIAS, np.ones(2, np.float16)),
        {},
        [BIAS, "float16", "expected float32", "cast to float32 first"],
    ),
    "params of 64 bits": lambda: (
        changed(BIAS, np.ones(2, np.float64)),
        {},
        [BIAS, "float64", "expected float32"],
    ),
    "integers for floats": lambda: (
        changed(BIAS, np.ones(2, np.int32)),
        {},
        [BIAS, "int32", "expected float32"],
    ),
    "half moments": lambda: (
        changed(MU, np.ones(2, np.float16)),
        {},
        [MU, "float16", "expected float32"],
    ),
    "a float for a count": lambda: (
        changed("opt_state/0/count", np.float32(1.0)),
        {},
        ["opt_state/0/count", "float32", "expected int32"],
    ),
    "no step": lambda: (changed("step"), {}, ["step is missing"]),
    "no skipped_steps": lambda: (
        changed("skipped_steps"),
        {},
        ["skipped_steps is missing"],
    ),
    "no part of a scale": lambda: (
        changed("loss_scaler0/hysteresis"),
        {},
        ["loss_scaler0/hysteresis is missing"],
    ),
    "no opt_state": lambda: (
        changed("opt_state"),
        {},
        ["opt_state/0/count is missing"],
    ),
    "no fields": lambda: (changed("fields"), {}, ["fields/ema is missing"]),
    "another optimizer": lambda: (
        saved(tx=optax.sgd(0.1, momentum=0.9)),
        {},
        ["opt_state/0/mu/dense/bias is missing", "opt_state/0/trace", "optimizer"],
    ),
    "a fused optimizer": lambda: (
        saved(tx=jo.fused_adam(1e-2)),
        {},
        ["opt_state/0/count is missing", "opt_state/count is unexpected"],
    ),
    "no optimizer": lambda: (
        saved(tx=None),
        {},
        ["opt_state/0/count is missing", "optimizer"],
    ),
    "fewer losses": lambda: (
        saved(),
        {"num_losses": 3},
        ["has 1 loss scale", "the state 3", "num_losses=1"],
    ),
    "more losses": lambda: (
        saved(num_losses=3),
        {},
        ["has 3 loss scale", "the state 1", "num_losses=3"],
    ),
    "no loss": lambda: (
        changed("loss_scaler0"),
        {},
        ["has 0 loss scale", "the state 1"],
    ),
    "a field less": lambda: (
        changed("fields/ema"),
        {},
        ["fields/ema is missing", "fields"],
    ),
    "a field more": lambda: (
        saved(rng=jnp.zeros(2, jnp.uint32)),
        {},
        ["fields/rng is unexpected", "fields"],
    ),
    "a field's shape": lambda: (
        saved(ema=jnp.zeros(3)),
        {},
        ["fields/ema", r"\(3,\)", r"expected \(2,\)"],
    ),
    "a key of another sort": lambda: (
        saved(rng=jax.random.key(1, impl="rbg")),
        {"rng": jax.random.key(1)},
        ["fields/rng", r"\(4,\)", r"expected \(2,\)"],
    ),
    "one group for two": lambda: (
        saved(),
        {"tree": {"a": jnp.ones(2), "b": jnp.ones(2)}, "tx": {"a": ADAM, "b": ADAM}},
        ["last_step_skipped/a is missing", "of the run that saved it"],
    ),
    "two groups for three": lambda: (
        saved(tree=[jnp.ones(2)] * 2, tx=[ADAM] * 2),
        {"tree": [jnp.ones(2)] * 3, "tx": [ADAM] * 3},
        ["params/2 is missing"],
    ),
    "a newer version": lambda: (
        changed("version", np.int32(2)),
        {},
        ["version 2", "1", "newer jamp"],
    ),
    "a newer version with everything else": lambda: (
        {"version": np.int32(3), "weights": {}},
        {},
        ["version 3", "newer jamp"],
    ),
    "the raw state as Flax names it": lambda: (
        serialization.to_state_dict(make()),
        {},
        ["flax.serialization.from_state_dict", "same opt level", "to_checkpoint"],
    ),
    "the params alone": lambda: (
        {"dense": {"kernel": np.ones((3, 2)), "bias": np.ones(2)}},
        {},
        ["'dense'", "jamp.to_checkpoint", "TrainState"],
    ),
    "nothing": lambda: ({}, {}, [r"\[\]", "jamp.to_checkpoint"]),
    "plain Flax at half precision": lambda: (
        TrainState.create(apply_fn=None, params={"w": jnp.ones(2, F16)}, tx=ADAM),
        {"tree": {"w": jnp.ones(2)}},
        ["params/w has dtype float16", "expected float32", "cast to float32 first"],
    ),
    "plain Flax with another optimizer": lambda: (
        {"step": 1, "params": saved()["params"], "opt_state": {"0": {}, "1": {}}},
        {},
        [f"{MU} is missing", "optimizer"],
    ),
    "plain Flax with a field more": lambda: (
        {"params": saved()["params"], "batch_stats": {"mean": np.ones(2)}},
        {},
        ["fields/batch_stats/mean is unexpected", "fields"],
    ),
    "plain Flax with a step that is none": lambda: (
        {"params": saved()["params"], "step": 1.5},
        {},
        ["step is 1.5"],
    ),
}


def on_host(tree):
    """Copies, which show what becomes of the arrays; a deleted one is an error."""

    def leaf(x):
        is_key = jnp.issubdtype(jnp.result_type(x), jax.dtypes.prng_key)
        return np.array(jax.random.key_data(x) if is_key else x)

    return jax.tree.map(leaf, tree)


@pytest.mark.message
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_named_and_nothing_changes(name):
    checkpoint, options, words = WRONG[name]()
    target = make(**options)
    before, held = on_host(target), on_host(checkpoint)
    with pytest.raises(ValueError) as error:
        jamp.from_checkpoint(target, checkpoint)
    for word in words:
        assert error.match(word)
    assert_same_bits(on_host(target), before)
    assert_same_bits(on_host(checkpoint), held)


@pytest.mark.message
def test_several_differences_are_told_at_once_but_not_all_of_many():
    checkpoint = changed(BIAS)
    del checkpoint["step"]
    with pytest.raises(ValueError, match=f"2 place.*{BIAS}.*step"):
        jamp.from_checkpoint(make(), checkpoint)
    other = {f"layer{k}": {"w": jnp.ones(2)} for k in range(100)}
    with pytest.raises(ValueError, match="layer0") as error:
        jamp.from_checkpoint(make(tree=other), saved())
    assert len(str(error.value)) < 1000


@pytest.mark.message
@pytest.mark.parametrize("level", ["O0", "O3", "O5"])
def test_the_error_is_the_same_at_every_level(level):
    with pytest.raises(ValueError, match=f"{BIAS} has shape"):
        jamp.from_checkpoint(make(level), changed(BIAS, np.ones(3, np.float32)))


def test_shapes_alone_are_checked_like_a_state():
    shapes = jax.eval_shape(make)
    with pytest.raises(ValueError):
        jamp.from_checkpoint(shapes, changed(BIAS, np.ones(3, np.float32)))


@pytest.mark.message
def test_the_arguments_the_wrong_way_round():
    state, checkpoint = make(), saved()
    with pytest.raises(TypeError, match="AmpState first.*got dict"):
        jamp.from_checkpoint(checkpoint, state)
    with pytest.raises(TypeError, match="to_checkpoint.*got ndarray"):
        jamp.from_checkpoint(state, np.ones(3))
    with pytest.raises(TypeError, match="to_checkpoint.*got list"):
        jamp.from_checkpoint(state, [checkpoint])
    with pytest.raises(TypeError, match="AmpState, got dict"):
        jamp.to_checkpoint(state.params)


# Flax's own functions, which look at no dtype


def through_bytes(target, state):
    return serialization.from_bytes(target, serialization.to_bytes(state))


def through_dict(target, state):
    return serialization.from_state_dict(target, serialization.to_state_dict(state))


OTHER_STATES = {
    "O2 into O5": lambda: (
        {"level": "O2"},
        {"level": "O5"},
        [r"\['bias'\]", "float16", "bfloat16"],
    ),
    "O5 into O2": lambda: (
        {"level": "O5"},
        {"level": "O2"},
        [r"\['bias'\]", "bfloat16", "float16"],
    ),
    "O0 into O3": lambda: ({"level": "O0"}, {"level": "O3"}, ["float32", "float16"]),
    "masters into remainders": lambda: (
        {"level": "O5"},
        {"level": "O5", "store_remainder": True},
        ["masters", "float32", "uint16"],
    ),
    "remainders into masters": lambda: (
        {"level": "O5", "store_remainder": True},
        {"level": "O5"},
        ["masters", "uint16", "float32"],
    ),
    "another shape": lambda: (
        {"tree": {"w": jnp.ones(3)}},
        {"tree": {"w": jnp.ones(2)}},
        [r"\['w'\]", r"\(3,\)", r"\(2,\)"],
    ),
    "a field's shape": lambda: (
        {"ema": jnp.ones(())},
        {"ema": jnp.ones(2)},
        ["ema", r"\(\)", r"\(2,\)"],
    ),
}


@pytest.mark.message
@pytest.mark.parametrize("trip", [through_bytes, through_dict])
@pytest.mark.parametrize("name", OTHER_STATES)
def test_flax_puts_no_leaf_where_another_dtype_or_shape_belongs(name, trip):
    given, wanted, words = OTHER_STATES[name]()
    target = make(**wanted)
    before = on_host(target)
    with pytest.raises(ValueError) as error:
        trip(target, make(**given))
    for word in (*words, "jamp.to_checkpoint", "same"):
        assert error.match(word)
    assert_same_bits(on_host(target), before)


@pytest.mark.message
@pytest.mark.parametrize("levels", [("O2", "O3"), ("O0", "O2"), ("O2", "O0")])
def test_flax_refuses_states_with_masters_for_states_without(levels):
    given, wanted = (make(level) for level in levels)
    with pytest.raises(ValueError, match="opt_state.*jamp.to_checkpoint"):
        through_bytes(wanted, given)


@pytest.mark.message
def test_flax_refuses_other_fields_and_other_numbers_of_losses():
    with pytest.raises(ValueError, match="fields.*'rng'"):
        through_bytes(make(), make(rng=jnp.zeros(2)))
    with pytest.raises(ValueError, match="loss_scales"):
        through_bytes(make(), make(num_losses=2))


class Mine(jamp.AmpState):
    ema: jax.Array


def test_flax_checks_declared_states_too():
    with pytest.raises(ValueError):
        through_bytes(make("O5", state_class=Mine), make("O2", state_class=Mine))
    state = make("O5", state_class=Mine)
    assert_same_bits(through_bytes(make("O5", state_class=Mine), state), state)
