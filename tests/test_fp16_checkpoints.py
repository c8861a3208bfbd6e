"""fp16_utils.FP16_Optimizer: state_dict, Flax and Orbax bring every bit back."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

from jamp.optimizers import fused_adam
from tests.bits import assert_same_bits
from tests.fp16 import F32, data, dot, like, make, params, run, step_of

KEYS = {
    "loss_scaler",
    "dynamic_loss_scale",
    "overflow",
    "first_closure_call_this_step",
    "optimizer_state_dict",
    "fp32_from_fp16",
    "fp32_from_fp32",
}
XS = data(10, (2, 6))
OPTIMIZER = make(fused_adam(1e-2), window=3)
STEP = jax.jit(step_of(OPTIMIZER))
BACKWARD = jax.jit(lambda state, x: OPTIMIZER.backward(state, dot, x)[1])


@pytest.fixture(scope="module")
def trained():
    """After five steps, the third of them skipped."""
    return run(STEP, OPTIMIZER.init(params()), XS[:5], "eager")[0]


@pytest.fixture(scope="module")
def overflowed(trained):
    """Between an overflowing backward and the step that it will skip."""
    return BACKWARD(trained, like(np.inf))


def test_a_donated_state_takes_no_array_along():
    tree, clear = params(), jax.jit(OPTIMIZER.zero_grad, donate_argnums=0)
    state = clear(OPTIMIZER.init(tree))
    assert_same_bits(tree, params())
    saved = OPTIMIZER.state_dict(state)
    before = jax.tree.map(np.array, saved)
    target = other()
    clear(OPTIMIZER.load_state_dict(target, saved))
    assert_same_bits(saved, before)
    assert_same_bits(target, other())


def other():
    """A state with no bit of the trained one's."""
    tree = jax.tree.map(lambda p: -p * 2, params())
    return OPTIMIZER.init(tree)


def test_state_dict_has_apex_keys_and_the_masters(trained):
    saved = OPTIMIZER.state_dict(trained)
    assert saved.keys() == KEYS
    masters = OPTIMIZER.master_params(trained)
    halves = {x.tobytes() for x in map(np.asarray, jax.tree.leaves(masters["dense"]))}
    from_half = jax.tree.leaves(saved["fp32_from_fp16"])
    assert {np.asarray(x).tobytes() for x in from_half} == halves
    assert {x.dtype for x in from_half} == {jnp.dtype(F32)}
    (own,) = jax.tree.leaves(saved["fp32_from_fp32"])
    assert own == trained.params["norm"]
    assert saved["dynamic_loss_scale"]
    assert not make(dynamic=False).state_dict(trained)["dynamic_loss_scale"]


def test_state_dict_round_trips_and_refreshes_the_half_params(trained):
    saved = OPTIMIZER.state_dict(trained)
    loaded = OPTIMIZER.load_state_dict(other(), saved)
    assert_same_bits(OPTIMIZER.state_dict(loaded), saved)
    assert_same_bits(loaded.params, trained.params)
    assert_same_bits(loaded.opt_state, trained.opt_state)


def test_a_pending_overflow_is_saved(overflowed):
    loaded = OPTIMIZER.load_state_dict(other(), OPTIMIZER.state_dict(overflowed))
    assert loaded.overflow
    assert_same_bits(loaded.loss_scaler, overflowed.loss_scaler)
    stepped = OPTIMIZER.step(loaded)
    assert_same_bits(stepped.params, overflowed.params)
    assert_same_bits(stepped.opt_state, overflowed.opt_state)


def through_state_dict(state):
    return OPTIMIZER.load_state_dict(other(), OPTIMIZER.state_dict(state))


def through_flax(state):
    return serialization.from_bytes(other(), serialization.to_bytes(state))


def through_dict_of_flax(state):
    """The state_dict itself, as msgpack."""
    target = OPTIMIZER.state_dict(other())
    written = serialization.to_bytes(OPTIMIZER.state_dict(state))
    return OPTIMIZER.load_state_dict(other(), serialization.from_bytes(target, written))


@pytest.mark.parametrize(
    "through", [through_state_dict, through_flax, through_dict_of_flax]
)
def test_a_resumed_run_is_the_uninterrupted_one(trained, through):
    resumed, seen = run(STEP, through(trained), XS[5:], "eager")
    whole, expected = run(STEP, OPTIMIZER.init(params()), XS, "eager")
    assert_same_bits(resumed, whole)
    assert_same_bits(seen, expected[5:])


@pytest.mark.parametrize("which", ["trained", "overflowed"])
def test_flax_brings_the_whole_state_back(which, request):
    state = request.getfixturevalue(which)
    restored = serialization.from_bytes(other(), serialization.to_bytes(state))
    assert_same_bits(jax.tree.map(jnp.asarray, restored), state)


def test_flax_brings_none_back(trained):
    state = OPTIMIZER.zero_grad(trained, set_grads_to_None=True)
    target = OPTIMIZER.zero_grad(other(), set_grads_to_None=True)
    restored = serialization.from_bytes(target, serialization.to_bytes(state))
    assert restored.model_grads is None
    assert_same_bits(jax.tree.map(jnp.asarray, restored), state)


def test_orbax_brings_the_whole_state_back(overflowed, tmp_path):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", overflowed)
        checkpointer.wait_until_finished()
        target = jax.tree.map(ocp.utils.to_shape_dtype_struct, other())
        restored = checkpointer.restore(tmp_path / "state", target)
    assert_same_bits(restored, overflowed)


def missing_key(saved):
    del saved["loss_scaler"]


def surplus_key(saved):
    saved["extra"] = 1


def drop_leaf(saved):
    _first_array(saved["fp32_from_fp16"])[0].clear()


def wrong_shape(saved):
    container, key = _first_array(saved["fp32_from_fp16"])
    container[key] = jnp.zeros((7, 7), F32)


def wrong_dtype(saved):
    container, key = _first_array(saved["fp32_from_fp16"])
    container[key] = container[key].astype(jnp.float16)


def _first_array(tree):
    """The innermost container that holds an array, and where in it."""
    keys = list(tree) if isinstance(tree, dict) else range(len(tree))
    for key in keys:
        if hasattr(tree[key], "dtype"):
            return tree, key
        if isinstance(tree[key], dict | list) and tree[key]:
            return _first_array(tree[key])
    raise AssertionError("no array")


@pytest.mark.parametrize(
    "spoil", [missing_key, surplus_key, drop_leaf, wrong_shape, wrong_dtype]
)
def test_what_does_not_fit_is_refused(trained, spoil):
    saved = copy.deepcopy(OPTIMIZER.state_dict(trained))
    spoil(saved)
    state = other()
    before = jax.tree.map(np.array, state)
    with pytest.raises(ValueError):
        OPTIMIZER.load_state_dict(state, saved)
    assert_same_bits(state, before)


def test_another_optimizers_state_is_refused(trained):
    saved = make(optax.sgd(0.5, momentum=0.5))
    saved = saved.state_dict(saved.init(params()))
    with pytest.raises(ValueError):
        OPTIMIZER.load_state_dict(trained, saved)


def test_other_params_are_refused(trained):
    saved = OPTIMIZER.state_dict(trained)
    renamed = params()
    renamed["dense"]["weight"] = renamed["dense"].pop("kernel")
    with pytest.raises(ValueError, match="weight|kernel"):
        OPTIMIZER.load_state_dict(OPTIMIZER.init(renamed), saved)
