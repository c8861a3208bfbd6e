"""Test fp16_utils.FP16_Optimizer against float64, and against AmpState bit for bit."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.traverse_util import flatten_dict, unflatten_dict

import jamp
from jamp.fp16_utils import FP16_Optimizer, clip_grad_norm
from jamp.optimizers import fused_adam
from tests.fp16_utils.fp16 import (
    F16,
    F32,
    data,
    in_groups,
    like,
    make,
    params,
    run,
    steps,
)
from tests.support.bits import assert_same_bits, copy
from tests.support.states import dot


def assert_as_amp(optimizer, rule, xs, where="jit", passes=1):
    """Checks that a step of several backward passes equals AmpState's at O2."""

    def amp_step(state, xs):
        grads = [jamp.scaled_grad(dot)(state, x) for x in xs]
        state = state.apply_gradients(grads=grads, loss_id=[0] * passes)
        return state, state

    options = {"keep_fp32": "norm", "loss_scale": rule, "verbosity": 0}
    masters = jax.tree.map(lambda p: p.astype(F32), params())
    amp = jamp.initialize(masters, optimizer.optimizer.inner, "O2", **options)
    theirs = run(amp_step, amp, in_groups(xs, passes), where)
    mine = steps(optimizer, optimizer.init(params()), xs, where, passes)
    for a, b in zip(mine, theirs, strict=True):
        assert_same_bits(
            (a.params, a.opt_state, a.loss_scaler, a.overflow),
            (b.params, b.opt_state, b.loss_scales[0], b.last_step_skipped),
        )
    return mine


def test_options_of_the_scale_are_honoured():
    args = {"init_scale": 64, "scale_factor": 4.0, "scale_window": 2}
    args |= {"min_loss_scale": 8.0, "max_loss_scale": 512.0}
    rule = jamp.DynamicLossScale(64.0, 4.0, 2, 8.0, 512.0)
    optimizer, xs = make(dynamic_loss_args=args), data(12, (0, 1, 2, 10))
    seen = assert_as_amp(optimizer, rule, xs, "scan")
    assert {8.0, 512.0} <= {float(state.loss_scale) for state in seen}


@pytest.mark.parametrize(
    "tx, static",
    [(optax.sgd(0.5, 0.5), None), (fused_adam(1e-2), None), (optax.sgd(0.5), 128.0)],
)
def test_it_is_ampstate_at_o2_bit_for_bit(tx, static):
    optimizer = make(tx)
    if static:
        optimizer = make(tx, dynamic=False, static_loss_scale=static)
    rule = static or jamp.DynamicLossScale(window=4)
    seen = assert_as_amp(optimizer, rule, data(25, (0, 9, 10, 20)))
    assert sum(bool(state.overflow) for state in seen) == (0 if static else 4)


