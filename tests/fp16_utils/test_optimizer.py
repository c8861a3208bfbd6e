"""fp16_utils.FP16_Optimizer against float64, and against AmpState bit for bit."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from flax.traverse_util import flatten_dict, unflatten_dict

import jamp
from jamp.fp16_utils import FP16_Optimizer
from jamp.optimizers import fused_adam
from tests.bits import assert_same_bits, copy
from tests.fp16_utils import fp16
from tests.fp16_utils.fp16 import (
    F16,
    F32,
    cut_down,
    data,
    group,
    host,
    like,
    make,
    params,
    run,
    steps,
)
from tests.oracles.loss_scale import Rule
from tests.states import dot

# What a step computes


def assert_run(optimizer, model, xs, where="jit", passes=1):
    """So many backward passes before each step; the states before gradients went."""

    def step(state, xs):
        for x in xs:
            _, state = optimizer.backward(state, dot, x)
        state = optimizer.step(state)
        return optimizer.zero_grad(state), state

    xs = [xs[i : i + passes] for i in range(0, len(xs), passes)]
    before = optimizer.init(params())
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


def test_options_of_the_scale_are_honoured():
    args = {"init_scale": 64, "scale_factor": 4.0, "scale_window": 2}
    args |= {"min_loss_scale": 8.0, "max_loss_scale": 512.0}
    model = fp16.model_of(Rule(64.0, 4.0, 2, 8.0, 512.0))
    xs = data(12, (0, 1, 2, 10))
    seen = assert_run(make(dynamic_loss_args=args), model, xs, "scan")
    assert {8.0, 512.0} <= {float(state.loss_scale) for state in seen}


@pytest.mark.parametrize(
    "tx, static",
    [(optax.sgd(0.5, 0.5), None), (fused_adam(1e-2), None), (optax.sgd(0.5), 128.0)],
)
def test_it_is_ampstate_at_o2_bit_for_bit(tx, static):
    """With a static scale, too, which checks nothing."""
    optimizer, xs = make(tx), data(25, (0, 9, 10, 20))
    if static:
        optimizer = make(tx, dynamic=False, static_loss_scale=static)
    masters = jax.tree.map(lambda p: p.astype(F32), params())
    rule = static or jamp.DynamicLossScale(window=4)
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
    assert amp.skipped_steps == (0 if static else 4)


@pytest.mark.parametrize(
    "where, window, growths", [("eager", 1, 4), ("jit", 2, 2), ("jit", 100, 0)]
)
def test_two_backward_passes_give_the_sum_for_half_and_fp32_params(
    where, window, growths
):
    optimizer, model = make(window=window), fp16.model_of(Rule(window=window))
    *_, last = assert_run(optimizer, model, data(4), where, passes=2)
    assert last.loss_scale == 2.0 ** (16 + growths)


@pytest.mark.parametrize("bad, scale", [((0,), 14), ((1,), 15), ((0, 1), 14)])
def test_an_overflow_in_one_of_two_backward_passes_skips(bad, scale):
    first, second = assert_run(make(), fp16.model_of(), data(4, bad), passes=2)
    assert (first.overflow, second.overflow) == (True, False)
    assert second.loss_scale == 2.0**scale


def test_model_grads_are_scaled_and_sum_in_fp32():
    # 2048 + 1 is no float16, but is a float32. The sum follows the scale.
    optimizer = make()
    state = optimizer.init(params())
    for scale, value, total in ((2, 1024.0, 2048.0), (2, 0.5, 2049.0), (4, 0.25, 4099)):
        state = optimizer.set_loss_scale(state, scale)
        x = like(value)
        _, state = optimizer.backward(state, dot, x, update_master_grads=False)
        assert_same_bits(state.model_grads, like(total))
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


def test_clipping_changes_nothing_after_an_overflow():
    optimizer, model, x = make(), fp16.model_of(), data(1)[0]
    _, start = optimizer.backward(optimizer.init(params()), dot, x)
    model.backward(host(x))
    norm, state = optimizer.clip_master_grads(start, 2.0**-9, "inf")
    expected = model.clip_master_grads(2.0**-9, np.inf)
    np.testing.assert_allclose(norm, expected, rtol=1e-6)
    fp16.assert_state(optimizer, state, model)
    _, state = optimizer.backward(start, dot, like(np.inf))
    norm, after = jax.jit(optimizer.clip_master_grads)(state, 1.0)
    assert norm == -1
    assert_same_bits(after, state)


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


SGD = optax.sgd(1.0)


def step_with(optimizer, loss_fn, where="jit"):
    def step(state, *args):
        def closure(state):
            """What a user of apex writes: zero_grad, backward, and the loss."""
            return optimizer.backward(optimizer.zero_grad(state), loss_fn, *args)

        return optimizer.step(state, closure)

    return jax.jit(step) if where == "jit" else step


SKIPPED = "Gradient overflow.  Skipping step, reducing loss scale to {}\n"
IN_CLOSURE = "OVERFLOW within closure! Skipping step, reducing loss scale to {}\n"


@pytest.mark.parametrize("falls", [0, 4])
@pytest.mark.parametrize("where", ["eager", "jit"])
def test_a_closure_is_called_until_it_fits_and_steps_as_at_that_scale(where, falls):
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
    printed = IN_CLOSURE.format(2.0**15) + SKIPPED.format(2.0**14)
    assert capsys.readouterr().out == (printed if where == "eager" else "")
    # The next closure begins with zero_grad, as this one did.
    _, state = step(state, data(1)[0])
    assert not state.overflow
    assert state.params["norm"] != start.params["norm"]


# Checkpoints, of the cut-down one, too

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


def other(kind="fp16_utils"):
    """A state with no bit of the trained one's."""
    optimizer, tree, _ = BOTH[kind]
    return optimizer.zero_grad(optimizer.init(jax.tree.map(lambda p: -p * 2, tree)))


@functools.cache
def overflowed():
    """Between an overflowing backward and the step that it will skip."""
    start, xs = OPTIMIZER.init(params()), data(5, (2,))
    state, _ = steps(OPTIMIZER, start, xs)
    backward = jax.jit(lambda state, x: OPTIMIZER.backward(state, dot, x)[1])
    return backward(state, like(np.inf))


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


EXTRA = "Wrapped parameters must be.*extra"
GRADIENTS = "must call `optimizer.zero_grad` and `optimizer.backward`"
# What is called with an optimizer, a state, and one whose gradients are None.
REFUSED = [
    (lambda *_: FP16_Optimizer(jamp.master_weights(SGD)), ValueError, "keeps the mast"),
    (lambda o, *_: o.init({"extra": [np.ones(2)]}), TypeError, EXTRA),
    (lambda o, s, _: o.step(s, lambda s: s), TypeError, r"\(loss, state\)"),
    (lambda o, s, _: o.step(s, lambda s: (jnp.ones(2), s)), TypeError, "a scalar"),
    (lambda o, s, none: o.step(s, lambda _: (1.0, none)), TypeError, GRADIENTS),
    (lambda o, s, _: jax.jit(o.inspect_master_grad_data)(s), TypeError, "outside of"),
]


@pytest.mark.parametrize("call, error, words", REFUSED)
def test_what_is_refused(call, error, words):
    optimizer = make()
    state = optimizer.init(params())
    none = optimizer.zero_grad(state, set_grads_to_None=True)
    with pytest.raises(error, match=f"(?s){words}"):
        call(optimizer, state, none)
