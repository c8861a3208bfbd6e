"""fp16_utils.FlatFP16_Optimizer against the parts that it is made of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp.fp16_utils import DynamicLossScaler, FlatFP16_Optimizer
from jamp.optimizers import fused_adam, fused_sgd
from tests.fp16_utils.fp16 import (
    BF16,
    F32,
    cut_down,
    data,
    group,
    like,
    make,
    params,
    steps,
)
from tests.optimizers.fused import update
from tests.support.bits import assert_same_bits
from tests.support.states import dot


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


# What a step computes


def assert_run(trees, txs, xs, keys=None, where="jit"):
    """A run with an optimizer per group: each does what its own one does of a vector.

    Which is compared with float64, as the scaler is; masters are rounded bit by bit.
    """
    pick = lambda tree: [tree] if keys is None else [tree[k] for k in keys]  # noqa: E731
    optimizer = cut_down(txs[0] if keys is None else dict(zip(keys, txs, strict=True)))
    _, seen = steps(optimizer, optimizer.zero_grad(optimizer.init(trees)), xs, where)
    scaler = DynamicLossScaler(2.0**16, scale_factor=2.0, scale_window=1000)
    counters, wanted = scaler.init(), [jnp.float32(flat(tree)) for tree in pick(trees)]
    inner = [tx.init(master) for tx, master in zip(txs, wanted, strict=True)]
    for x, state in zip(xs, seen, strict=True):
        scale = counters.cur_scale
        grads = [scaled(x, scale) for x in pick(x)]
        bad = not all(np.isfinite(g).all() for g in grads)
        for i, tx in enumerate(() if bad else txs):
            given = jnp.asarray(grads[i]), inner[i], wanted[i]
            updates, inner[i] = update(tx, *given, grad_scale=scale)
            wanted[i] += updates
        counters = scaler.update_scale(counters, bad)
        assert_same_bits(state.loss_scaler, counters)
        fields = map(pick, (state.params, state.fp16_flat, state.fp32_flat))
        for tree, half, master, vector in zip(*fields, wanted, strict=True):
            np.testing.assert_allclose(master, vector, rtol=1e-6, atol=1e-6)
            assert_same_bits(np.asarray(master).astype(half.dtype), np.asarray(half))
            assert_same_bits(flat(tree), np.asarray(half))
    assert jax.tree.structure(state.params) == jax.tree.structure(trees)
    return state


def scaled(tree, scale):
    """A vector of what a backward pass leaves in float16."""
    with np.errstate(over="ignore", invalid="ignore"):
        return (np.float32(flat(tree)) * np.float32(scale)).astype(np.float16)


def adam(**options):
    return fused_adam(**{"learning_rate": 1e-2, "legacy": True} | options)


def test_a_group_is_one_half_and_one_fp32_vector():
    optimizer, tree = cut_down(), group(dtype=BF16)
    state, xs = optimizer.init(tree), data(1, tree=group())
    _, pending = optimizer.backward(state, dot, xs[0])
    vectors = (state.fp16_flat, state.opt_state, pending.grads)
    described = [(v.dtype, v.shape) for v in jax.tree.leaves(vectors) if v.ndim]
    assert described == [(d, (11,)) for d in (BF16, F32, F32, F32, BF16)]
    assert_same_bits(jax.jit(optimizer.init)(tree), state)
    assert_same_bits(state.params, tree)


@pytest.mark.parametrize(
    "where, tx",
    [
        ("jit", adam(weight_decay=0.1, bias_correction=False)),
        ("scan", adam(max_grad_norm=6.5e-3, eps=1e-4)),
        ("eager", fused_sgd(0.5, momentum=0.9)),
    ],
    ids=["adam", "clipped", "sgd"],
)
def test_steps_are_those_of_8_1_and_skips_are_in_silence(where, tx, capsys):
    tree, overflows = group(), (3, 4, 8)
    xs = data(12, overflows, tree=tree)
    state = assert_run(tree, [tx], xs, where=where)
    assert int(state.loss_scaler.last_overflow_iter) == 8
    norms = [np.linalg.norm(flat(x)) for i, x in enumerate(xs) if i not in overflows]
    assert min(norms) < 6.5e-3 < max(norms)
    assert np.abs(state.fp32_flat - np.float32(flat(tree))).max() > 1e-3
    assert capsys.readouterr().out == ""


def test_norms_and_clipping_are_per_group():
    txs = [
        adam(learning_rate=0.1, max_grad_norm=2.0**-9, eps=1e-4),
        adam(max_grad_norm=1.0, weight_decay=0.1, eps=1e-4),
    ]
    trees = {"head": group(0), "body": group(1)}
    # The first overflow is in one leaf of one group.
    assert_run(trees, txs, data(6, (0, 4), tree=trees), tuple(trees))


def test_backward_accumulates_in_half():
    optimizer = cut_down(dynamic_loss_scale=False, static_loss_scale=4.0)
    tree, loss_fn = group(), lambda p, x: (dot(p, x), 7)
    state, sums = optimizer.init(tree), np.zeros(11, np.float16)
    for x in data(3, tree=tree):
        (loss, aux), state = optimizer.backward(state, loss_fn, x, has_aux=True)
        assert (loss.dtype, aux) == (F32, 7)
        np.testing.assert_allclose(loss, dot(tree, x), rtol=1e-6)
        sums = sums + scaled(x, 4.0)
    assert_same_bits(np.asarray(state.grads), sums)


# Skips, and the scale


@pytest.mark.parametrize(
    "where, dynamic, bad", [("eager", True, 0), ("eager", False, 1), ("jit", True, 1)]
)
def test_a_skip_leaves_every_bit_with_a_static_scale_too(where, dynamic, bad, capsys):
    kind, scale = ("dynamic", 2.0**16) if dynamic else ("static", 128.0)
    optimizer = cut_down(
        [fused_adam(1e-2, legacy=True)] * 2,
        dynamic_loss_scale=dynamic,
        static_loss_scale=1.0 if dynamic else scale,
        verbose=dynamic,  # a static scale prints anyway
    )
    trees = [group(0), group(1)]
    good, x = like(2.0**-9, trees), like(2.0**-9, trees)
    x[bad]["layer"]["bias"] = x[bad]["layer"]["bias"].at[2].set(np.nan)
    before, _ = steps(optimizer, optimizer.init(trees), [good])
    step = jax.jit(optimizer.step) if where == "jit" else optimizer.step
    after = step(optimizer.backward(before, dot, x)[1])
    for field in ("fp16_flat", "opt_state", "params"):
        assert_same_bits(getattr(after, field), getattr(before, field))
    assert after.overflow
    assert after.loss_scaler.cur_iter == 2
    assert after.loss_scale == scale / (1 + dynamic)
    message = f"Grad overflow on iteration 1\nUsing {kind} loss scale of {scale}\n"
    assert capsys.readouterr().out == (message if where == "eager" else "")
    clean = step(optimizer.backward(optimizer.zero_grad(after), dot, good)[1])
    assert not clean.overflow


def test_a_norm_beyond_float32_is_an_overflow():
    # Finite gradients, but their squares are not; 8.2 looks at the norm.
    optimizer, tree = cut_down(dynamic_loss_scale=False), group(dtype=BF16)
    _, state = optimizer.backward(optimizer.init(tree), dot, like(1e20, tree))
    assert np.isfinite(np.float32(state.grads)).all()
    after = optimizer.step(state)
    assert after.overflow
    assert_same_bits(after.params, tree)


UNUSED = jamp.UnusedOptionWarning
REFUSED = [
    (lambda *_: cut_down(dynamic_loss_args={}), SystemError, "Do not support dynamic"),
    (lambda *_: FlatFP16_Optimizer([fused_adam(), optax.sgd(1.0)]), TypeError, "fused"),
    (lambda o, _: o.init([group(), jnp.ones(2, BF16)]), TypeError, "all float16, or"),
    (
        lambda *_: cut_down([fused_adam(), fused_adam()]).init([group(), {}]),
        *(TypeError, r"params\[1\] hold no arrays"),
    ),
    (lambda o, s: o.load_state_dict(s, []), TypeError, "takes a mapping, got list"),
    (lambda o, _: o.load_state_dict(group(), {}), TypeError, "take the state that"),
    (lambda o, s: o.step(s), ValueError, "backward"),
    (lambda o, s: o.step(s, lambda s: s), UNUSED, "does not call a closure"),
    (
        lambda *_: cut_down({"a": fused_adam()}).init({"b": group()}),
        *(ValueError, r"same container.* keys \['b'\] of params.* keys \['a'\]"),
    ),
]


@pytest.mark.parametrize("call, error, words", REFUSED)
def test_what_is_refused(call, error, words):
    optimizer = cut_down()
    with pytest.raises(error, match=words):
        call(optimizer, optimizer.init(group()))


def test_what_does_not_fit_is_refused():
    optimizer, tree = cut_down(), group()
    state = optimizer.init(tree)
    good, before = optimizer.state_dict(state), jax.tree.map(np.array, state)
    for key in good:
        saved = {name: value for name, value in good.items() if name != key}
        with pytest.raises(ValueError, match=key):
            optimizer.load_state_dict(state, saved)
    for key, value in {"cur_scale": np.float32(np.nan), "cur_iter": -1}.items():
        with pytest.raises(ValueError, match=f"{key}` must be a"):
            optimizer.load_state_dict(state, good | {key: value})
    static = cut_down(dynamic_loss_scale=False)
    with pytest.raises(ValueError, match="scale_window is unexpected"):
        static.load_state_dict(static.init(tree), good)
    assert_same_bits(state, before)


def test_a_loss_that_is_not_finite_skips_though_its_gradients_are_finite():
    """`maximum` selects in the backward pass and hides the NaN of the other branch."""

    def loss_fn(params, bad):
        return jnp.maximum(dot(params, like(2.0**-9, params)), 0) + bad

    for optimizer, tree in ((cut_down(), group()), (make(), params())):
        start = optimizer.init(tree)
        for bad in (np.inf, np.nan):
            loss, state = optimizer.backward(start, loss_fn, np.float32(bad))
            after = optimizer.step(state)
            assert not np.isfinite(loss)
            assert after.overflow
            assert after.loss_scale == 2.0**15
            assert_same_bits(after.params, start.params)
    static = make(dynamic=False)  # apex's static scale checks nothing
    _, state = static.backward(static.init(params()), loss_fn, np.float32(np.nan))
    assert not static.step(state).overflow
