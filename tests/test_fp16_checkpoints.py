"""Both FP16_Optimizers: state_dict, Flax and Orbax bring every bit back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization

from jamp.optimizers import fused_adam
from tests.bits import assert_same_bits
from tests.fp16 import (
    cut_down,
    data,
    dot,
    group,
    host,
    like,
    make,
    params,
    run,
    step_of,
)

OPTIMIZER = make(fused_adam(1e-2), window=3)
OF_CUT_DOWN = (
    "dynamic_loss_scale cur_scale cur_iter optimizer_state_dict fp32_groups_flat"
)
# The optimizer, its params, and apex's keys.
BOTH = {
    "fp16_utils": (
        OPTIMIZER,
        params(),
        "loss_scaler dynamic_loss_scale overflow first_closure_call_this_step "
        "optimizer_state_dict fp32_from_fp16 fp32_from_fp32",
    ),
    "cut_down": (
        cut_down(),
        group(),
        f"{OF_CUT_DOWN} last_overflow_iter scale_factor scale_window",
    ),
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


def overflowed():
    """Between an overflowing backward and the step that it will skip."""
    return OPTIMIZER.backward(uninterrupted("fp16_utils")[0], dot, like(np.inf))[1]


@EITHER
def test_a_donated_state_takes_no_array_along(kind):
    optimizer, tree, _ = BOTH[kind]
    before = jax.tree.map(np.array, tree)
    clear = jax.jit(optimizer.zero_grad, donate_argnums=0)
    state = clear(clear(optimizer.init(tree)))
    saved = optimizer.state_dict(state)
    held, target = jax.tree.map(np.array, saved), other(kind)
    clear(optimizer.load_state_dict(target, saved))
    assert_same_bits((tree, saved, target), (before, held, other(kind)))


@EITHER
def test_state_dict_has_apex_keys(kind):
    optimizer, _, keys = BOTH[kind]
    saved = optimizer.state_dict(other(kind))
    assert saved.keys() == set(keys.split())
    assert saved["dynamic_loss_scale"] == (kind != "static")


def test_state_dict_round_trips_and_refreshes_the_half_params():
    """Of a pending overflow, too."""
    state, start = overflowed(), other()
    saved, masters = OPTIMIZER.state_dict(state), OPTIMIZER.master_params(state)
    assert_same_bits(host(saved["fp32_from_fp16"]), host(masters["dense"]))
    assert_same_bits(host(saved["fp32_from_fp32"]), host(state.params["norm"]))
    loaded = OPTIMIZER.load_state_dict(start, saved)
    assert loaded.overflow
    gradients = {name: getattr(start, name) for name in ("model_grads", "master_grads")}
    assert_same_bits(loaded, state.replace(**gradients))
    stepped = OPTIMIZER.step(loaded)
    assert_same_bits(stepped.params, state.params)
    assert_same_bits(stepped.opt_state, state.opt_state)


def through_state_dict(optimizer, target, state, _):
    return optimizer.load_state_dict(target, optimizer.state_dict(state))


def through_dict_of_flax(optimizer, target, state, _):
    """The state_dict itself, as msgpack."""
    written = serialization.to_bytes(optimizer.state_dict(state))
    saved = serialization.from_bytes(optimizer.state_dict(target), written)
    return optimizer.load_state_dict(target, saved)


def through_flax(optimizer, target, state, _):
    return serialization.from_bytes(target, serialization.to_bytes(state))


def through_orbax(optimizer, target, state, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
        return checkpointer.restore(folder / "state", shapes)


@pytest.mark.parametrize(
    "kind, through",
    [
        *((kind, through_state_dict) for kind in BOTH),
        ("fp16_utils", through_dict_of_flax),
        ("cut_down", through_flax),
        ("cut_down", through_orbax),
    ],
)
def test_a_resumed_run_is_the_uninterrupted_one(kind, through, tmp_path):
    half_way, last, resume = uninterrupted(kind)
    loaded = through(BOTH[kind][0], other(kind), half_way, tmp_path)
    assert_same_bits(loaded.params, half_way.params)
    assert_same_bits(resume(loaded), last)


@pytest.mark.parametrize("through", [through_flax, through_orbax])
def test_gradients_and_their_absence_come_back(through, tmp_path):
    clear = lambda state: OPTIMIZER.zero_grad(state, set_grads_to_None=True)  # noqa: E731
    for i, edit in enumerate((lambda state: state, clear)):
        state, target = edit(overflowed()), edit(other())
        restored = through(OPTIMIZER, target, state, tmp_path / str(i))
        assert_same_bits(jax.tree.map(jnp.asarray, restored), state)


def edited(*path, **changes):
    """A state dict with other entries at a path; None takes one out."""
    saved = jax.tree.map(lambda x: x, OPTIMIZER.state_dict(other()))
    at = functools.reduce(lambda tree, name: tree[name], path, saved)
    at |= changes
    for name in [name for name in changes if changes[name] is None]:
        del at[name]
    return saved


def saved_by(optimizer):
    return optimizer.state_dict(optimizer.init(params()))


BIAS = "fp32_from_fp16/dense/bias"
DENSE = ("fp32_from_fp16", "dense")
STATIC = make(fused_adam(1e-2), dynamic=False)
WRONG = {
    "loss_scaler/scale is missing": lambda: edited(loss_scaler=None),
    "extra is unexpected": lambda: edited(extra=1),
    f"{BIAS} is missing": lambda: edited(*DENSE, bias=None),
    f"{BIAS} has shape": lambda: edited(*DENSE, bias=jnp.zeros(7)),
    f"{BIAS} has dtype": lambda: edited(*DENSE, bias=jnp.zeros(2, jnp.float16)),
    "dense/weight is unexp": lambda: edited(*DENSE, weight=jnp.zeros(2)),
    "mu/dense/bias is missing": lambda: saved_by(make(optax.sgd(0.5, momentum=0.5))),
    "dynamic_loss_scale=False": lambda: saved_by(STATIC),
}


@pytest.mark.parametrize("words", WRONG)
def test_what_does_not_fit_is_refused(words):
    state = other()
    before = jax.tree.map(np.array, state)
    with pytest.raises(ValueError, match=words):
        OPTIMIZER.load_state_dict(state, WRONG[words]())
    assert_same_bits(state, before)
