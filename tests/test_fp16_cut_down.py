"""optimizers.FP16_Optimizer, the cut-down one, against float64."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from jax import lax

import jamp
from jamp import optimizers as jo
from jamp.optimizers import FP16_Optimizer, fused_adam
from tests.bits import assert_same_bits
from tests.fp16 import BF16, EAGER_OR_JIT, F16, F32, REFUSED, dot
from tests.fp16_flat import data, group, host, like, make, run, step_of
from tests.oracles import fp16_optimizer as oracle


def masters_of(state):
    return [np.asarray(x) for x in jax.tree.leaves(state.fp32_flat)]


def assert_params_are_the_buffer(state, groups):
    """Bit for bit: the tree, the flat half buffer and the rounded masters."""
    halves = [np.asarray(x) for x in jax.tree.leaves(state.fp16_flat)]
    for tree, half, master in zip(groups, halves, masters_of(state), strict=True):
        flat = np.concatenate([x.ravel() for x in host(tree)])
        assert flat.tobytes() == half.tobytes()
        assert half.tobytes() == master.astype(half.dtype).tobytes()


# What a step computes


@pytest.mark.parametrize("dtype", [F16, BF16])
def test_a_group_is_one_half_and_one_fp32_vector(dtype):
    optimizer, tree = make(), group(dtype=dtype)
    state = optimizer.init(tree)
    (half,), (master,) = map(jax.tree.leaves, (state.fp16_flat, state.fp32_flat))
    assert half.shape == master.shape == (11,)
    assert (half.dtype, master.dtype) == (dtype, F32)
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim]
    assert [x.shape for x in moments] == [(11,), (11,)]
    assert_same_bits(state.params, tree)
    assert_same_bits(jax.jit(optimizer.init)(tree), state)
    (after,) = run(optimizer, state, data(tree, 1))
    assert jax.tree.structure(after.params) == jax.tree.structure(tree)
    assert_params_are_the_buffer(after, [after.params])
    _, pending = optimizer.backward(state, dot, data(tree, 1)[0])
    (grads,) = jax.tree.leaves(pending.grads)
    assert (grads.shape, grads.dtype) == ((11,), dtype)


LEGACY = {
    "plain": {},
    "eps": {"eps": 1e-3, "b1": 0.8, "b2": 0.99},
    "inside_sqrt": {"eps": 1e-5, "eps_inside_sqrt": True},
    "decay": {"weight_decay": 0.1},
    "uncorrected": {"bias_correction": False, "weight_decay": 0.01},
    "clips_sometimes": {"max_grad_norm": 6.5e-3, "eps": 1e-4},
}


@pytest.mark.parametrize("name", LEGACY)
def test_old_adam_is_that_of_8_1(name):
    tree, kwargs = group(), LEGACY[name]
    optimizer = make(fused_adam(1e-2, legacy=True, **kwargs))
    model = oracle.CutDown([host(tree)], [oracle.OldAdam(1e-2, **kwargs)], dynamic=True)
    xs = data(tree, 20, (3, 4, 11))
    states = run(optimizer, optimizer.init(tree), xs)
    for x, state in zip(xs, states, strict=True):
        model.backward([host(x)])
        model.step()
        model.zero_grad()
        np.testing.assert_allclose(
            masters_of(state)[0], model.masters[0], rtol=1e-6, atol=1e-6
        )
        assert float(state.cur_scale) == model.cur_scale
        assert int(state.cur_iter) == model.cur_iter
        assert int(state.last_overflow_iter) == model.last_overflow_iter
        assert_params_are_the_buffer(state, [state.params])
    if name == "clips_sometimes":
        norms = [oracle.total_norm(host(x), 2) for x in xs]
        assert min(norms) < kwargs["max_grad_norm"] < max(norms)
    moved = np.abs(model.masters[0] - oracle.CutDown([host(tree)], []).masters[0])
    assert moved.max() > 1e-3  # a thousand times the tolerance
    inner = model.inners[0]
    for field in ("mu", "nu"):
        (leaf,) = jax.tree.leaves(optax.tree.get(states[-1].opt_state, field))
        wanted = getattr(inner, field)
        np.testing.assert_allclose(leaf, wanted, rtol=1e-5, atol=1e-9)


def test_eager_and_scanned_steps_are_those_of_jit():
    optimizer, tree = make(), group()
    xs = data(tree, 4, (1,))
    state = optimizer.init(tree)
    jitted, eager = (run(optimizer, state, xs, w)[-1] for w in ("jit", "eager"))
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *xs)
    none = optimizer.zero_grad(state)
    scanned, losses = lax.scan(step_of(optimizer), none, stacked)
    np.testing.assert_allclose(losses[0], dot(tree, xs[0]), rtol=1e-6)
    for other in (eager, scanned):
        assert_same_bits(other.loss_scaler, jitted.loss_scaler)
        got, wanted = masters_of(other)[0], masters_of(jitted)[0]
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
        assert_params_are_the_buffer(other, [other.params])


CONTAINERS = {
    "list": list,
    "tuple": tuple,
    "dict": lambda pair: dict(zip(("head", "body"), pair, strict=True)),
}


@pytest.mark.parametrize("kind", CONTAINERS)
def test_norms_and_clipping_are_per_group(kind):
    container = CONTAINERS[kind]
    options = [
        {"max_grad_norm": 2.0**-9, "eps": 1e-4},
        {"max_grad_norm": 1.0, "weight_decay": 0.1, "eps": 1e-4},
    ]
    rates = (0.1, 0.01)
    trees = container([group(0), group(1)])
    txs = [
        fused_adam(lr, legacy=True, **o) for lr, o in zip(rates, options, strict=True)
    ]
    optimizer = make(container(txs))
    adams = [oracle.OldAdam(lr, **o) for lr, o in zip(rates, options, strict=True)]
    pick = (lambda t: [t["head"], t["body"]]) if kind == "dict" else list
    model = oracle.CutDown([host(t) for t in pick(trees)], adams, dynamic=True)
    # The last leaf of the second group overflows; with dicts that of the first, head.
    xs = data(trees, 6, (0, 4))
    for x, state in zip(xs, run(optimizer, optimizer.init(trees), xs), strict=True):
        model.backward([host(t) for t in pick(x)])
        model.step()
        model.zero_grad()
        flat = [np.asarray(m) for m in pick(state.fp32_flat)]
        for got, wanted in zip(flat, model.masters, strict=True):
            assert got.ndim == 1
            np.testing.assert_allclose(got, wanted, rtol=1e-6, atol=1e-6)
        assert float(state.cur_scale) == model.cur_scale
        assert type(state.params) is type(trees)
        for tree, half in zip(pick(state.params), pick(state.fp16_flat), strict=True):
            flat_tree = np.concatenate([leaf.ravel() for leaf in host(tree)])
            assert flat_tree.tobytes() == np.asarray(half).tobytes()


@pytest.mark.parametrize(
    "tx", [fused_adam(1e-2), jo.fused_sgd(0.5, 0.9)], ids=["adam", "sgd"]
)
def test_other_fused_optimizers_step_as_in_ampstate(tx):
    tree, xs = group(), data(group(), 8, (5,))
    optimizer = make(tx)
    state = run(optimizer, optimizer.init(tree), xs)[-1]
    wide = jax.tree.map(lambda p: p.astype(F32), tree)
    amp = jamp.initialize(wide, tx, "O2", verbosity=0)
    step = jax.jit(lambda s, x: s.apply_gradients(grads=jamp.scaled_grad(dot)(s, x)))
    for x in xs:
        amp = step(amp, x)
    flat = np.concatenate([x.ravel() for x in host(jamp.master_params(amp))])
    np.testing.assert_allclose(masters_of(state)[0], flat, rtol=2e-7)
    assert amp.skipped_steps == 1


def test_backward_accumulates_in_half():
    optimizer, tree = make(dynamic_loss_scale=False, static_loss_scale=4.0), group()
    model = oracle.CutDown([host(tree)], [], static=4.0)
    state = optimizer.init(tree)
    for x in data(tree, 3):
        loss, state = optimizer.backward(state, dot, x)
        assert loss.dtype == F32
        model.backward([host(x)])
    (grads,) = jax.tree.leaves(state.grads)
    flat = np.concatenate([g.ravel() for g in model.grads[0]])
    assert np.asarray(grads).tobytes() == flat.tobytes()


def test_a_donated_state_takes_no_array_along():
    optimizer, tree = make(), jnp.ones(3, F16)
    state = optimizer.init(tree)
    clear = jax.jit(optimizer.zero_grad, donate_argnums=0)
    again = clear(clear(state))
    assert_same_bits(again.params, tree)
    saved = optimizer.state_dict(again)
    before = jax.tree.map(np.array, saved)
    clear(optimizer.load_state_dict(again, saved))
    assert_same_bits(saved, before)
    assert_same_bits(again.params, tree)


# Skips, and the scale


@EAGER_OR_JIT
@pytest.mark.parametrize(("dynamic", "bad"), [(True, 0), (False, 1)])
def test_a_skip_leaves_every_bit_with_a_static_scale_too(where, dynamic, bad, capsys):
    trees = [group(0), group(1)]
    txs = [fused_adam(1e-2, legacy=True), fused_adam(1e-2, legacy=True)]
    optimizer = make(
        txs,
        dynamic_loss_scale=dynamic,
        static_loss_scale=1.0 if dynamic else 128.0,
        verbose=dynamic,  # a static scale prints anyway
    )
    start = optimizer.init(trees)
    (before,) = run(optimizer, start, [like(trees, 2.0**-9)])
    capsys.readouterr()
    x = like(trees, 2.0**-9)
    x[bad]["layer"]["bias"] = x[bad]["layer"]["bias"].at[2].set(np.nan)
    _, pending = optimizer.backward(before, dot, x)
    step = jax.jit(optimizer.step) if where == "jit" else optimizer.step
    after = step(pending)
    for field in ("fp16_flat", "fp32_flat", "opt_state"):
        assert_same_bits(getattr(after, field), getattr(before, field))
    assert_same_bits(after.params, before.params)
    assert after.overflow
    assert int(after.cur_iter) == 2
    assert float(after.cur_scale) == (2.0**15 if dynamic else 128.0)
    kind, scale = ("dynamic", 2.0**16) if dynamic else ("static", 128.0)
    message = f"Grad overflow on iteration 1\nUsing {kind} loss scale of {scale}\n"
    assert capsys.readouterr().out == (message if where == "eager" else "")
    clean = step(optimizer.backward(optimizer.zero_grad(after), dot, like(x, 0.01))[1])
    assert not clean.overflow


def test_a_norm_beyond_float32_is_an_overflow():
    # Finite gradients, but their squares are not; 8.2 looks at the norm.
    optimizer, tree = make(dynamic_loss_scale=False), group(dtype=BF16)
    _, state = optimizer.backward(optimizer.init(tree), dot, like(tree, 1e20))
    assert all(np.isfinite(np.float32(g)).all() for g in host(state.grads))
    after = optimizer.step(state)
    assert after.overflow
    assert_same_bits(after.params, tree)


def test_the_scale_stops_at_one_in_silence(capsys):
    optimizer, tree = make(), group()
    state = optimizer.init(tree)
    scale = state.loss_scaler._replace(cur_scale=jnp.float32(4))
    state = state.replace(loss_scaler=scale)
    states = run(optimizer, state, [like(tree, np.inf)] * 4, "eager")
    assert capsys.readouterr().out == ""
    assert [float(s.cur_scale) for s in states] == [2.0, 1.0, 1.0, 1.0]


def test_the_window_counts_from_the_last_overflow():
    """From little before what moves the scale to little after it."""
    tree, optimizer = {"w": jnp.ones(2, F16)}, make()
    start = optimizer.zero_grad(optimizer.init(tree))

    @jax.jit
    def run(state, flags):
        def step(state, flag):
            x = {"w": jnp.where(flag, np.inf, jnp.zeros(2))}
            _, state = optimizer.backward(state, dot, x)
            state = optimizer.zero_grad(optimizer.step(state))
            return state, tuple(state.loss_scaler)

        return lax.scan(step, state, flags)

    for begin, last, overflow, scale in (
        (990, -1, None, 2.0**17),  # the first 1000 clean steps end at 999
        (990, -1, 999, 2.0**15),
        (1990, 999, None, 2.0**17),
        (1990, -1, None, 2.0**17),  # counted from -1, at 1999
        (2990, 1000, 2991, 2.0**15),
    ):
        model = oracle.CutDown([host(tree)], [oracle.OldAdam()], dynamic=True)
        model.cur_iter, model.last_overflow_iter = begin, last
        flags = np.arange(begin, begin + 20) == overflow
        scaler = start.loss_scaler._replace(
            cur_iter=jnp.int32(begin), last_overflow_iter=jnp.int32(last)
        )
        _, seen = run(start.replace(loss_scaler=scaler), flags)
        expected = []
        for flag in flags:
            model.update_scale(bool(flag))
            expected.append((model.cur_scale, model.cur_iter, model.last_overflow_iter))
        for got, wanted in zip(seen, zip(*expected, strict=True), strict=True):
            np.testing.assert_array_equal(got, wanted)
        assert seen[0][-1] == scale


def test_gradients_are_none_after_zero_grad_by_default():
    optimizer, tree = make(), group()
    _, state = optimizer.backward(optimizer.init(tree), dot, like(tree, 1.0))
    none = optimizer.zero_grad(state)
    assert none.grads is None or jax.tree.leaves(none.grads) == []
    with pytest.raises(ValueError, match="backward"):
        optimizer.step(none)
    zeros = optimizer.zero_grad(state, set_grads_to_None=False)
    (leaf,) = jax.tree.leaves(zeros.grads)
    assert_same_bits(leaf, jnp.zeros(11, F16))
    x = data(tree, 1)[0]
    a, b = (optimizer.backward(s, dot, x)[1] for s in (none, zeros))
    assert_same_bits(a.grads, b.grads)


# What is refused


def test_options_of_the_scale_are_refused():
    with pytest.raises(SystemError, match="Do not support dynamic loss scale args"):
        make(dynamic_loss_args={"init_scale": 8.0})


@pytest.mark.parametrize(
    "tx",
    [
        optax.adam(1e-3),
        jo.larc(jo.fused_sgd(0.1)),
        jamp.master_weights(fused_adam(1e-3)),
        [fused_adam(1e-3), optax.sgd(1.0)],
        None,
    ],
)
def test_only_fused_optimizers_are_taken(tx):
    with pytest.raises(TypeError, match="fused"):
        FP16_Optimizer(tx)


def test_params_must_be_half_and_of_one_dtype():
    bias = {"bias": jnp.ones(2, BF16)}
    for extra in (like(group(), 1.0), bias, {"n": jnp.arange(2)}):
        with pytest.raises(REFUSED):
            make().init({"half": group(), "extra": extra})
    with pytest.raises(REFUSED):
        make([fused_adam(), fused_adam()]).init([group()])
    with pytest.raises(REFUSED):
        make({"a": fused_adam()}).init({"b": group()})


# Checkpoints


@pytest.mark.parametrize("dynamic", [True, False])
def test_state_dict_round_trips_and_resumes(dynamic):
    optimizer, tree = make(dynamic_loss_scale=dynamic), group()
    xs = data(tree, 9, (2, 6))
    whole = run(optimizer, optimizer.init(tree), xs)
    saved = optimizer.state_dict(whole[4])
    keys = {"dynamic_loss_scale", "cur_scale", "cur_iter", "optimizer_state_dict"}
    keys |= {"fp32_groups_flat"}
    if dynamic:
        keys |= {"last_overflow_iter", "scale_factor", "scale_window"}
    assert saved.keys() == keys
    other = optimizer.init(group(7))
    loaded = optimizer.load_state_dict(other, saved)
    assert_same_bits(loaded.params, whole[4].params)
    resumed = run(optimizer, loaded, xs[5:])
    assert_same_bits(resumed[-1], whole[-1])


def test_what_does_not_fit_is_refused():
    optimizer, tree = make(), group()
    state = optimizer.init(tree)
    good = optimizer.state_dict(state)
    before = jax.tree.map(np.array, state)
    for key in good:
        saved = copy.deepcopy(good)
        del saved[key]
        with pytest.raises(ValueError, match=key):
            optimizer.load_state_dict(state, saved)
    longer = optimizer.init(tree | {"more": jnp.ones(1, F16)})
    with pytest.raises(ValueError):
        optimizer.load_state_dict(longer, good)
    static = make(dynamic_loss_scale=False)
    with pytest.raises(ValueError):
        static.load_state_dict(static.init(tree), good)
    assert_same_bits(state, before)


def test_flax_and_orbax_bring_every_bit_back(tmp_path):
    optimizer, tree = make(), group()
    state = run(optimizer, optimizer.init(tree), data(tree, 3, (1,)))[-1]
    target = optimizer.zero_grad(optimizer.init(group(7)))
    restored = serialization.from_bytes(target, serialization.to_bytes(state))
    assert_same_bits(jax.tree.map(jnp.asarray, restored), state)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        shapes = jax.tree.map(ocp.utils.to_shape_dtype_struct, target)
        assert_same_bits(checkpointer.restore(tmp_path / "state", shapes), state)
