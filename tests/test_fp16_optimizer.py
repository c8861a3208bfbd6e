"""fp16_utils.FP16_Optimizer against float64, and against AmpState bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp.fp16_utils import FP16_Optimizer
from jamp.optimizers import fused_adam
from tests.bits import assert_same_bits
from tests.fp16 import (
    BF16,
    EAGER_OR_JIT,
    F16,
    F32,
    WHERE,
    assert_near,
    assert_rounded,
    assert_state,
    data,
    dot,
    leaves_of,
    like,
    make,
    model_of,
    only,
    params,
    run,
    step_of,
)
from tests.fused import assert_close
from tests.oracles.loss_scale import Rule

# What a step computes


@pytest.mark.parametrize(
    ("where", "dtype"), [("eager", F16), ("jit", F16), ("scan", F16), ("scan", BF16)]
)
def test_a_dynamic_run_matches_float64(where, dtype):
    overflows = (0, 5)
    xs = data(7, overflows)
    optimizer, model = make(), model_of(params(dtype))
    state, seen = run(step_of(optimizer), optimizer.init(params(dtype)), xs, where)
    for i, (x, (half, masters, scaler, overflow)) in enumerate(
        zip(xs, seen, strict=True)
    ):
        model.backward(leaves_of(x))
        model.step()
        assert bool(overflow) == model.overflow == (i in overflows)
        assert float(scaler.scale) == model.scale
        assert int(scaler.unskipped) == model.scaler.unskipped
        model.zero_grad()
        assert_near(masters, model.masters)
        assert_rounded(half, masters)
    assert not state.overflow


@WHERE
def test_a_static_scale_checks_nothing(where):
    xs = [*data(4), only("norm", np.inf)]
    optimizer, model = (
        make(dynamic=False, static_loss_scale=128.0),
        model_of(static=128),
    )
    _, seen = run(step_of(optimizer), optimizer.init(params()), xs, where)
    for x, (_, masters, scaler, overflow) in zip(xs, seen, strict=True):
        model.backward(leaves_of(x))
        model.step()
        model.zero_grad()
        assert_near(masters, model.masters)
        assert (scaler.scale, overflow) == (128, False)
        assert scaler.unskipped == model.scaler.unskipped
    assert masters["norm"] == -np.inf


SAME = {
    "adam": lambda: optax.adam(1e-2),
    "momentum": lambda: optax.sgd(0.5, momentum=0.5),
    "fused_adam": lambda: fused_adam(1e-2),
}


@pytest.mark.standard_promotion  # for optax.adam
@pytest.mark.parametrize("name", SAME)
def test_it_is_ampstate_at_o2_bit_for_bit(name):
    tx, xs = SAME[name](), data(50, (0, 9, 10, 24, 41))
    masters = jax.tree.map(lambda p: p.astype(F32), params())
    optimizer = make(tx)
    amp = jamp.initialize(
        masters,
        tx,
        "O2",
        keep_fp32="norm",
        loss_scale=jamp.DynamicLossScale(window=4),
        verbosity=0,
    )
    assert_same_bits(amp.params, params())

    def amp_step(state, x):
        state = state.apply_gradients(grads=jamp.scaled_grad(dot)(state, x))
        seen = (
            state.params,
            jamp.master_params(state),
            state.loss_scales[0],
            state.last_step_skipped,
        )
        return state, seen

    amp, amp_seen = run(amp_step, amp, xs)
    state, seen = run(step_of(optimizer), optimizer.init(params()), xs)
    for mine, theirs in zip(seen, amp_seen, strict=True):
        assert_same_bits(mine, theirs)
    if name == "adam":  # XLA:CPU contracts multiply-adds of the moments as it likes
        assert_close(state.opt_state, amp.opt_state, rtol=1e-6, atol=0)
    else:
        assert_same_bits(state.opt_state, amp.opt_state)
    assert amp.skipped_steps == 5


def test_all_fp32_params_are_their_own_masters():
    tree = {"w": jnp.asarray([1.0, 2.0], F32)}
    optimizer = make(optax.sgd(0.5))
    state = optimizer.init(tree)
    _, state = optimizer.backward(state, dot, {"w": jnp.asarray([1.0, 4.0], F32)})
    state = optimizer.step(state)
    assert state.params["w"].tolist() == [0.5, 0.0]
    assert_same_bits(optimizer.master_params(state), state.params)


def test_init_runs_under_jit():
    optimizer = make(fused_adam())
    state = optimizer.init(params())
    assert_same_bits(jax.jit(optimizer.init)(params()), state)
    assert jax.eval_shape(optimizer.init, params()) == jax.eval_shape(lambda: state)


# backward and update_master_grads


def double(optimizer, state, first, second):
    for x in (first, second):
        _, state = optimizer.backward(state, dot, x)
    return state


@EAGER_OR_JIT
@pytest.mark.parametrize("window", [1, 2, 100])
def test_two_backward_passes_give_the_sum_for_half_and_fp32_params(where, window):
    optimizer, model = make(window=window), model_of(rule=Rule(window=window))
    xs = data(4)

    def both(state, first, second):
        return double(optimizer, state, first, second)

    both = jax.jit(both) if where == "jit" else both
    state = optimizer.init(params())
    for first, second in (xs[:2], xs[2:]):
        state = both(state, first, second)
        for x in (first, second):
            model.backward(leaves_of(x))
        assert_state(state, model)
        state = optimizer.zero_grad(state)
        model.zero_grad()
    assert float(state.loss_scale) == 2.0**16 * {1: 16, 2: 4, 100: 1}[window]


@pytest.mark.parametrize("bad", [{0}, {1}, {0, 1}])
def test_an_overflow_in_one_of_two_backward_passes_skips(bad):
    optimizer, model = make(), model_of()
    state = before = optimizer.init(params())
    state = double(optimizer, state, *data(2, bad))
    for x in data(2, bad):
        model.backward(leaves_of(x))
    assert state.overflow
    assert float(state.loss_scale) == model.scale == 2.0 ** (14 if 0 in bad else 15)
    after = optimizer.step(state)
    assert_same_bits(after, state)
    assert_same_bits((after.params, after.opt_state), (before.params, before.opt_state))
    state = optimizer.zero_grad(after)
    assert not state.overflow
    model.zero_grad()
    x = data(1, seed=3)[0]
    _, state = optimizer.backward(state, dot, x)
    model.backward(leaves_of(x))
    assert_state(state, model)


@EAGER_OR_JIT
def test_master_grads_may_be_updated_once_for_several_losses(where):
    optimizer, model = make(), model_of()

    def losses(state, first, second):
        for x in (first, second):
            _, state = optimizer.backward(state, dot, x, update_master_grads=False)
        return state, optimizer.update_master_grads(state)

    losses = jax.jit(losses) if where == "jit" else losses
    state = optimizer.init(params())
    for xs in (data(2), data(2, {0}), data(2, {1})):
        waiting, state = losses(optimizer.zero_grad(state), *xs)
        assert not any(np.any(x) for x in leaves_of(waiting.master_grads))
        assert not waiting.overflow
        model.zero_grad()
        for x in xs:
            model.backward(leaves_of(x), update_master_grads=False)
        model.update_master_grads()
        assert_state(state, model)
        assert not any(np.any(x) for x in leaves_of(state.model_grads.tree))


def test_model_grads_are_scaled_and_sum_in_fp32():
    # 2048 + 1 is no float16, but is a float32.
    optimizer = make(dynamic=False, static_loss_scale=2.0)
    state = optimizer.init(params())
    for value in (1024.0, 0.5):
        _, state = optimizer.backward(
            state, dot, like(value), update_master_grads=False
        )
    for leaf in jax.tree.leaves(state.model_grads.tree):
        assert leaf.dtype == F32
        assert np.all(leaf == 2049.0)
    state = optimizer.update_master_grads(state)
    assert all(np.all(x == 1024.5) for x in jax.tree.leaves(state.master_grads))


def test_a_scale_set_between_two_passes_does_not_change_their_sum():
    optimizer = make()
    state = optimizer.init(params())
    for scale in (2.0**16, 2.0**10):
        state = optimizer.set_loss_scale(state, scale)
        x = like(2.0**-9)
        _, state = optimizer.backward(state, dot, x, update_master_grads=False)
    state = optimizer.update_master_grads(state)
    assert all(np.all(x == 2.0**-8) for x in jax.tree.leaves(state.master_grads))


def test_model_grads_are_at_the_present_scale():
    optimizer = make()
    state = optimizer.set_loss_scale(optimizer.init(params()), 100.0)
    _, state = optimizer.backward(state, dot, like(0.5), update_master_grads=False)
    assert state.model_grads.scale == 100
    assert all(np.all(x == 50.0) for x in jax.tree.leaves(state.model_grads.tree))


@EAGER_OR_JIT
def test_the_loss_is_unscaled_and_aux_and_keywords_pass(where):
    optimizer = make()
    state = optimizer.init(params())

    def loss_fn(p, x, *, factor):
        assert p["dense"]["kernel"].dtype == F16
        loss = factor * dot(p, x)
        return loss, {"loss": loss}

    def backward(state, x):
        return optimizer.backward(state, loss_fn, x, has_aux=True, factor=2.0)

    backward = jax.jit(backward) if where == "jit" else backward
    (loss, aux), state = backward(state, like(2.0**-9))
    assert loss.dtype == F32
    assert loss == aux["loss"] == 2 * float(dot(params(), like(2.0**-9)))
    assert not state.overflow


def test_losses_are_float_scalars_and_better_in_fp32():
    optimizer = make(dynamic=False)
    state = optimizer.init(params())
    with pytest.raises(TypeError):
        optimizer.backward(state, lambda p: p["dense"]["bias"])
    with pytest.warns(jamp.PrecisionWarning, match="loss is float16"):
        loss, state = optimizer.backward(state, lambda p: p["dense"]["bias"].sum())
    assert (loss.dtype, loss) == (F32, 0.375)
    assert state.master_grads["dense"]["bias"].tolist() == [1, 1]


# zero_grad, clip_master_grads, inspect_master_grad_data


def test_gradients_may_be_none_until_the_next_backward():
    optimizer, x = make(), data(1)[0]
    fresh = optimizer.init(params())
    none = optimizer.zero_grad(
        optimizer.step(double(optimizer, fresh, x, like(np.inf))),
        set_grads_to_None=True,
    )
    assert none.model_grads is None
    assert none.master_grads is None
    assert not none.overflow
    for call in (
        optimizer.step,
        lambda s: optimizer.clip_master_grads(s, 1.0),
        optimizer.update_master_grads,
    ):
        with pytest.raises(ValueError, match="backward"):
            call(none)
    zeros = optimizer.zero_grad(none)
    for scaler in (none.loss_scaler, fresh.loss_scaler):
        state = [s.replace(loss_scaler=scaler) for s in (none, zeros)]
        none_after, after = (optimizer.backward(s, dot, x)[1] for s in state)
        assert_same_bits(after.master_grads, none_after.master_grads)
        assert_same_bits(after.params, none_after.params)
    clear = jax.jit(lambda s: optimizer.zero_grad(s, set_grads_to_None=True))
    assert clear(after).master_grads is None


@EAGER_OR_JIT
@pytest.mark.parametrize("norm_type", [1, 2, 3.0, "inf"])
@pytest.mark.parametrize("max_norm", [2.0**-9, 100.0])
def test_clipping_is_that_of_torch(where, norm_type, max_norm):
    optimizer, model, x = make(), model_of(), data(1)[0]

    def clip(state):
        return optimizer.clip_master_grads(state, max_norm, norm_type)

    clip = jax.jit(clip) if where == "jit" else clip
    _, state = optimizer.backward(optimizer.init(params()), dot, x)
    norm, state = clip(state)
    model.backward(leaves_of(x))
    expected = model.clip_master_grads(max_norm, float(norm_type))
    np.testing.assert_allclose(norm, expected, rtol=1e-6)
    assert_state(state, model)
    clips = max_norm < expected
    assert clips == (max_norm < 1)


@EAGER_OR_JIT
def test_clipping_after_an_overflow_changes_nothing(where):
    optimizer = make()
    clip = lambda s: optimizer.clip_master_grads(s, 1.0)  # noqa: E731
    clip = jax.jit(clip) if where == "jit" else clip
    _, state = optimizer.backward(optimizer.init(params()), dot, like(np.inf))
    norm, after = clip(state)
    assert norm == -1
    assert_same_bits(after, state)


def test_master_grads_can_be_looked_at_unless_they_overflowed():
    optimizer, x = make(), data(1)[0]
    _, state = optimizer.backward(optimizer.init(params()), dot, x)
    assert_same_bits(optimizer.inspect_master_grad_data(state), state.master_grads)
    _, state = optimizer.backward(state, dot, like(np.nan))
    with pytest.warns(jamp.PrecisionWarning, match="overflow"):
        assert optimizer.inspect_master_grad_data(state) is None
    with pytest.raises(TypeError, match="jit"):
        jax.jit(optimizer.inspect_master_grad_data)(state)


# The scale


def test_setting_the_scale_leaves_the_counters():
    optimizer = make()
    _, state = optimizer.backward(optimizer.init(params()), dot, data(1)[0])
    after = optimizer.set_loss_scale(state, 128.0)
    assert optimizer.loss_scale(after) == after.loss_scale == 128
    assert_same_bits(
        after.loss_scaler._replace(scale=state.loss_scaler.scale), state.loss_scaler
    )


def test_options_of_the_scale_are_honoured():
    args = {"init_scale": 64, "scale_factor": 4.0, "scale_window": 2}
    args |= {"min_loss_scale": 8.0, "max_loss_scale": 512.0}
    optimizer = make(dynamic_loss_args=args)
    rule = Rule(64.0, 4.0, 2, 8.0, 512.0)
    model = model_of(rule=rule)
    bad = (0, 1, 2, 3, 12)
    state, xs = optimizer.init(params()), data(14, bad)
    _, seen = run(step_of(optimizer), state, xs)
    scales = []
    for x, (_, _, scaler, _) in zip(xs, seen, strict=True):
        model.backward(leaves_of(x))
        model.zero_grad()
        assert float(scaler.scale) == model.scale
        scales.append(model.scale)
    assert {8.0, 512.0} <= set(scales)


def test_the_default_scale_is_that_of_amp():
    state = FP16_Optimizer(optax.sgd(1.0), dynamic_loss_scale=True, verbose=False).init(
        params()
    )
    assert state.loss_scale == 2.0**16
    state = FP16_Optimizer(optax.sgd(1.0), verbose=False).init(params())
    assert state.loss_scale == 1
