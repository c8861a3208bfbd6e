"""fp16_utils.FP16_Optimizer: closures and line searches, messages, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp.fp16_utils import FP16_Optimizer
from tests.bits import assert_same_bits
from tests.fp16 import (
    BF16,
    EAGER_OR_JIT,
    F16,
    F32,
    REFUSED,
    WHERE,
    assert_rounded,
    data,
    dot,
    like,
    make,
    params,
    run,
)


def closure_for(optimizer, loss_fn, *args):
    """What a user of apex writes: zero_grad, backward, and the loss."""

    def closure(state):
        return optimizer.backward(optimizer.zero_grad(state), loss_fn, *args)

    return closure


def step_with(optimizer, loss_fn, where):
    def step(state, *args):
        return optimizer.step(state, closure_for(optimizer, loss_fn, *args))

    return jax.jit(step) if where == "jit" else step


# Closures


@WHERE
def test_a_closure_steps_as_backward_and_step_do(where):
    optimizer, xs = make(), data(2)
    plain = optimizer.init(params())
    with_closure = step_with(optimizer, dot, "eager")

    def step(state, x):
        loss, state = with_closure(state, x)
        return state, loss

    state, losses = run(step, optimizer.init(params()), xs, where)
    for x, loss in zip(xs, losses, strict=True):
        expected, plain = optimizer.backward(optimizer.zero_grad(plain), dot, x)
        plain = optimizer.step(plain)
        np.testing.assert_allclose(loss, expected, rtol=1e-6)
    assert_same_bits(state.params, plain.params)
    assert_same_bits(state.opt_state, plain.opt_state)
    assert_same_bits(state.loss_scaler, plain.loss_scaler)
    assert state.first_closure_call_this_step
    assert not state.overflow


OVERFLOW_IN_CLOSURE = (
    "OVERFLOW within closure! Skipping step, reducing loss scale to {}\n"
)
SKIPPED = "Gradient overflow.  Skipping step, reducing loss scale to {}\n"


@EAGER_OR_JIT
def test_a_closure_that_overflows_is_called_again_at_a_lower_scale(where, capsys):
    # 4 * 2**14 is beyond float16, 4 * 2**13 is not.
    optimizer = make(optax.sgd(2.0**-4))
    start = optimizer.init(params())
    loss, state = step_with(optimizer, dot, where)(start, like(4.0))
    assert not state.overflow
    assert state.loss_scale == 2.0**13
    assert state.loss_scaler.unskipped == 1
    assert float(loss) == float(dot(params(), like(4.0)))
    assert state.params["dense"]["bias"].tolist() == [-0.125, 0.0]
    assert state.params["norm"] == 2.75
    printed = [OVERFLOW_IN_CLOSURE.format(2.0**n) for n in (15, 14, 13)]
    assert capsys.readouterr().out == ("".join(printed) if where == "eager" else "")


@EAGER_OR_JIT
def test_a_closure_that_overflows_at_the_floor_is_given_up(where, capsys):
    optimizer = make(dynamic_loss_args={"min_loss_scale": 2.0**14})
    start = optimizer.init(params())
    _, state = step_with(optimizer, dot, where)(start, like(np.inf))
    assert state.overflow
    assert state.loss_scale == 2.0**14
    assert_same_bits((state.params, state.opt_state), (start.params, start.opt_state))
    printed = OVERFLOW_IN_CLOSURE.format(2.0**15) + SKIPPED.format(2.0**14)
    assert capsys.readouterr().out == (printed if where == "eager" else "")
    # The next closure begins with zero_grad, as this one did.
    _, state = step_with(optimizer, dot, where)(state, data(1)[0])
    assert not state.overflow
    assert np.any(np.asarray(state.params["norm"] != start.params["norm"]))


def test_a_static_scale_calls_the_closure_once():
    calls = []
    optimizer = make(optax.sgd(0.5), dynamic=False, static_loss_scale=8.0)

    def closure(state):
        calls.append(0)
        return optimizer.backward(optimizer.zero_grad(state), dot, like(np.inf))

    _, state = optimizer.step(optimizer.init(params()), closure)
    assert len(calls) == 1
    assert not state.overflow
    assert state.params["norm"] == -np.inf


def test_the_first_call_of_a_closure_is_marked():
    optimizer, marks = make(), []

    def closure(state):
        marks.append(bool(state.first_closure_call_this_step))
        return optimizer.backward(optimizer.zero_grad(state), dot, like(8.0))

    _, state = optimizer.step(optimizer.init(params()), closure)
    assert marks == [True, False, False, False, False]
    assert state.first_closure_call_this_step


@pytest.mark.parametrize(
    "closure",
    [lambda state: state, lambda state: jnp.float32(1), lambda state: (None, state)],
)
def test_a_closure_returns_loss_and_state(closure):
    optimizer = make()
    with pytest.raises(TypeError, match="closure"):
        optimizer.step(optimizer.init(params()), closure)


TARGET = like(0.75)
CURVATURE = {"dense": {"kernel": 10.0, "bias": 5.0}, "norm": 3.0}
BACKTRACKING = optax.scale_by_backtracking_linesearch(
    max_backtracking_steps=15, store_grad=True
)


def bowl(p):
    """Convex and not quadratic; least at TARGET."""
    far = jax.tree.map(lambda p, t: p.astype(F32) - t, p, TARGET)
    parts = jax.tree.map(lambda d, c: c * (d**2 + 0.1 * d**4).sum(), far, CURVATURE)
    return sum(jax.tree.leaves(parts))


def half_like(masters):
    """The params that belong to some masters."""
    return jax.tree.map(lambda m, p: m.astype(p.dtype), masters, params())


def line_search_by_hand(tx, masters, steps):
    """optax's recipe, with the loss at rounded weights and its gradient there."""

    @jax.custom_vjp
    def value_fn(masters):
        return bowl(half_like(masters))

    def forward(masters):
        loss, grads = jax.value_and_grad(bowl)(half_like(masters))
        return loss, jax.tree.map(lambda g: g.astype(F32), grads)

    value_fn.defvjp(forward, lambda grads, ct: (jax.tree.map(lambda g: ct * g, grads),))

    @jax.jit
    def step(masters, state):
        value, grad = jax.value_and_grad(value_fn)(masters)
        updates, state = tx.update(
            grad, state, masters, value=value, grad=grad, value_fn=value_fn
        )
        return value, optax.apply_updates(masters, updates), state

    state, losses = tx.init(masters), []
    for _ in range(steps):
        value, masters, state = step(masters, state)
        losses.append(float(value))
    return losses, masters


