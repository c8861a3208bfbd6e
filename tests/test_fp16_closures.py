"""fp16_utils.FP16_Optimizer: closures and line searches, messages, and errors."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp.fp16_utils import FP16_Optimizer
from tests.bits import assert_same_bits
from tests.fp16 import F32, data, dot, like, make, params

SGD = optax.sgd(1.0)

# Closures


def step_with(optimizer, loss_fn, where="jit"):
    def step(state, *args):
        def closure(state):
            """What a user of apex writes: zero_grad, backward, and the loss."""
            return optimizer.backward(optimizer.zero_grad(state), loss_fn, *args)

        return optimizer.step(state, closure)

    return jax.jit(step) if where == "jit" else step


SKIPPED = "Gradient overflow.  Skipping step, reducing loss scale to {}\n"
IN_CLOSURE = "OVERFLOW within closure! Skipping step, reducing loss scale to {}\n"
EAGER_OR_JIT = pytest.mark.parametrize("where", ["eager", "jit"])


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
    printed = [IN_CLOSURE.format(2.0**n) for n in (15, 14, 13)]
    assert capsys.readouterr().out == ("".join(printed) if where == "eager" else "")


@EAGER_OR_JIT
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


def test_the_first_call_is_marked_and_a_static_scale_has_no_other():
    for dynamic, x, calls in ((True, 8.0, 5), (False, np.inf, 1)):
        optimizer, seen = make(dynamic=dynamic), []

        def closure(state, optimizer=optimizer, seen=seen, x=x):
            seen.append(bool(state.first_closure_call_this_step))
            return optimizer.backward(optimizer.zero_grad(state), dot, like(x))

        _, state = optimizer.step(optimizer.init(params()), closure)
        assert seen == [True] + [False] * (calls - 1)
        assert state.first_closure_call_this_step
        assert not state.overflow


def bowl(p):
    """Convex and not quadratic; least at 0.75."""
    far = [x.astype(F32) - 0.75 for x in jax.tree.leaves(p)]
    return sum((x**2 + x**4).sum() for x in far)


def line_search_by_hand(tx, masters, half, steps):
    """optax's recipe, with the loss at rounded weights and its gradient there."""

    def value_fn(masters):
        return bowl(jax.tree.map(lambda m, p: m.astype(p.dtype), masters, half))

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
    return losses


@pytest.mark.standard_promotion  # for optax's line search
def test_a_line_search_evaluates_the_closure_at_other_weights():
    backtracking = optax.scale_by_backtracking_linesearch(15, store_grad=True)
    tx = optax.chain(optax.sgd(1.0), backtracking)
    optimizer = make(tx)
    state, step = optimizer.init(params()), step_with(optimizer, bowl)
    losses = line_search_by_hand(tx, optimizer.master_params(state), state.params, 8)
    for expected in losses:
        loss, state = step(state)
        np.testing.assert_allclose(loss, expected, rtol=1e-4, atol=1e-5)
    # Gradients of 89 fit at 2**9, the next, of 156, at 2**8; then a window ends.
    assert (state.loss_scale, state.loss_scaler.unskipped) == (2.0**9, 3)
    assert losses[0] > 100 * losses[-1]


# Messages and errors


def test_verbose_prints_what_is_received(capsys):
    FP16_Optimizer(SGD).init(params())
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == "FP16_Optimizer processing param group 0:"
    received = ("float16 with (2,)", "float16 with (3, 2)", "float32 with ()")
    assert lines == [f"FP16_Optimizer received {x}" for x in received]


EXTRA = "Wrapped parameters must be.*extra"
GRADIENTS = "must call `optimizer.zero_grad` and `optimizer.backward`"
UNUSED = jamp.UnusedOptionWarning
# What is called with an optimizer, a state, and one whose gradients are None.
REFUSED = [
    (lambda *_: make(dynamic_loss_args={"growth": 2}), TypeError, "no 'growth'; its"),
    (lambda *_: make(dynamic_loss_args={"init_scale": 0}), ValueError, "init_scale"),
    (lambda *_: make(dynamic=False, dynamic_loss_args={}), UNUSED, "dynamic_loss_args"),
    (lambda *_: make(static_loss_scale=8.0), UNUSED, "static_loss_scale .*=False"),
    (lambda *_: FP16_Optimizer(SGD, 0), ValueError, "between"),
    (lambda o, s, _: o.set_loss_scale(s, -1.0), ValueError, "`value` must be"),
    (lambda *_: FP16_Optimizer(jamp.master_weights(SGD)), ValueError, "keeps the mast"),
    (lambda *_: FP16_Optimizer(make()), TypeError, "FP16_Optimizer object"),
    (lambda *_: FP16_Optimizer(None), TypeError, "None"),
    (lambda o, *_: o.init({"extra": [jnp.ones(2, "float8_e4m3fn")]}), TypeError, EXTRA),
    (lambda o, *_: o.init({"extra": [np.ones(2)]}), TypeError, EXTRA),
    (lambda o, s, _: o.step(s.params), TypeError, "step.*takes the state.*got dict"),
    (lambda o, _, none: o.step(none), ValueError, "backward"),
    (lambda o, _, none: o.update_master_grads(none), ValueError, "backward"),
    (lambda o, _, none: o.clip_master_grads(none, 1.0), ValueError, "backward"),
    (lambda o, s, _: o.step(s, lambda s: s), TypeError, r"\(loss, state\)"),
    (lambda o, s, _: o.step(s, lambda s: (None, s)), TypeError, "the loss None"),
    (lambda o, s, _: o.step(s, lambda s: (jnp.ones(2), s)), TypeError, "a scalar"),
    (lambda o, s, none: o.step(s, lambda _: (1.0, none)), TypeError, GRADIENTS),
    (lambda o, s, _: o.backward(s, lambda p: p["dense"]["bias"]), TypeError, "scalar"),
    (lambda o, s, _: jax.jit(o.inspect_master_grad_data)(s), TypeError, "outside of"),
    (lambda o, s, _: o.load_state_dict(s, [1]), TypeError, "mapping, got list"),
]


@pytest.mark.parametrize("call, error, words", REFUSED)
def test_what_is_refused(call, error, words):
    optimizer = make()
    state = optimizer.init(params())
    none = optimizer.zero_grad(state, set_grads_to_None=True)
    with pytest.raises(error, match=f"(?s){words}"):
        call(optimizer, state, none)