@pytest.mark.parametrize("where, passes", [("jit", 2), ("scan", 3)])
@pytest.mark.parametrize("window", [4, 5])
def test_it_is_ampstate_with_overflows_in_any_pass(where, passes, window):
    # Each pattern of overflows in two steps of two passes, and six clean passes.
    patterns = [x for p in itertools.product([0, 1], repeat=4) for x in (*p, *[0] * 6)]
    bad = tuple(np.flatnonzero(patterns).tolist())
    patterns = patterns[: len(patterns) // passes * passes]
    xs, rule = data(len(patterns), bad), jamp.DynamicLossScale(window=window)
    seen = assert_as_amp(make(window=window), rule, xs, where, passes)
    assert max(state.loss_scaler.consecutive_skips for state in seen) == 2
    assert len({float(state.loss_scale) for state in seen}) > 4


def test_model_grads_are_scaled_and_sum_in_fp32():
    # float32 holds 2048 + 1, float16 does not. The sum follows the scale.
    optimizer = make()
    state = optimizer.init(params())
    for scale, value, total in ((2, 1024.0, 2048.0), (2, 0.5, 2049.0), (4, 0.25, 4099)):
        state = optimizer.set_loss_scale(state, scale)
        x = like(value)
        _, state = optimizer.backward(state, dot, x, update_master_grads=False)
        assert_same_bits(state.model_grads, like(total))
    state = optimizer.update_master_grads(state)
    assert_same_bits(state.master_grads, like(1024.75))


@pytest.mark.parametrize("drops, zero", [(False, 0.0), (True, -0.0)])
def test_an_underflowing_gradient_has_the_sign_of_torch(drops, zero):
    # torch adds -0 to the zeros of `zero_grad`, or stores -0 if the gradient is None.
    optimizer = make(dynamic=False)
    state = optimizer.set_loss_scale(optimizer.init(params()), 2.0**-16)
    state = optimizer.zero_grad(state, set_grads_to_None=drops)
    _, state = optimizer.backward(state, dot, like(-(2.0**-16)))
    assert_same_bits(state.master_grads["dense"], like(zero)["dense"])


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


def test_clipping_changes_nothing_after_an_overflow():
    optimizer, x = make(), data(1)[0]
    _, start = optimizer.backward(optimizer.init(params()), dot, x)
    norm, state = optimizer.clip_master_grads(start, 2.0**-9, "inf")
    expected = clip_grad_norm(start.master_grads, 2.0**-9, "inf")
    assert_same_bits((norm, state.master_grads), expected)
    _, state = optimizer.backward(start, dot, like(np.inf))
    norm, after = jax.jit(optimizer.clip_master_grads)(state, 1.0)
    assert norm == -1
    assert_same_bits(after, state)


def test_prints_and_warnings(capsys):
    unused = {"static_loss_scale": {"static_loss_scale": 2.0}}
    unused["dynamic_loss_args"] = {"dynamic": False, "dynamic_loss_args": {}}
    for name, options in unused.items():
        with pytest.warns(jamp.UnusedOptionWarning, match=f"{name} has no effect"):
            make(**options)
    optimizer = make(verbose=True)
    state = optimizer.init(params())
    assert "received float16 with (3, 2)\n" in capsys.readouterr().out
    assert_same_bits(optimizer.inspect_master_grad_data(state), like(0.0))
    _, state = optimizer.backward(state, dot, like(np.inf))
    with pytest.warns(jamp.PrecisionWarning, match="overflowed and are invalid"):
        assert optimizer.inspect_master_grad_data(state) is None


def test_the_default_scale_is_that_of_amp():
    for dynamic, scale in ((True, 2.0**16), (False, 1)):
        optimizer = FP16_Optimizer(SGD, dynamic_loss_scale=dynamic, verbose=False)
        state = optimizer.init(params())
        assert state.loss_scale == scale
        changed = optimizer.set_loss_scale(state, 128.0)
        assert_same_bits(optimizer.set_loss_scale(changed, scale), state)


SGD = optax.sgd(1.0)


def step_with(optimizer, loss_fn, where="jit"):
    def step(state, *args):
        def closure(state):
            return optimizer.backward(optimizer.zero_grad(state), loss_fn, *args)

        return optimizer.step(state, closure)

    return jax.jit(step) if where == "jit" else step


SKIPPED = "Gradient overflow.  Skipping step, reducing loss scale to {}\n"
AT_FLOOR = "Gradient overflow.  Skipping step, loss scale at its floor of {}\n"
IN_CLOSURE = "OVERFLOW within closure! Skipping step, reducing loss scale to {}\n"


@pytest.mark.parametrize("where, falls", [("eager", 2), ("jit", 4)])
def test_a_closure_is_called_until_its_gradients_are_finite(where, falls):
    calls = []

    def counted(p, x):
        jax.debug.callback(lambda x: calls.append(float(x)), x["norm"])
        return dot(p, x)

    optimizer, scale = make(), 2.0 ** (16 - falls)
    step, x = step_with(optimizer, counted, where), like(2.0 ** (falls - 1))
    start = optimizer.init(params())
    after = step(start, x)
    jax.effects_barrier()
    assert len(calls) == falls + 1
    assert (after[1].loss_scale, after[1].loss_scaler.unskipped) == (scale, 1)
    assert_same_bits(after, step(optimizer.set_loss_scale(start, scale), x))


@pytest.mark.parametrize("where", ["eager", "jit"])
def test_a_closure_that_overflows_at_the_floor_is_given_up(where, capsys):
    optimizer = make(dynamic_loss_args={"min_loss_scale": 2.0**14})
    start = optimizer.init(params())
    step = step_with(optimizer, dot, where)
    _, state = step(start, like(np.inf))
    assert state.overflow
    assert state.loss_scale == 2.0**14
    assert_same_bits((state.params, state.opt_state), (start.params, start.opt_state))
    printed = IN_CLOSURE.format(2.0**15) + AT_FLOOR.format(2.0**14)
    assert capsys.readouterr().out == (printed if where == "eager" else "")
    _, state = step(state, data(1)[0])
    assert not state.overflow
    assert state.params["norm"] != start.params["norm"]


@pytest.mark.standard_promotion  # for optax's line search
def test_a_line_search_evaluates_the_closure_at_other_weights():
    def bowl(p):
        far = [x.astype(F32) - 0.75 for x in jax.tree.leaves(p)]
        return sum((x**2 + x**4).sum() for x in far)

    backtracking = optax.scale_by_backtracking_linesearch(15, store_grad=True)
    optimizer = make(optax.chain(SGD, backtracking))
    state, step, losses = optimizer.init(params()), step_with(optimizer, bowl), []
    for _ in range(8):
        loss, state = step(state)
        losses.append(float(loss))
    # Gradients of 89 fit at 2**9, and the next, 156, at 2**8. Then a window ends.
    assert (state.loss_scale, state.loss_scaler.unskipped) == (2.0**9, 3)
    assert losses[0] > 100 * losses[-1]


OPTIMIZER = make(fused_adam(1e-2), window=3)
KEYS = {
    *("dynamic_loss_scale", "optimizer_state_dict", "loss_scaler", "overflow"),
    *("fp32_from_fp16", "fp32_from_fp32"),
}


def other():
    """Returns a state that differs from the trained one."""
    return OPTIMIZER.init(jax.tree.map(lambda p: -p * 2, params()))


@functools.cache
def overflowed():
    """Returns the state between an overflow and the step that it skips."""

    start, xs = OPTIMIZER.init(params()), data(5, (2,))
    state = OPTIMIZER.zero_grad(steps(OPTIMIZER, start, xs)[-1])
    return OPTIMIZER.backward(state, dot, like(np.inf))[1]


def test_donating_a_state_deletes_no_other_array():
    tree, clear = params(), jax.jit(OPTIMIZER.zero_grad, donate_argnums=0)
    before = jax.tree.map(np.array, tree)
    saved = OPTIMIZER.state_dict(clear(clear(OPTIMIZER.init(tree))))
    held, target = jax.tree.map(np.array, saved), other()
    clear(OPTIMIZER.load_state_dict(target, saved))
    assert_same_bits((tree, saved, target), (before, held, other()))


def test_state_dict_round_trips_and_refreshes_the_half_params():
    state, start = overflowed(), other()
    saved, masters = OPTIMIZER.state_dict(state), OPTIMIZER.master_params(state)
    assert saved.keys() == KEYS
    assert_same_bits(saved["fp32_from_fp16"]["dense"], masters["dense"])
    assert_same_bits(saved["fp32_from_fp32"]["norm"], state.params["norm"])
    written = serialization.msgpack_serialize(saved)
    loaded = OPTIMIZER.load_state_dict(start, serialization.msgpack_restore(written))
    assert loaded.overflow
    assert_same_bits(loaded, state.replace(master_grads=start.master_grads))
    through_flax = serialization.from_bytes(start, serialization.to_bytes(state))
    assert_same_bits(jax.tree.map(jnp.asarray, through_flax), state)
    stepped = jax.jit(OPTIMIZER.step)(loaded)
    assert_same_bits(stepped.params, state.params)
    assert_same_bits(stepped.opt_state, state.opt_state)


BIAS = "fp32_from_fp16/dense/bias"


@pytest.mark.parametrize(
    "name, value, words",
    [
        ("loss_scaler/scale", None, "is missing"),
        ("loss_scaler/unskipped", np.int32(-1), "must be an integer"),
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
    with pytest.raises(ValueError, match=f"{name}`? {words}"):
        OPTIMIZER.load_state_dict(state, unflatten_dict(saved, sep="/"))
    assert_same_bits(state, before)


EXTRA, TWO = "Wrapped parameters must be.*extra", jnp.ones(2)
STATIC = make(dynamic=False)
UNKNOWN = "no 'scale'; its keys are .*'init_scale', 'scale_factor', 'scale_window'"
# The calls take an optimizer, a state, and a state without gradients.
REFUSED = [
    (lambda *_: FP16_Optimizer(jamp.master_weights(SGD)), ValueError, "keeps master"),
    (lambda *_: make(dynamic_loss_args={"scale": 1}), TypeError, UNKNOWN),
    (lambda o, s, none: o.step(none), ValueError, "no gradients"),
    (lambda o, *_: o.init({"extra": [np.ones(2)]}), TypeError, EXTRA),
    (lambda o, s, _: o.load_state_dict(s, [1]), TypeError, r"mapping, got \[1\]"),
    (
        lambda o, s, _: o.load_state_dict(s, STATIC.state_dict(STATIC.init(params()))),
        *(ValueError, "saved with dynamic_loss_scale=False"),
    ),
    (lambda o, s, _: o.step(s, lambda s: s), TypeError, r"\(loss, state\)"),
    (lambda o, s, _: o.step(s, lambda s: (s, 1.0)), TypeError, r"\(loss, state\)"),
    (lambda o, s, _: o.step(s, lambda s: (TWO, s)), TypeError, "a float scalar"),
    (lambda o, s, none: o.step(s, lambda _: (1.0, none)), ValueError, "no gradients"),
    (lambda o, s, _: jax.jit(o.inspect_master_grad_data)(s), TypeError, "traced array"),
]


@pytest.mark.parametrize("call, error, words", REFUSED)
def test_what_is_refused(call, error, words):
    optimizer = make()
    state = optimizer.init(params())
    none = optimizer.zero_grad(state, set_grads_to_None=True)
    with pytest.raises(error, match=f"(?s){words}"):
        call(optimizer, state, none)
