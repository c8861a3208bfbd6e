"""Habits of plain JAX with `ScaledGrads`: an error while tracing, or right."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import serialization
from jax import lax
from jax.sharding import Mesh, PartitionSpec as P

import jamp
from tests import h200
from tests.bits import assert_same_bits
from tests.states import assert_skipped, like, make, wide, with_scales
from tests.subprocesses import on_eight_devices

START = {"w": jnp.asarray([1.0, -2.0, 0.5]), "b": jnp.asarray([0.25, 0.5])}
SGD = optax.sgd(1.0)
CHECKED = jamp.StaticLossScale(1.0, check=True)


def loss_fn(p, x):
    """Its gradient is `x` of each weight."""
    return sum(wide(leaf).sum() for leaf in jax.tree.leaves(p)) * x


def state_of(level="O2", tx=SGD, **kwargs):
    kwargs = {"loss_scale": jamp.DynamicLossScale(1024.0)} | kwargs
    return make(level, START, tx, **kwargs)


def grads_of(x=0.5, state=None, **options):
    state = state_of() if state is None else state
    return jamp.scaled_grad(loss_fn, **options)(state, jnp.float32(x))


def mapped(fn):
    return lambda g: jax.tree.map(fn, g)


def updated(tx):
    return lambda g: tx.update(g, tx.init(g), g)


def over_axis(fn):
    return lambda g: jax.vmap(lambda x: fn(x, "i"), axis_name="i")(
        jax.tree.map(lambda x: x[None], g)
    )


# What people write in plain JAX, none of which may go through.
HABITS = {
    "sum": lambda g: jax.tree.map(jnp.add, g, g),
    "clip": mapped(lambda x: jnp.clip(x, -1, 1)),
    "astype": mapped(lambda x: x.astype(jnp.float32)),
    "numpy": mapped(np.asarray),
    "key": mapped(jax.random.normal),
    "psum": over_axis(lax.psum),
    "pmean": over_axis(lax.pmean),
    "optax.tree.norm": optax.tree.norm,
    "sgd": updated(optax.sgd(0.1)),
    "derivative": lambda g: jax.grad(lambda g: g.tree["w"].sum())(g),
}


@pytest.mark.standard_promotion  # so that it is the seal that refuses
@pytest.mark.parametrize("redo", [0, 2])
@pytest.mark.parametrize("name", HABITS)
def test_a_habit_of_plain_jax_is_an_error(name, redo):
    grads = grads_of(redo_on_overflow=redo)
    for habit in (HABITS[name], jax.jit(HABITS[name])):
        with pytest.raises(Exception) as error:  # noqa: PT011, JAX has several
            habit(grads)
        assert isinstance(error.value, TypeError | ValueError | NotImplementedError)


def test_the_error_says_what_to_write():
    says = r"ScaledGrads: pass them whole, or call \.unscale\(\) \.map\(fn\) "
    says += r"\.global_norm\(\) \.pmean\(axis\)"
    for name in ("sum", "pmean", "sgd", "clip", "optax.tree.norm"):
        with pytest.raises(TypeError, match=says):
            jax.eval_shape(HABITS[name], grads_of())
    with pytest.raises(TypeError, match="they are not a random key"):
        jax.random.split(grads_of().sealed)


def test_what_only_moves_gradients_goes_on():
    grads = grads_of(redo_on_overflow=1)
    same = lambda g: g  # noqa: E731
    stacked = jax.tree.map(lambda *x: jnp.stack(x), grads, grads)
    first = jax.tree.map(lambda x: x[0], stacked)
    carried, _ = lax.scan(lambda g, _: (g, None), grads, None, length=2)
    chosen = jax.tree.map(lambda a, b: jnp.where(True, a, b), grads, first)
    branch = lax.cond(True, same, same, grads)
    donated = jax.jit(same, donate_argnums=0)(jax.jit(same)(grads))
    several = jax.vmap(lambda x: grads_of(x, redo_on_overflow=1))(jnp.full(2, 0.5))
    assert np.shape(several.scale) == np.shape(several.finite) == (2,)
    sliced = jax.tree.map(lambda x: x[1], jax.vmap(same)(several))
    found = (first, carried, chosen, branch, donated, sliced)
    found += (jax.checkpoint(same)(grads), jax.device_get(grads))
    for other in (*found, pickle.loads(pickle.dumps(grads))):
        assert_same_bits(other, grads)
        assert (other.scale, other.finite) == (1024.0, True)
        assert_same_bits(other.scale_state, grads.scale_state)
    assert grads.sealed.dtype == sliced.sealed.dtype


def test_copies_are_of_the_same_type_and_shapes_or_what_was_donated_say_so():
    # As a pickle: their dtype is found by name, and does not make jit trace again.
    grads, traces = grads_of(), []
    step = jax.jit(lambda g: traces.append(1) or g.scale)
    assert step(grads) == step(pickle.loads(pickle.dumps(grads))) == 1024.0
    assert len(traces) == 1
    assert "scale float32[], finite bool[]: 5 f" in repr(jax.eval_shape(grads_of))
    jax.tree.map(lambda x: x.delete(), grads)
    assert repr(grads) == "ScaledGrads(loss 0, donated: 5 float16)"
    with pytest.raises(TypeError, match="no attribute 'scael'; they have tree, scale"):
        grads_of().replace(scael=1.0)


@pytest.mark.parametrize("redo", [0, 2])
def test_zeros_ones_and_isfinite_of_the_seal_are_harmless(redo):
    grads = grads_of(redo_on_overflow=redo)
    zeros = jax.tree.map(jnp.zeros_like, grads)
    assert (zeros.scale, zeros.finite, zeros.raw_finite) == (1.0, True, True)
    # So they begin a sum, too, and a step by them is a step by nothing.
    for total in (zeros + grads, grads + zeros):
        assert_same_bits(total.unscale(), (like(START, 0.5), jnp.asarray(True)))
        assert_same_bits(total.scale_state, grads.scale_state)
    before = state_of()
    after = before.apply_gradients(grads=zeros)
    assert_same_bits(after.params, before.params)
    assert (after.step, after.loss_scale) == (1, before.loss_scale)
    # `ones_like` would say scale 1.0000001: it is no gradient, and a skip.
    ones = jax.tree.map(jnp.ones_like, grads)
    assert_skipped(before.apply_gradients(grads=ones), before)
    assert all(jax.tree.leaves(jax.tree.map(lambda x: jnp.isfinite(x).all(), grads)))
    bad = grads_of(np.inf)
    cleaned = jax.tree.map(jnp.nan_to_num, bad)
    assert_skipped(before.apply_gradients(grads=cleaned), before)


# What people want to say


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_the_norm_is_of_unscaled_gradients_in_float32(level):
    state = state_of(level)
    grads = grads_of(0.5, state)
    norm = jax.jit(jamp.ScaledGrads.global_norm)(grads)
    assert (norm.dtype, norm.shape) == (jnp.float32, ())
    np.testing.assert_allclose(norm, 0.5 * np.sqrt(5), rtol=1e-6)
    # Half cannot hold the squares, nor float32 those of the scaled ones.
    large = jax.tree.map(lambda x: jnp.full_like(x, 3e4), grads.tree)
    norm = grads.replace(tree=large, scale=jnp.float32(2.0**-40)).global_norm()
    np.testing.assert_allclose(norm, 3e4 * 2.0**40 * np.sqrt(5), rtol=2e-3)
    assert not jnp.isfinite(grads_of(np.inf, state).global_norm())


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("limit", [0.25, 0.5, 4.0])
def test_clipping_is_that_of_float64(level, limit):
    state = state_of(level)
    grads = grads_of(0.5, state)
    factor = min(1, limit / (0.5 * np.sqrt(5)))
    clipped = jax.jit(jamp.ScaledGrads.clip_by_global_norm)(grads, limit)
    assert_same_bits(clipped.tree, grads.tree)  # by way of the scale
    assert clipped.finite
    # It is at a scale of its own, and still adds.
    for given, want in ((clipped, factor), (grads + clipped, 1 + factor)):
        for x in given.unscale()[0].values():
            np.testing.assert_allclose(x, np.full(x.shape, want * 0.5), rtol=1e-6)
    bad = grads_of(np.nan, state).clip_by_global_norm(limit)
    assert_skipped(state.apply_gradients(grads=bad), state)


def test_a_norm_or_a_scale_that_float32_cannot_hold_is_a_skip():
    state = state_of("O0", loss_scale=CHECKED)
    huge = jax.tree.map(lambda x: jnp.full_like(x, 3e38), START)
    tiny = jax.tree.map(lambda x: jnp.full_like(x, 1e8), START)
    for tree, limit in ((huge, 1.0), (tiny, 1e-37)):
        grads = grads_of(0.5, state).replace(tree=tree)
        assert grads.finite
        clipped = grads.clip_by_global_norm(limit)
        assert (clipped.finite, clipped.raw_finite) == (False, True)
        assert_skipped(state.apply_gradients(grads=clipped), state)
    for bad in (0, -1.0, np.nan):
        with pytest.raises(ValueError, match="max_norm must be positive, got"):
            grads_of().clip_by_global_norm(bad)


def test_map_acts_on_unscaled_gradients_and_looks_again():
    state = state_of()
    grads, seen = grads_of(0.5, state), []
    after = grads.map(lambda g: seen.append(g.dtype) or jnp.clip(g, -1, 0.25))
    assert set(seen) == {jnp.dtype("float32")}
    assert_same_bits(after.tree, like(START, 0.25))
    assert (after.scale, after.finite) == (1.0, True)
    made = grads.map(lambda g: g.at[0].set(jnp.inf))
    hidden = grads_of(np.inf, state).map(jnp.nan_to_num)
    for bad, moves in ((made, False), (hidden, True)):
        after = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, bad)
        assert_skipped(after, state)
        # What users make of gradients is no reason to lower the loss scale.
        assert after.loss_scale == (512.0 if moves else 1024.0)
        assert (after.skipped_steps, after.loss_scales[0].consecutive_skips) == (1, 1)


# Edits of an inf-free gradient, after which one element is not finite.
EDITS = {
    "tree": lambda g: g.replace(tree=g.tree | {"b": g.tree["b"].at[1].set(jnp.inf)}),
    "product": lambda g: g * jnp.float32(jnp.inf),
    "quotient": lambda g: g / 0.0,
    "sum": lambda g: g + g * jnp.float32(jnp.nan),
    "clip": lambda g: g.map(lambda x: x / (x - x)),
}


@pytest.mark.parametrize("name", EDITS)
def test_an_edit_that_is_not_finite_is_a_skip(name):
    state = state_of()
    grads = EDITS[name](grads_of(0.5, state))
    assert (grads.finite, grads.raw_finite) == (False, True)
    assert_skipped(state.apply_gradients(grads=grads), state)
    # And none at a static scale, which checks nothing.
    static = state_of(loss_scale=128.0)
    after = static.apply_gradients(grads=EDITS[name](grads_of(0.5, static)))
    assert (after.step, after.skipped_steps) == (1, 0)


def test_a_flag_can_be_set_by_hand_and_sum_adds_several():
    grads = grads_of().replace(finite=jnp.asarray(False))
    assert (grads.finite, grads.raw_finite) == (False, False)
    assert grads.replace(finite=jnp.asarray(True)).finite
    several = [grads_of(x) for x in (0.5, 0.25, 2.0)]
    assert_same_bits(sum(several), several[0] + several[1] + several[2])
    with pytest.raises(TypeError, match="add to ScaledGrads, got int"):
        1 + several[0]


def test_gradients_are_saved_bit_for_bit():
    saved = serialization.to_bytes(grads_of())
    assert_same_bits(serialization.from_bytes(grads_of(0.25), saved), grads_of())


# A mapped axis


def vmapped(fn, *args):
    return jax.vmap(fn, in_axes=(None, *[0] * (len(args) - 1)), axis_name="i")(*args)


def test_pmean_is_the_mean_in_float32_and_agrees():
    state = state_of("O2")
    xs = jnp.asarray([0.5, 1.0, 2.0, 40.0])  # at 1024, 40 is near the largest half

    def step(state, x):
        grads = grads_of(x, state).pmean("i")
        return grads, state.apply_gradients(grads=grads)

    grads, after = vmapped(step, state, xs)
    assert_same_bits(
        jax.tree.map(lambda x: x[2], grads).unscale()[0], like(START, 10.875)
    )
    np.testing.assert_array_equal(after.params["w"][3], np.asarray(START["w"]) - 10.875)
    grads, after = vmapped(step, state, xs.at[1].set(100.0))
    np.testing.assert_array_equal(grads.finite, [False] * 4)
    assert_skipped(jax.tree.map(lambda x: x[0], after), state)
    np.testing.assert_array_equal(after.loss_scale, [512.0] * 4)
    # As `axis_name` does, bit for bit.
    own = vmapped(lambda s, x: grads_of(x, s, axis_name="i"), state, xs)
    assert_same_bits(own, vmapped(lambda s, x: grads_of(x, s).pmean("i"), state, xs))
    # A sum too large for float32 is no step.
    state, huge = state_of("O0", loss_scale=CHECKED), jnp.full(4, 3e38, jnp.float32)
    grads = vmapped(lambda s, x: grads_of(x, s).pmean("i"), state, huge)
    np.testing.assert_array_equal(grads.raw_finite, [False] * 4)
    # Each came to its own by `redo_on_overflow`: the lowest is the next of all.
    state = with_scales(state_of(), 2.0**16)

    def step(state, x):
        grads = grads_of(x, state, redo_on_overflow=8)
        mean = grads.pmean("i")
        return grads.scale, mean, state.apply_gradients(grads=mean)

    scales, mean, after = vmapped(step, state, jnp.asarray([0.5, 4.0]))
    np.testing.assert_array_equal(scales, [2.0**16, 2.0**13])
    assert_same_bits(jax.tree.map(lambda x: x[0], mean).unscale()[0], like(START, 2.25))
    np.testing.assert_array_equal(after.loss_scale, [2.0**13] * 2)


def shard_mapped(fn, vma):
    mesh = Mesh(np.array(jax.devices()[:4]), ("i",))
    specs = (P(), P("i"))
    return jax.jit(
        jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=vma)
    )


@pytest.mark.parametrize("vma", [True, False])
@on_eight_devices
def test_pmean_of_a_shard_map(vma):
    state = state_of("O2")

    def mean(state, x):
        if vma:
            own = lax.pcast(state.params, "i", to="varying")
            state = state.replace(params=own)
        return grads_of(x[0], state).pmean("i")

    xs = jnp.asarray([0.5, 1.0, 2.0, 40.0])
    grads = shard_mapped(mean, vma)(state, xs)
    assert grads.sealed.sharding.is_fully_replicated
    assert_same_bits(grads.unscale(), (like(START, 10.875), jnp.asarray(True)))
    assert not shard_mapped(mean, vma)(state, xs.at[2].set(np.nan)).finite


@on_eight_devices
def test_pmean_of_what_jax_summed_already_is_an_error():
    def left_in(state, x):
        return grads_of(x[0], state).pmean("i")

    words = r"\['b'\] do not vary along \['i'\].*axis_name='i'"
    with pytest.raises(ValueError, match=words):
        shard_mapped(left_in, True)(state_of(), jnp.ones(4))


def test_half_gradients_of_nobody_under_a_dynamic_scale_warn():
    state = state_of()
    plain = jax.grad(loss_fn)(state.params, jnp.float32(0.5))
    words = r"gradients\['b'\] are a plain tree in float16.*jamp\.scaled_grad"
    with pytest.warns(jamp.PrecisionWarning, match=words):
        after = state.apply_gradients(grads=plain)
    assert after.step == 1
    unscaled = jax.tree.map(wide, plain)
    state.apply_gradients(grads=unscaled)  # pytest makes warnings errors
    state_of(loss_scale=128.0).apply_gradients(grads=plain)
    state_of("O5").apply_gradients(grads=unscaled)


def test_a_state_without_a_forward_says_so():
    with pytest.raises(TypeError, match="no forward: pass `apply_fn=model.apply`"):
        state_of().apply_fn({"params": START}, jnp.ones(2))


# What it costs, in reads of the half gradients, beside the step as it is.
# The look at what was made of them, and their norm, share the first look's read.
EDITED = {
    "product": lambda g: g * 0.5,
    "mapped": lambda g: g.map(jnp.negative),
    "clipped": lambda g: g.clip_by_global_norm(1.0),
}


@pytest.mark.h200
@pytest.mark.standard_promotion
def test_no_edit_reads_the_gradients_again():
    shapes = {"kernel": (1024, 512), "bias": (512,), "second": (512, 1024)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    state = jax.eval_shape(lambda p: make("O2", p, optax.adam(1e-3)), params)

    def program(edit):
        def update(state, slopes):
            def loss_fn(p):
                products = jax.tree.map(lambda a, b: wide(a * b).sum(), p, slopes)
                return sum(jax.tree.leaves(products))

            return state.apply_gradients(grads=edit(jamp.scaled_grad(loss_fn)(state)))

        return h200.compile_step(update, state, state.params, donate=(0,))

    plain = program(lambda g: g)
    one_read = sum(2 * x.size for x in jax.tree.leaves(params))
    for name, edit in EDITED.items():
        edited = program(edit)
        assert abs(edited.traffic - plain.traffic) <= 0.01 * one_read, name
        if name == "product":
            assert edited.kernels == plain.kernels, name
