"""fp16_utils.FP16_Optimizer against float64, and against AmpState bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp.fp16_utils import FP16_Optimizer
from jamp.optimizers import fused_adam
from tests import fp16
from tests.bits import assert_same_bits
from tests.fp16 import F16, F32, data, dot, host, like, make, params, run, steps
from tests.oracles.loss_scale import Rule

# What a step computes


def assert_run(optimizer, model, xs, where="jit", passes=1, tree=None):
    """So many backward passes before each step; the states before gradients went."""

    def step(state, xs):
        for x in xs:
            _, state = optimizer.backward(state, dot, x)
        state = optimizer.step(state)
        return optimizer.zero_grad(state), state

    xs = [xs[i : i + passes] for i in range(0, len(xs), passes)]
    before = optimizer.init(tree or params())
    last, seen = run(step, before, xs, where)
    for x, state in zip(xs, seen, strict=True):
        for part in x:
            model.backward(host(part))
        model.step()
        fp16.assert_state(optimizer, state, model)
        model.zero_grad()
        if state.overflow:
            assert_same_bits(state.params, before.params)
            assert_same_bits(state.opt_state, before.opt_state)
        before = state
    assert not last.overflow
    return seen


@pytest.mark.parametrize(
    "where, dtype, static",
    [("eager", F16, None), ("jit", F16, 128), ("scan", jnp.bfloat16, None)],
)
def test_a_run_matches_float64_and_a_static_scale_checks_nothing(where, dtype, static):
    tree, model = params(dtype), fp16.model_of(params(dtype), static=static)
    optimizer, xs = make(), data(7, (0, 5))
    if static:
        optimizer, xs = make(dynamic=False, static_loss_scale=static), data(4, (3,))
    seen = assert_run(optimizer, model, xs, where, tree=tree)
    skips = [i for i, state in enumerate(seen) if state.overflow]
    assert skips == ([] if static else [0, 5])


def test_options_of_the_scale_are_honoured():
    args = {"init_scale": 64, "scale_factor": 4.0, "scale_window": 2}
    args |= {"min_loss_scale": 8.0, "max_loss_scale": 512.0}
    model = fp16.model_of(rule=Rule(64.0, 4.0, 2, 8.0, 512.0))
    xs = data(12, (0, 1, 2, 10))
    seen = assert_run(make(dynamic_loss_args=args), model, xs, "scan")
    assert {8.0, 512.0} <= {float(state.loss_scale) for state in seen}


@pytest.mark.parametrize("tx", [optax.sgd(0.5, 0.5), fused_adam(1e-2)])
def test_it_is_ampstate_at_o2_bit_for_bit(tx):
    optimizer, xs = make(tx), data(25, (0, 9, 10, 20))
    masters = jax.tree.map(lambda p: p.astype(F32), params())
    rule = jamp.DynamicLossScale(window=4)
    options = {"keep_fp32": "norm", "loss_scale": rule}
    amp = jamp.initialize(masters, tx, "O2", verbosity=0, **options)

    def amp_step(state, x):
        state = state.apply_gradients(grads=jamp.scaled_grad(dot)(state, x))
        return state, state

    amp, theirs = run(amp_step, amp, xs)
    _, mine = steps(optimizer, optimizer.init(params()), xs)
    for a, b in zip(mine, theirs, strict=True):
        assert_same_bits(
            (a.params, a.opt_state, a.loss_scaler, a.overflow),
            (b.params, b.opt_state, b.loss_scales[0], b.last_step_skipped),
        )
    assert amp.skipped_steps == 4


def test_params_of_all_dtypes_step_and_integers_stay():
    tree = {name: jnp.ones(2, name) for name in ("float16", "bfloat16", "float32")}
    n = jnp.asarray([3], jnp.int32)
    for floats in (tree, {"float32": tree["float32"]}):  # which are their own masters
        optimizer = make(optax.sgd(0.5))
        state = jax.jit(optimizer.init)(floats | {"n": n})
        assert_same_bits(state, optimizer.init(floats | {"n": n}))
        loss_fn = lambda p, x: dot({k: p[k] for k in x}, x)  # noqa: E731
        _, state = optimizer.backward(state, loss_fn, like(0.5, floats))
        grads = {k: state.master_grads[k] for k in floats}
        assert_same_bits(grads, like(0.5, floats))
        after = optimizer.step(state)
        steps = {k: jnp.full(2, 0.75, x.dtype) for k, x in floats.items()}
        assert_same_bits(after.params, steps | {"n": n})
        masters = optimizer.master_params(after)
        assert_same_bits(masters, like(0.75, floats) | {"n": n})


# backward and update_master_grads


@pytest.mark.parametrize(
    "where, window, growths", [("eager", 1, 4), ("jit", 2, 2), ("jit", 100, 0)]
)
def test_two_backward_passes_give_the_sum_for_half_and_fp32_params(
    where, window, growths
):
    optimizer, model = make(window=window), fp16.model_of(rule=Rule(window=window))
    *_, last = assert_run(optimizer, model, data(4), where, passes=2)
    assert last.loss_scale == 2.0 ** (16 + growths)


@pytest.mark.parametrize("bad, scale", [((0,), 14), ((1,), 15), ((0, 1), 14)])
def test_an_overflow_in_one_of_two_backward_passes_skips(bad, scale):
    first, second = assert_run(make(), fp16.model_of(), data(4, bad), passes=2)
    assert (first.overflow, second.overflow) == (True, False)
    assert second.loss_scale == 2.0**scale


def test_master_grads_may_be_updated_once_for_several_losses():
    optimizer, model = make(), fp16.model_of()

    @jax.jit
    def losses(state, first, second):
        for x in (first, second):
            _, state = optimizer.backward(state, dot, x, update_master_grads=False)
        return state, optimizer.update_master_grads(state)

    state = optimizer.init(params())
    for xs in (data(2), data(2, {0}), data(2, {1})):
        waiting, state = losses(optimizer.zero_grad(state), *xs)
        assert not waiting.overflow
        model.zero_grad()
        for x in xs:
            model.backward(host(x), update_master_grads=False)
        model.update_master_grads()
        fp16.assert_state(optimizer, state, model)
        for zeros in (waiting.master_grads, state.model_grads.tree):
            assert_same_bits(zeros, like(0.0))


def test_model_grads_are_scaled_and_sum_in_fp32():
    # 2048 + 1 is no float16, but is a float32. The sum follows the scale.
    optimizer = make()
    state = optimizer.init(params())
    for scale, value, total in ((2, 1024.0, 2048.0), (2, 0.5, 2049.0), (4, 0.25, 4099)):
        state = optimizer.set_loss_scale(state, scale)
        x = like(value)
        _, state = optimizer.backward(state, dot, x, update_master_grads=False)
        assert state.model_grads.scale == scale
        assert_same_bits(state.model_grads.tree, like(total))
    state = optimizer.update_master_grads(state)
    assert_same_bits(state.master_grads, like(1024.75))


def test_the_loss_is_unscaled_in_float32_and_aux_and_keywords_pass():
    def loss_fn(p, x, *, factor):
        assert p["dense"]["kernel"].dtype == F16
        loss = factor * dot(p, x)
        return loss, {"loss": loss}

    def backward(state, x):
        return optimizer.backward(state, loss_fn, x, has_aux=True, factor=2.0)

    optimizer, x = make(), like(2.0**-9)
    (loss, aux), state = jax.jit(backward)(optimizer.init(params()), x)
    assert loss.dtype == F32
    assert loss == aux["loss"] == 2 * float(dot(params(), x))
    assert not state.overflow
    with pytest.warns(jamp.PrecisionWarning, match="loss is float16"):
        loss, _ = optimizer.backward(state, lambda p: p["dense"]["bias"].sum())
    assert (loss.dtype, loss) == (F32, 0.375)


# zero_grad, clip_master_grads, inspect_master_grad_data


def test_gradients_may_be_none_until_the_next_backward():
    optimizer, x = make(), data(1)[0]
    _, state = optimizer.backward(optimizer.init(params()), dot, like(np.inf))
    clear = jax.jit(lambda s: optimizer.zero_grad(s, set_grads_to_None=True))
    none = clear(state)
    assert none.model_grads is none.master_grads is None
    assert not none.overflow
    zeros = optimizer.zero_grad(none)
    assert_same_bits(*(optimizer.backward(s, dot, x)[1] for s in (none, zeros)))


def test_clipping_is_that_of_torch_but_changes_nothing_after_an_overflow():
    optimizer, x = make(), data(1)[0]
    _, start = optimizer.backward(optimizer.init(params()), dot, x)
    for args in ((2.0**-9,), (2.0**-9, "inf"), (100.0, 1)):
        model = fp16.model_of()
        model.backward(host(x))
        norm, state = optimizer.clip_master_grads(start, *args)
        expected = model.clip_master_grads(*map(float, args))
        np.testing.assert_allclose(norm, expected, rtol=1e-6)
        assert (args[0] < expected) == (args[0] < 1)
        fp16.assert_state(optimizer, state, model)
    _, state = optimizer.backward(start, dot, like(np.inf))
    norm, after = jax.jit(optimizer.clip_master_grads)(state, 1.0)
    assert norm == -1
    assert_same_bits(after, state)


def test_master_grads_can_be_looked_at_unless_they_overflowed():
    optimizer = make()
    _, state = optimizer.backward(optimizer.init(params()), dot, data(1)[0])
    assert_same_bits(optimizer.inspect_master_grad_data(state), state.master_grads)
    _, state = optimizer.backward(state, dot, like(np.nan))
    with pytest.warns(jamp.PrecisionWarning, match="overflow"):
        assert optimizer.inspect_master_grad_data(state) is None


def test_the_default_scale_is_that_of_amp():
    for dynamic, scale in ((True, 2.0**16), (False, 1)):
        tx = optax.sgd(1.0)
        optimizer = FP16_Optimizer(tx, dynamic_loss_scale=dynamic, verbose=False)
        state = optimizer.init(params())
        assert state.loss_scale == scale
        after = optimizer.set_loss_scale(state, 128.0)
        assert optimizer.loss_scale(after) == after.loss_scale == 128
        scaler = after.loss_scaler._replace(scale=state.loss_scale)
        assert_same_bits(after.replace(loss_scaler=scaler), state)
