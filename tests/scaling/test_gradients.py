"""Test common uses of gradients at every level: each steps correctly or skips.

Each habit computes gradients from a state and a batch of four numbers. NumPy computes
the expected gradients. The optimizer is SGD with rate 1.
"""

import functools
import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from benchmarks import h200
from jamp import optimizers as jo
from jamp._scaling import unscaled
from tests.support.states import assert_skipped, wide

LEVELS = ("O0", "O1", "O2", "O4", "O5")
START = {"w": np.float32([1.0, -2.0, 0.5]), "b": np.float32([0.25, 0.5])}
XS = np.float32([0.5, -0.25, 1.0, 0.75])
SGD = optax.sgd(1.0)
RULE = jamp.DynamicLossScale(1024.0)
# A scale of 1024 makes it inf in float32.
OVERFLOWS = np.float32(1e37)


def loss_fn(p, x):
    """Returns a loss whose gradient is `x` for each weight."""
    return sum(wide(leaf).sum() for leaf in jax.tree.leaves(p)) * x


grads_of = jamp.scaled_grad(loss_fn)


def mapped(fn):
    return functools.partial(jax.tree.map, fn)


def zeros(state):
    return optax.tree.zeros_like(jamp.master_params(state))


# Functions `(state, x) -> gradients`, as users write them.


def through_optax(state, x):
    tx = optax.chain(optax.centralize(), optax.clip(0.25), optax.scale(2.0))
    grads = grads_of(state, x[0])
    return tx.update(grads, tx.init(grads))[0]


def over_axis(state, x):
    each = jax.vmap(lambda x: lax.pmean(grads_of(state, x), "i"), axis_name="i")
    return mapped(lambda g: g[0])(each(x))


def in_a_scan(state, x):
    add = lambda total, x: (optax.tree.add(total, grads_of(state, x)), None)  # noqa: E731
    return lax.scan(add, zeros(state), x)[0]


def of_unscale(state, x):
    by_hand = jax.grad(lambda p: jamp.scale_loss(loss_fn(p, x[0]), state))
    return jamp.unscale(by_hand(state.params), state)


def habit(grads, value):
    return grads, lambda x: {k: np.full(v.shape, value(x)) for k, v in START.items()}


# A function of the gradients, and the expected ones.
HABITS = {
    "as they are": habit(lambda s, x: grads_of(s, x[0]), lambda x: x[0]),
    "mean of microbatches": habit(
        lambda s, x: mapped(lambda *g: sum(g) / 4)(*(grads_of(s, y) for y in x)),
        lambda x: x.mean(),
    ),
    "sum in a scan": habit(in_a_scan, lambda x: x.sum()),
    "pmean": habit(over_axis, lambda x: x.mean()),
    "optax, a chain": habit(through_optax, lambda x: 0.5),
    "by hand, and unscale": habit(of_unscale, lambda x: x[0]),
    "zeros for a frozen leaf": (
        lambda s, x: grads_of(s, x[0]) | {"b": jnp.zeros(2, jnp.float32)},
        lambda x: {"w": np.full(3, x[0]), "b": np.zeros(2)},
    ),
}


OF_MICROBATCHES = ("mean of microbatches", "sum in a scan", "pmean")


def begin(level, tx=SGD, **kwargs):
    kwargs = {"loss_scale": RULE, "verbosity": 0} | kwargs
    kept = "^b$" if level in ("O2", "O5") else None
    return jamp.initialize(START, tx, level, keep_fp32=kept, **kwargs)


def assert_stepped(after, gradient):
    assert (after.step, after.skipped_steps) == (1, 0)
    for key, master in jamp.master_params(after).items():
        wanted = START[key] - gradient[key]
        np.testing.assert_allclose(master, wanted, 2e-6, 2e-6)


def assert_skipped_and_lowered(after, before):
    assert_skipped(after, before)
    assert (after.skipped_steps, after.last_step_skipped) == (1, True)
    assert after.loss_scale == before.loss_scale / 2
    assert after.loss_scales[0].consecutive_skips == 1


# Gradients are float32 at every level, so most habits run at one level each. Those that
# scale the loss by hand or in a loop run at all levels.
AT_ALL = ("sum in a scan", "by hand, and unscale")
TRIED = [
    (name, level)
    for k, name in enumerate(HABITS)
    for level in (LEVELS if name in AT_ALL else LEVELS[k % len(LEVELS) :][:1])
]


@pytest.mark.standard_promotion  # as in users' programs
@pytest.mark.parametrize("name, level", TRIED)
def test_a_habit_is_the_right_step_or_a_skip(name, level):
    state, (gradients, expected) = begin(level), HABITS[name]

    @jax.jit
    def step(state, x):
        return state.apply_gradients(grads=gradients(state, x))

    assert_stepped(step(state, XS), expected(np.float64(XS)))
    # An overflow in any microbatch skips the step.
    for place in range(4) if name in OF_MICROBATCHES else (0,):
        bad = XS.copy()
        bad[place] = OVERFLOWS
        assert_skipped_and_lowered(step(state, bad), state)