@pytest.mark.standard_promotion  # for optax.lbfgs
def test_a_line_search_evaluates_the_closure_at_other_weights():
    tx = optax.lbfgs(memory_size=3)
    optimizer = make(tx)
    state = optimizer.init(params())
    step = step_with(optimizer, bowl, "jit")
    masters = jax.tree.map(lambda p: p.astype(F32), params())
    losses, masters = line_search_by_hand(tx, masters, 12)
    for expected in losses:
        loss, state = step(state)
        np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)
    # The first gradient, 139, fits at 2**8; 12 clean steps are three windows.
    assert state.loss_scale == 2.0**8 * 2**3
    found = optimizer.master_params(state)
    for leaf in jax.tree.leaves(found):
        np.testing.assert_allclose(leaf, 0.75, atol=1e-2)
    assert losses[0] > 1000 * losses[-1]
    assert_same_bits(state.params, half_like(found))


@pytest.mark.standard_promotion
def test_a_line_search_runs_eagerly():
    optimizer = make(optax.chain(optax.sgd(1.0), BACKTRACKING))
    loss, state = step_with(optimizer, bowl, "eager")(optimizer.init(params()))
    np.testing.assert_allclose(loss, bowl(params()), rtol=1e-6)
    assert bowl(state.params) < 0.5 * loss
    assert_rounded(state.params, optimizer.master_params(state))


# Messages


