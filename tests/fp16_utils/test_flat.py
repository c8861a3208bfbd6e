"""Test fp16_utils.FlatFP16_Optimizer against its parts."""

import functools

import jax
import numpy as np
import optax
import pytest

import jamp
from jamp.fp16_utils import FlatFP16_Optimizer
from jamp.optimizers import fused_adam, fused_sgd
from tests.fp16_utils.fp16 import (
    BF16,
    F32,
    cut_down,
    data,
    group,
    in_groups,
    like,
    run,
    steps,
)
from tests.support.bits import assert_rounded_alike, assert_same_bits
from tests.support.states import dot


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def assert_as_amp(trees, txs, xs, where="jit", passes=1):
    """Checks each step against AmpState's of the summed gradients at O2.

    Params must equal the rounded masters bit for bit.
    """
    rule = jamp.DynamicLossScale(2.0**16, 2.0, 1000, 1.0, None)
    wide = jax.tree.map(lambda p: p.astype(F32), trees)
    amp = jamp.initialize(wide, txs, "O2", loss_scale=rule, verbosity=0)

    def amp_step(state, xs):
        grads = [jamp.scaled_grad(dot)(state, x) for x in xs]
        total = jax.tree.map(lambda *g: sum(g), *grads)
        state = state.apply_gradients(grads=total)
        return state, state

    theirs = run(amp_step, amp, in_groups(xs, passes), where)
    optimizer = cut_down(txs)
    mine = steps(optimizer, optimizer.init(trees), xs, where, passes)
    for a, b in zip(mine, theirs, strict=True):
        skipped = jax.tree.leaves(b.last_step_skipped)
        assert_same_bits([a.loss_scaler, a.overflow], [b.loss_scales[0], skipped[0]])
        masters = optimizer.master_params(a)
        assert_rounded_alike(masters, jamp.master_params(b), 1e-6)
        rounded = jax.tree.map(lambda m, p: m.astype(p.dtype), masters, trees)
        assert_same_bits(a.params, rounded)
    assert np.abs(flat(masters) - flat(wide)).max() > 1e-3


def adam(**options):
    return fused_adam(**{"learning_rate": 1e-2, "legacy": True} | options)


def test_moments_of_a_group_are_one_float32_vector():
    optimizer, trees = cut_down([adam(), adam()]), [group(dtype=BF16), group()]
    *_, state = steps(optimizer, optimizer.init(trees), data(2, tree=trees))
    state = optimizer.zero_grad(state)
    moments = [x for x in jax.tree.leaves(state.opt_state.inner_state) if x.ndim]
    assert [(x.dtype, x.shape) for x in moments] == [(F32, (11,))] * 4
    start = jax.jit(optimizer.init)(trees)
    saved = optimizer.state_dict(state)
    assert_same_bits(optimizer.load_state_dict(start, saved), state)


@pytest.mark.parametrize("dynamic, bad", [(True, 0), (False, 1), (True, 1)])
def test_a_skip_leaves_every_bit_with_a_static_scale_too(dynamic, bad):
    scale = 2.0**16 if dynamic else 128.0
    optimizer = cut_down(
        [fused_adam(1e-2, legacy=True)] * 2,
        dynamic_loss_scale=dynamic,
        static_loss_scale=1.0 if dynamic else scale,
    )
    trees = [group(0), group(1)]
    good, x = like(2.0**-9, trees), like(2.0**-9, trees)
    x[bad]["layer"]["bias"] = x[bad]["layer"]["bias"].at[2].set(np.nan)
    (before,) = steps(optimizer, optimizer.init(trees), [good])
    before = optimizer.zero_grad(before)
    step = jax.jit(optimizer.step)
    _, state = optimizer.backward(before, dot, good)
    after = step(optimizer.backward(state, dot, x)[1])
    for field in ("params", "opt_state"):
        assert_same_bits(getattr(after, field), getattr(before, field))
    assert (after.overflow, after.loss_scale) == (True, scale / (1 + dynamic))
    # As in apex, its gradients stay until zero_grad.
    assert step(after).loss_scale == after.loss_scale / (1 + dynamic)
    clean = step(optimizer.backward(optimizer.zero_grad(after), dot, good)[1])
    assert not clean.overflow


@pytest.mark.parametrize(
    "where, passes, tx",
    [
        ("jit", 1, adam(weight_decay=0.1, bias_correction=False)),
        ("jit", 2, adam(max_grad_norm=6.5e-3, eps=1e-4)),
        ("scan", 3, adam()),
        ("eager", 1, fused_sgd(0.5, momentum=0.9)),
    ],
    ids=["adam", "clipped", "scan", "sgd"],
)
def test_it_is_ampstate_with_overflows_in_any_pass(where, passes, tx):
    bad, tree = (0, 3, 4, 5, 6, 19, 22), group()
    xs = data(12 * passes, bad, tree=tree)
    assert_as_amp(tree, tx, xs, where, passes)
    norms = [np.linalg.norm(flat(x)) for i, x in enumerate(xs) if i not in bad]
    assert min(norms) < 6.5e-3 < max(norms)


def test_norms_and_clipping_are_per_group():
    txs = {
        "head": adam(learning_rate=0.1, max_grad_norm=2.0**-9, eps=1e-4),
        "body": adam(max_grad_norm=1.0, weight_decay=0.1, eps=1e-4),
    }
    trees = {"head": group(0), "body": group(1)}
    # The first overflow is in one leaf of one group.
    assert_as_amp(trees, txs, data(6, (0, 4), tree=trees))


def test_a_closure_steps_and_under_a_static_scale_skips_once():
    optimizer, tree = cut_down(dynamic_loss_scale=False), group()
    start = optimizer.init(tree)

    def closure(state, x=np.inf):
        return optimizer.backward(optimizer.zero_grad(state), dot, like(x, tree))

    _, state = jax.jit(lambda state: optimizer.step(state, closure))(start)
    assert state.overflow and state.loss_scaler.consecutive_skips == 1
    assert_same_bits((state.params, state.opt_state), (start.params, start.opt_state))
    clean = functools.partial(closure, x=0.1)
    _, state = optimizer.step(start, clean)
    assert_same_bits(state.params, optimizer.step(clean(start)[1]).params)
    assert not np.array_equal(flat(state.params), flat(tree))


def test_a_norm_beyond_float32_in_one_group_is_an_overflow():
    # The gradients are finite, but their squares are not. apex checks the norm.
    trees = [group(dtype=BF16), group(dtype=BF16)]
    optimizer = cut_down([adam(), adam()], dynamic_loss_scale=False)
    x = [like(1.0, trees[0]), like(1e20, trees[1])]
    _, state = optimizer.backward(optimizer.init(trees), dot, x)
    assert np.isfinite(flat(state.model_grads)).all()
    after = optimizer.step(state)
    assert after.overflow
    assert_same_bits(after.params, trees)


REFUSED = [
    (lambda: cut_down(dynamic_loss_args={}), SystemError, "Do not support dynamic"),
    (lambda: FlatFP16_Optimizer([fused_adam(), optax.sgd(1.0)]), TypeError, "fused"),
    (
        lambda: cut_down([fused_adam(), fused_adam()]).init([group(), {}]),
        *(ValueError, r"params\[1\] hold no arrays: got {}"),
    ),
    (
        lambda: cut_down({"a": fused_adam()}).init({"b": group()}),
        *(ValueError, r"same container.* keys \['b'\] of params.* keys \['a'\]"),
    ),
]


@pytest.mark.parametrize("call, error, words", REFUSED)
def test_what_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()
