"""optimizers.FP16_Optimizer, the cut-down one, against float64; its bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp import optimizers as jo
from jamp.optimizers import FP16_Optimizer, fused_adam
from tests import h200
from tests.bits import assert_same_bits
from tests.fp16 import BF16, F16, F32, cut_down, data, dot, group, host, like, steps
from tests.oracles import fp16_optimizer as oracle


def flat(tree):
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


# What a step computes


def assert_run(optimizer, trees, adams, xs, keys=None, where="jit"):
    """A run of groups, bit by bit where they are rounded; the last state."""
    pick = lambda tree: [tree] if keys is None else [tree[k] for k in keys]  # noqa: E731
    model = oracle.CutDown([host(tree) for tree in pick(trees)], adams)
    start = optimizer.zero_grad(optimizer.init(trees))
    _, seen = steps(optimizer, start, xs, where)
    for x, state in zip(xs, seen, strict=True):
        model.backward([host(tree) for tree in pick(x)])
        model.step()
        model.zero_grad()
        assert tuple(map(float, state.loss_scaler)) == model.scaler.state
        for tree, half, master, wanted in zip(
            *map(pick, (state.params, state.fp16_flat, state.fp32_flat)),
            model.masters,
            strict=True,
        ):
            np.testing.assert_allclose(master, wanted, rtol=1e-6, atol=1e-6)
            assert_same_bits(np.asarray(master).astype(half.dtype), np.asarray(half))
            assert_same_bits(flat(tree), np.asarray(half))
    assert jax.tree.structure(state.params) == jax.tree.structure(trees)
    return state


def test_a_group_is_one_half_and_one_fp32_vector():
    optimizer, tree = cut_down(), group(dtype=BF16)
    state, xs = optimizer.init(tree), data(1, tree=group())
    _, pending = optimizer.backward(state, dot, xs[0])
    vectors = (state.fp16_flat, state.fp32_flat, state.opt_state, pending.grads)
    described = [(v.dtype, v.shape) for v in jax.tree.leaves(vectors) if v.ndim]
    assert described == [(d, (11,)) for d in (BF16, F32, F32, F32, BF16)]
    assert_same_bits(jax.jit(optimizer.init)(tree), state)
    assert_same_bits(state.params, tree)
    assert_run(optimizer, tree, [oracle.OldAdam(1e-2)], xs)


LEGACY = {
    "eager": {},
    "scan": {"eps": 1e-3, "b1": 0.8, "b2": 0.99},
    "inside_sqrt": {"eps": 1e-5, "eps_inside_sqrt": True},
    "decay": {"weight_decay": 0.1},
    "uncorrected": {"bias_correction": False, "weight_decay": 0.01},
    "clips_sometimes": {"max_grad_norm": 6.5e-3, "eps": 1e-4},
}


@pytest.mark.parametrize("name", LEGACY)
def test_old_adam_is_that_of_8_1_and_skips_in_silence(name, capsys):
    tree, kwargs, overflows = group(), LEGACY[name], (3, 4, 8)
    optimizer = cut_down(fused_adam(1e-2, legacy=True, **kwargs))
    adam, xs = oracle.OldAdam(1e-2, **kwargs), data(12, overflows, tree=tree)
    where = name if name in ("eager", "scan") else "jit"
    state = assert_run(optimizer, tree, [adam], xs, where=where)
    assert int(state.last_overflow_iter) == 8
    if name == "clips_sometimes":
        clean = [x for i, x in enumerate(xs) if i not in overflows]
        norms = [oracle.total_norm(host(x)) for x in clean]
        assert min(norms) < kwargs["max_grad_norm"] < max(norms)
    assert np.abs(state.fp32_flat - np.float32(flat(tree))).max() > 1e-3
    for field in ("mu", "nu"):
        moment = optax.tree.get(state.opt_state, field)
        np.testing.assert_allclose(moment, getattr(adam, field), rtol=1e-5, atol=1e-9)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("keys", [(0, 1), ("head", "body")])
def test_norms_and_clipping_are_per_group(keys):
    pack = list if keys == (0, 1) else lambda pair: dict(zip(keys, pair, strict=True))
    options = [
        {"learning_rate": 0.1, "max_grad_norm": 2.0**-9, "eps": 1e-4},
        {"learning_rate": 0.01, "max_grad_norm": 1.0, "weight_decay": 0.1, "eps": 1e-4},
    ]
    trees = pack([group(0), group(1)])
    optimizer = cut_down(pack([fused_adam(**o, legacy=True) for o in options]))
    adams = [oracle.OldAdam(**o) for o in options]
    # The first overflow is in one leaf of one group.
    assert_run(optimizer, trees, adams, data(6, (0, 4), tree=trees), keys)


@pytest.mark.parametrize(
    "tx", [fused_adam(1e-2), jo.fused_sgd(0.5, 0.9)], ids=["adam", "sgd"]
)
def test_other_fused_optimizers_step_as_in_ampstate(tx):
    optimizer, tree = cut_down(tx), group()
    xs = data(6, (4,), tree=tree)
    state, _ = steps(optimizer, optimizer.init(tree), xs)
    wide = jax.tree.map(lambda p: p.astype(F32), tree)
    amp = jamp.initialize(wide, tx, "O2", verbosity=0)
    step = jax.jit(lambda s, x: s.apply_gradients(grads=jamp.scaled_grad(dot)(s, x)))
    for x in xs:
        amp = step(amp, x)
    masters = flat(jamp.master_params(amp))
    np.testing.assert_allclose(state.fp32_flat, masters, rtol=2e-7)
    assert amp.skipped_steps == 1


def test_backward_accumulates_in_half():
    tree, model = group(), oracle.CutDown([host(group())], scale=4.0)
    optimizer = cut_down(dynamic_loss_scale=False, static_loss_scale=4.0)
    state, loss_fn = optimizer.init(tree), lambda p, x: (dot(p, x), 7)
    for x in data(3, tree=tree):
        (loss, aux), state = optimizer.backward(state, loss_fn, x, has_aux=True)
        assert (loss.dtype, aux) == (F32, 7)
        np.testing.assert_allclose(loss, dot(tree, x), rtol=1e-6)
        model.backward([host(x)])
    assert_same_bits(np.asarray(state.grads), flat(model.grads[0]))


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
    for field in ("fp16_flat", "fp32_flat", "opt_state", "params"):
        assert_same_bits(getattr(after, field), getattr(before, field))
    assert after.overflow
    assert after.cur_iter == 2
    assert optimizer.loss_scale(after) == after.cur_scale == scale / (1 + dynamic)
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


@pytest.mark.parametrize(
    "begin, last, overflows, scale",
    [
        (990, -1, (), 2.0**17),  # the first 1000 clean steps end at 999
        (990, -1, (999,), 2.0**15),
        (1990, 999, (), 2.0**17),
        (1990, -1, (), 2.0**17),  # counted from -1, at 1999
        (2990, 1000, (2991,), 2.0**15),
        (5, 4, range(5, 25), 1.0),  # from 2**16, and no lower
    ],
)
def test_the_window_counts_from_the_last_overflow(begin, last, overflows, scale):
    """From little before what moves the scale to little after it."""
    optimizer, turns = cut_down(), range(begin, begin + 20)
    model = oracle.DynamicLossScaler(2.0**16, cur_iter=begin, last_overflow_iter=last)
    xs = [jnp.full(2, np.inf if i in overflows else 0.0) for i in turns]
    start = optimizer.init(jnp.ones(2, F16))
    values = map(jnp.asarray, (np.float32(2**16), np.int32(begin), np.int32(last)))
    scaler = type(start.loss_scaler)(*values)
    _, seen = steps(optimizer, start.replace(loss_scaler=scaler), xs, "scan")
    for i, after in zip(turns, seen, strict=True):
        model.update_scale(i in overflows)
        assert tuple(map(float, after.loss_scaler)) == model.state
    assert after.cur_scale == scale


def test_gradients_are_none_after_zero_grad_by_default():
    optimizer, tree = cut_down(), group()
    _, state = optimizer.backward(optimizer.init(tree), dot, like(1.0, tree))
    none = optimizer.zero_grad(state)
    assert none.grads is None
    zeros = optimizer.zero_grad(state, set_grads_to_None=False)
    assert_same_bits(zeros.grads, jnp.zeros(11, F16))
    x = data(1, tree=tree)[0]
    a, b = (optimizer.backward(s, dot, x)[1] for s in (none, zeros))
    assert_same_bits(a.grads, b.grads)


# What is refused


def in_dict(params):
    """Optimizers are in a dict."""
    return lambda *_: cut_down({"a": fused_adam()}).init(params)


def init_with(leaf):
    return lambda o, _: o.init({"half": group(), "x": leaf})


HALF = "all float16, or all"
UNUSED = jamp.UnusedOptionWarning
MASTERS = jamp.master_weights(fused_adam())
REFUSED = [
    (lambda *_: cut_down(dynamic_loss_args={}), SystemError, "Do not support dynamic"),
    (lambda *_: cut_down(static_loss_scale=8.0), UNUSED, "static_loss_scale"),
    (lambda *_: FP16_Optimizer(optax.adam(1e-3)), TypeError, "fused"),
    (lambda *_: FP16_Optimizer(jo.larc(jo.fused_sgd(0.1))), TypeError, "fused"),
    (lambda *_: FP16_Optimizer(MASTERS), TypeError, "fused"),
    (lambda *_: FP16_Optimizer([fused_adam(), optax.sgd(1.0)]), TypeError, "fused"),
    (lambda *_: FP16_Optimizer(None), TypeError, "fused"),
    (lambda *_: FP16_Optimizer(fused_adam(), 0.0), ValueError, "static_loss_scale"),
    (init_with(jnp.ones(2, F32)), TypeError, HALF),
    (init_with(jnp.ones(2, BF16)), TypeError, HALF),
    (init_with(jnp.arange(2)), TypeError, HALF),
    (lambda o, _: o.init({}), TypeError, "hold no arrays"),
    (in_dict([group()]), ValueError, r"the keys \['a'\]; got list"),
    (in_dict({"b": group()}), ValueError, r"the keys \['a'\]; got dict"),
    (lambda o, s: o.step(s), ValueError, "backward"),
    (lambda o, s: o.step(s, lambda s: s), UNUSED, "does not call a closure"),
    (lambda o, s: o.step(s.params), TypeError, "step.*takes the state.*got dict"),
    (lambda o, s: o.load_state_dict(s, [1]), TypeError, "mapping, got list"),
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
    longer = optimizer.init(tree | {"more": jnp.ones(1, F16)})
    with pytest.raises(ValueError, match="fp32_groups_flat has shape"):
        optimizer.load_state_dict(longer, good)
    static = cut_down(dynamic_loss_scale=False)
    with pytest.raises(ValueError, match="scale_window is unexpected"):
        static.load_state_dict(static.init(tree), good)
    assert_same_bits(state, before)


# What a step moves and launches on an H200

LEAVES, SIZE = 50, 2**16


@pytest.mark.h200
@pytest.mark.parametrize(
    "options, at_most",
    [
        ({"backend": "mosaic"}, 30.1),
        ({"backend": "xla"}, 30.1),
        # Clipping reads the gradients, too.
        ({"backend": "mosaic", "max_grad_norm": 1.0}, 32.1),
    ],
    ids=["mosaic", "xla", "clipped"],
)
def test_a_step_is_one_pass_over_one_buffer(options, at_most):
    optimizer = cut_down(fused_adam(legacy=True, **options))
    params = {f"w{i:02}": jnp.ones(SIZE, F16) for i in range(LEAVES)}
    state = jax.eval_shape(optimizer.init, params)

    def step(state, grads):
        return optimizer.zero_grad(optimizer.step(state.replace(grads=grads)))

    program = h200.compile_step(step, state, state.fp16_flat, donate=(0,))
    # The half buffer goes into the kernel to be written, and nothing of it is read.
    unread = 2 * LEAVES * SIZE if options["backend"] == "mosaic" else 0
    assert (program.traffic - unread) / (LEAVES * SIZE) <= at_most
    assert program.kernels <= 20  # most of them on scalars
    assert program.temp < 0.01 * LEAVES * SIZE
    assert all(size <= 4 for size in program.copies)