@pytest.mark.slow
def test_the_table_keeps_no_array_alive():
    state = begin("O2")

    def step(state, x):
        grads = grads_of(state, x)
        leaves = jax.tree.leaves(grads)
        assert len(unscaled.origin_of(leaves).scaled) == len(leaves)
        for k, x in enumerate(leaves):  # a changed leaf, and an omitted one
            changed = unscaled.origin_of([*leaves[:k], 2 * x, *leaves[k + 1 :]])
            assert changed == unscaled.Origin(0)
            omitted = unscaled.origin_of(leaves[:k])
            assert omitted == (unscaled.Origin(0) if k else None)
        return state.apply_gradients(grads=grads)

    gc.collect()  # frees arrays of other tests
    before = len(unscaled._table)
    with jax.checking_leaks():
        jax.jit(step)(state, XS[0])
    grads = grads_of(state, XS[0])
    origin = unscaled.origin_of(jax.tree.leaves(grads))
    assert origin.finite and origin.scaled is None  # the half arrays are freed
    del grads
    gc.collect()
    assert len(unscaled._table) == before


def test_gradients_of_another_loss_are_refused():
    state = begin("O2", num_losses=2)
    grads = jamp.scaled_grad(loss_fn, loss_id=1)(state, XS[0])
    words = "apply_gradients got loss_id=0, and gradients of loss_id=1"
    for given, loss_id in ((grads, 0), ((grads, grads), (1, 0))):
        with pytest.raises(ValueError, match=words):
            state.apply_gradients(grads=given, loss_id=loss_id)
    assert state.apply_gradients(grads=grads, loss_id=1).step == 1


def test_a_tree_without_floats_is_a_clean_step():
    ids = {"ids": jnp.arange(3)}
    state = jamp.initialize(ids, SGD, "O2", verbosity=0)
    grads = jamp.scaled_grad(lambda p: jnp.float32(1.0))(state)
    assert grads == {"ids": None}
    assert state.apply_gradients(grads=grads).step == 1


WRONG = {
    "one for two": (lambda g: (g,), (0, 1), ValueError, "are 1 trees.* names 2 losses"),
    "none": (lambda g: (), (), ValueError, "are 0 trees"),
    "a tree for two": (lambda g: g, (0, 1), TypeError, "one tree per loss; got dict"),
    "two for one": (lambda g: (g, g), 0, ValueError, r"`grads=\(g0, g1\), loss_id=\(0"),
    "no such loss": (lambda g: (g, g), (0, 2), IndexError, "loss_id=2 is out of range"),
}


@pytest.mark.parametrize("name", WRONG)
def test_several_losses_need_one_tree_each(name):
    change, loss_id, error, words = WRONG[name]
    state = begin("O2", num_losses=2)
    with pytest.raises(error, match=words):
        state.apply_gradients(grads=change(zeros(state)), loss_id=loss_id)


@pytest.mark.h200
@pytest.mark.standard_promotion
def test_who_computes_with_gradients_reads_them_once_more():
    shapes = {"kernel": (1024, 512), "bias": (512,), "second": (512, 1024)}
    params = {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}
    one_read = 2 * sum(x.size for x in jax.tree.leaves(params))

    def traffic(edit, tx):
        begin = functools.partial(jamp.initialize, tx=tx, opt_level="O2", verbosity=0)
        state = jax.eval_shape(begin, params)

        def update(state, slopes):
            def loss_fn(p):
                products = jax.tree.map(lambda a, b: wide(a * b).sum(), p, slopes)
                return sum(jax.tree.leaves(products))

            return state.apply_gradients(grads=edit(jamp.scaled_grad(loss_fn)(state)))

        return h200.compile_step(update, state, state.params, donate=(0,)).traffic

    clip = lambda g: optax.clip_by_global_norm(1.0).update(g, None)[0]  # noqa: E731
    # An optimizer, an edit of the gradients, and its number of reads.
    adam, fused = optax.adam(1e-3), jo.fused_adam(1e-3)
    rows = [(adam, mapped(lambda g: g / 2), 1), (adam, clip, 2)]
    rows += [(fused, mapped(jnp.negative), 1)]
    plain = {tx: traffic(lambda g: g, tx) for tx, *_ in rows}
    for tx, edit, reads in rows:
        assert traffic(edit, tx) - plain[tx] <= 1.01 * reads * one_read


class Odd(optax.GradientTransformation):
    """A transformation whose attributes have the names of ours."""

    @property
    def inner(self):
        raise AssertionError("asked an unknown transformation")

    all_finite = rule = inner


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_unknown_transformation_is_asked_only_for_init_and_update(level):
    state = begin(level, Odd(*optax.sgd(0.5)))
    state = state.apply_gradients(grads=grads_of(state, XS[0]))
    assert state.step == 1


def test_a_type_error_in_a_loss_gets_a_note_only_if_it_has_other_arguments():
    def broken(params, x):
        return params["w"].nothing(x) if x is None else len(params["w"], x)

    state = begin("O2")
    for loss, args, noted in (
        (broken, (1.0,), False),
        (broken, (None,), False),  # an AttributeError
        (broken, (1.0, 2.0), True),
        (broken, (), True),
        (max, (1.0,), False),  # it has no signature
    ):
        with pytest.raises((TypeError, AttributeError)) as error:
            jamp.scaled_grad(loss)(state, *args)
        notes = "".join(getattr(error.value, "__notes__", ()))
        assert ("jamp called loss_fn" in notes) == noted