def test_a_skip_is_printed_outside_of_jit(capsys):
    optimizer = make()
    _, state = optimizer.backward(optimizer.init(params()), dot, like(np.inf))
    assert capsys.readouterr().out == ""
    optimizer.step(state)
    assert capsys.readouterr().out == SKIPPED.format(2.0**15)
    jax.jit(optimizer.step)(state)
    assert capsys.readouterr().out == ""
    _, state = optimizer.backward(optimizer.zero_grad(state), dot, data(1)[0])
    optimizer.step(state)
    assert capsys.readouterr().out == ""


def test_verbose_prints_what_is_received(capsys):
    optimizer = FP16_Optimizer(optax.sgd(1.0))
    optimizer.init(params())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "FP16_Optimizer processing param group 0:"
    assert sorted(line.strip() for line in lines[1:]) == sorted(
        f"FP16_Optimizer received {what}"
        for what in ("float16 with (2,)", "float16 with (3, 2)", "float32 with ()")
    )
    FP16_Optimizer(optax.sgd(1.0), verbose=False).init(params())
    assert capsys.readouterr().out == ""


# Errors


def test_an_unknown_option_of_the_scale_is_named():
    with pytest.raises(TypeError, match="growth"):
        make(dynamic_loss_args={"growth": 2})


def test_options_without_effect_warn():
    with pytest.warns(jamp.UnusedOptionWarning, match="dynamic_loss_args"):
        FP16_Optimizer(optax.sgd(1.0), dynamic_loss_args={"init_scale": 8.0})
    with pytest.warns(jamp.UnusedOptionWarning, match="static_loss_scale"):
        optimizer = FP16_Optimizer(
            optax.sgd(1.0), 128.0, dynamic_loss_scale=True, verbose=False
        )
    assert optimizer.init(params()).loss_scale == 2.0**16


@pytest.mark.parametrize("scale", [0, -1.0, np.inf, np.nan])
def test_impossible_scales_are_refused(scale):
    with pytest.raises(REFUSED):
        FP16_Optimizer(optax.sgd(1.0), static_loss_scale=scale)
    with pytest.raises(REFUSED):
        make(dynamic_loss_args={"init_scale": scale})
    optimizer = make()
    with pytest.raises(REFUSED):
        optimizer.set_loss_scale(optimizer.init(params()), scale)


def test_an_optimizer_that_is_none_is_refused():
    masters = jax.tree.map(lambda p: p.astype(F32), params())
    amp = jamp.initialize(masters, optax.sgd(1.0), "O2", verbosity=0)
    for tx in (amp, amp.tx, jamp.master_weights(optax.sgd(1.0)), make(), None):
        with pytest.raises(REFUSED):
            FP16_Optimizer(tx)


def test_other_floats_are_refused_by_path():
    for dtype in (jnp.float8_e4m3fn, np.float64):
        tree = params() | {"extra": [np.ones(2, dtype)]}
        with pytest.raises(TypeError, match=r"Wrapped parameters must be.*extra"):
            make().init(tree)


def test_leaves_that_are_no_floats_stay():
    tree = params() | {"steps": jnp.asarray([3], jnp.int32)}
    optimizer, x = make(), data(1)[0]
    state = optimizer.init(tree)

    def loss_fn(p, x):
        return dot({name: p[name] for name in x}, x)

    _, state = optimizer.backward(state, loss_fn, x)
    _, state_of_floats = optimizer.backward(optimizer.init(params()), dot, x)
    state, floats = optimizer.step(state), optimizer.step(state_of_floats)
    assert_same_bits(state.params["steps"], tree["steps"])
    assert_same_bits({name: state.params[name] for name in x}, floats.params)


def test_bfloat16_and_float16_may_be_mixed():
    tree = params() | {"norm": jnp.asarray(3.0, BF16)}
    optimizer = make()
    _, state = optimizer.backward(optimizer.init(tree), dot, like(2.0**-9))
    assert {x.dtype for x in jax.tree.leaves(state.master_grads)} == {jnp.dtype(F32)}
    state = optimizer.step(state)
    assert state.params["norm"].dtype == BF16
    assert state.params["dense"]["bias"].dtype == F16
