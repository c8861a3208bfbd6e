"""Both FP16_Optimizers: a state_dict brings every bit back."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import serialization
from flax.traverse_util import flatten_dict, unflatten_dict

from jamp.optimizers import fused_adam
from tests.bits import assert_same_bits, copy
from tests.fp16 import cut_down, data, dot, group, like, make, params, run, step_of

OPTIMIZER = make(fused_adam(1e-2), window=3)
OF_BOTH = "dynamic_loss_scale optimizer_state_dict "
OF_CUT_DOWN = OF_BOTH + "cur_scale cur_iter fp32_groups_flat "
OF_DYNAMIC = "last_overflow_iter scale_factor scale_window"
OF_FP16_UTILS = "loss_scaler overflow first_closure_call_this_step fp32_from_fp16 "
# The optimizer, its params, and apex's keys.
BOTH = {
    "fp16_utils": (OPTIMIZER, params(), OF_BOTH + OF_FP16_UTILS + "fp32_from_fp32"),
    "cut_down": (cut_down(), group(), OF_CUT_DOWN + OF_DYNAMIC),
    "static": (cut_down(dynamic_loss_scale=False), group(), OF_CUT_DOWN),
}
EITHER = pytest.mark.parametrize("kind", BOTH)


@functools.cache
def uninterrupted(kind):
    """After five steps of ten, and the last; and how to get from there to here."""
    optimizer, tree, _ = BOTH[kind]
    step, xs = jax.jit(step_of(optimizer)), data(10, (2, 6), tree=tree)
    start = optimizer.zero_grad(optimizer.init(tree))
    half_way, _ = run(step, start, xs[:5], "eager")
    resume = lambda state: run(step, state, xs[5:], "eager")[0]  # noqa: E731
    return half_way, resume(half_way), resume


def other(kind="fp16_utils"):
    """A state with no bit of the trained one's."""
    optimizer, tree, _ = BOTH[kind]
    return optimizer.zero_grad(optimizer.init(jax.tree.map(lambda p: -p * 2, tree)))


@functools.cache
def overflowed():
    """Between an overflowing backward and the step that it will skip."""
    backward = jax.jit(lambda state, x: OPTIMIZER.backward(state, dot, x)[1])
    return backward(uninterrupted("fp16_utils")[0], like(np.inf))


@EITHER
def test_state_dict_has_apex_keys_and_a_donated_state_takes_no_array_along(kind):
    optimizer, tree, keys = BOTH[kind]
    before = jax.tree.map(np.array, tree)
    clear = jax.jit(optimizer.zero_grad, donate_argnums=0)
    saved = optimizer.state_dict(clear(clear(optimizer.init(tree))))
    assert saved.keys() == set(keys.split())
    assert saved["dynamic_loss_scale"] == (kind != "static")
    held, target = jax.tree.map(np.array, saved), other(kind)
    clear(optimizer.load_state_dict(target, saved))
    assert_same_bits((tree, saved, target), (before, held, other(kind)))


def test_state_dict_round_trips_and_refreshes_the_half_params():
    state, start = overflowed(), other()
    saved, masters = OPTIMIZER.state_dict(state), OPTIMIZER.master_params(state)
    assert_same_bits(saved["fp32_from_fp16"]["dense"], masters["dense"])
    assert_same_bits(saved["fp32_from_fp32"]["norm"], state.params["norm"])
    written = serialization.msgpack_serialize(saved)
    loaded = OPTIMIZER.load_state_dict(start, serialization.msgpack_restore(written))
    assert loaded.overflow
    gradients = {name: getattr(start, name) for name in ("model_grads", "master_grads")}
    assert_same_bits(loaded, state.replace(**gradients))
    stepped = jax.jit(OPTIMIZER.step)(loaded)
    assert_same_bits(stepped.params, state.params)
    assert_same_bits(stepped.opt_state, state.opt_state)


@EITHER
def test_a_resumed_run_is_the_uninterrupted_one(kind):
    (half_way, last, resume), (optimizer, *_) = uninterrupted(kind), BOTH[kind]
    loaded = optimizer.load_state_dict(other(kind), optimizer.state_dict(half_way))
    assert_same_bits(loaded.params, half_way.params)
    assert_same_bits(resume(loaded), last)


BIAS = "fp32_from_fp16/dense/bias"


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("loss_scaler/scale", None, "is missing"),
        ("loss_scaler/unskipped", np.int32(-1), "must be a count"),
        (BIAS, np.zeros(7, np.float32), "has shape"),
        ("fp32_from_fp16/dense/weight", np.zeros(2), "is unexpected"),
    ],
)
def test_what_does_not_fit_is_refused(name, value, words):
    saved = flatten_dict(OPTIMIZER.state_dict(other()), sep="/")
    saved |= {name: value}
    if value is None:
        del saved[name]
    state = other()
    before = copy(state)
    with pytest.raises(ValueError, match=f"{name} {words}"):
        OPTIMIZER.load_state_dict(state, unflatten_dict(saved, sep="/"))
    assert_same_bits(state, before)


def test_what_another_optimizer_saved_is_refused():
    static = make(fused_adam(1e-2), dynamic=False)
    sgd = make(optax.sgd(0.5, momentum=0.5))
    for optimizer, words in ((sgd, "mu/.* is missing"), (static, "dynamic_loss_scale")):
        saved = optimizer.state_dict(optimizer.init(params()))
        with pytest.raises(ValueError, match=words):
            OPTIMIZER.load_state_dict(other(), saved)
