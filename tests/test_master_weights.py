"""`jamp.master_weights` as a transformation of optax, without the rest of the library.

The invariant is `params == cast(masters)`, bit for bit, after every kind of step and
under nothing but `optax.apply_updates`.
"""

import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import jamp
from tests.bits import assert_same_bits
from tests.oracles import adam as oracle

HALVES = [jnp.float16, jnp.bfloat16]
RATES = [1e-4, 1e-2, 1.0]
STEPS = 24


def tree(a=jnp.float16, b=jnp.bfloat16, seed=0):
    """Both halves at once, which saves compiling twice, and leaves that stay fp32."""
    rng = np.random.default_rng(seed)

    def leaf(shape, dtype):
        return jnp.asarray(rng.normal(size=shape), jnp.float32).astype(dtype)

    return {
        "dense": {"kernel": leaf((5, 3), a), "bias": leaf((3,), b)},
        "list": [leaf((), a), leaf((7,), b)],
        "norm": {"scale": leaf((3,), jnp.float32), "bias": leaf((), jnp.float32)},
    }


def gradients(params, seed=1, dtype=None):
    """STEPS gradients along axis 0, in the dtypes of `params` or in `dtype`."""
    rng = np.random.default_rng(seed)

    def leaf(p):
        g = jnp.asarray(rng.normal(size=(STEPS, *p.shape)), jnp.float32)
        return g.astype(p.dtype if dtype is None else dtype)

    return jax.tree.map(leaf, params)


def is_hole(x):
    return isinstance(x, optax.MaskedNode)


def cast(master, dtype):
    """Rounds to nearest even, and what is beyond `dtype` to its largest number."""
    largest = float(jnp.finfo(dtype).max)
    return np.clip(np.asarray(master, np.float32), -largest, largest).astype(dtype)


def assert_invariant(params, state):
    """Each half leaf is the rounding of its one master; fp32 leaves have none."""
    # A wrapper around a part of the params has one hole for all of the rest.
    trees = [x for _, x in optax.tree.get_all_with_path(state, "masters")]
    trees = [dict(jax.tree.leaves_with_path(x)) for x in trees]
    assert trees
    for path, p in jax.tree.leaves_with_path(params):
        where = jax.tree_util.keystr(path)
        masters = [x[path] for x in trees if path in x]
        if p.dtype == jnp.float32:
            assert not masters, where
            continue
        (master,) = masters
        assert master.dtype == jnp.float32, where
        assert np.asarray(p).tobytes() == cast(master, p.dtype).tobytes(), where


def chained(learning_rate):
    return optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.scale_by_adam(),
        optax.add_decayed_weights(0.1),
        optax.scale_by_learning_rate(learning_rate),
    )


def labels(params):
    return {"dense": "a", "list": ["b", "a"], "norm": "b"}


def only(*keys):
    """A mask that is True on these top-level keys."""
    return lambda params: {k: k in keys for k in params}


def injected(make, **numbers):
    """optax.inject_hyperparams, whose hyperparameters are arrays in its state."""
    return optax.inject_hyperparams(make)(**numbers)


def every_third(tx):
    return optax.MultiSteps(tx, 3).gradient_transformation()


def every_third_finite(tx):
    skip = optax.transforms.skip_not_finite
    steps = optax.MultiSteps(tx, 3, should_skip_update_fn=skip)
    return steps.gradient_transformation()


MASTERED = jamp.master_weights
INSIDE = {
    "sgd": lambda rate: optax.sgd(rate),
    "momentum": lambda rate: optax.sgd(rate, momentum=0.9, nesterov=True),
    "adam": lambda rate: optax.adam(rate),
    "chain": chained,
    "masked": lambda rate: optax.masked(optax.adam(rate), only("dense", "norm")),
    "multi_transform": lambda rate: optax.multi_transform(
        {"a": optax.adam(rate), "b": optax.sgd(rate)}, labels
    ),
    "multi_steps": lambda rate: every_third(optax.adam(rate)),
    "inject_hyperparams": lambda rate: injected(optax.adam, learning_rate=rate),
    "apply_if_finite": lambda rate: optax.apply_if_finite(optax.adam(rate), 5),
    "schedule": lambda rate: optax.adam(lambda count: rate / (count + 1)),
}
# Each takes what is to be wrapped; gradients come in the dtypes of the params.
OUTSIDE = {
    "last_in_chain": lambda tx: optax.chain(optax.clip(1.0), MASTERED(tx)),
    "masked": lambda tx: optax.chain(
        optax.masked(MASTERED(tx), only("dense", "list")),
        optax.masked(tx, only("norm")),
    ),
    "multi_transform": lambda tx: optax.multi_transform(
        {"a": MASTERED(tx), "b": MASTERED(tx)}, labels
    ),
    "multi_steps": lambda tx: every_third(MASTERED(tx)),
    "multi_steps_skip": lambda tx: every_third_finite(MASTERED(tx)),
    "extra_args": lambda tx: optax.with_extra_args_support(MASTERED(tx)),
}
# These look at the gradients before the wrapper widens them, so they get fp32 ones.
OUTSIDE_FP32 = {
    "clip_by_global_norm": lambda tx: optax.chain(
        optax.clip_by_global_norm(0.5), MASTERED(tx)
    ),
    "apply_if_finite": lambda tx: optax.apply_if_finite(MASTERED(tx), 5),
}


@functools.partial(jax.jit, static_argnums=0)
def run(make, learning_rate, params, grads):
    """All steps in one scan: the params and the state before and after each of them."""
    tx = make(learning_rate)

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params)
        carry = optax.apply_updates(params, updates), state
        return carry, carry

    start = params, tx.init(params)
    _, after = lax.scan(step, start, grads)
    join = functools.partial(jax.tree.map, lambda a, b: jnp.concatenate([a[None], b]))
    return join(start, after)


def assert_it_holds(make, grads_dtype=None, spoil=None, halves=HALVES):
    params = tree(*halves)
    grads = gradients(params, dtype=grads_dtype)
    if spoil is not None:
        # One step whose gradients are not finite must leave the invariant alone.
        kernel = grads["dense"]["kernel"]
        grads["dense"]["kernel"] = kernel.at[5, 0, 0].set(spoil)
    for rate in RATES:
        history, states = run(make, jnp.float32(rate), params, grads)
        assert_invariant(history, states)
        for x in map(np.float32, jax.tree.leaves(history)):
            assert np.isfinite(x).all()
            # At 1e-4 most steps round to nothing; at 1 none does.
            assert rate < 1.0 or (x != x[0]).any(0).all()


@pytest.mark.standard_promotion  # optax.apply_updates adds fp32 to half
@pytest.mark.parametrize("name", INSIDE)
def test_the_invariant_holds_around_every_transformation(name):
    spoil = jnp.nan if name == "apply_if_finite" else None

    def make(rate):
        return jamp.master_weights(INSIDE[name](rate))

    # Where a mask leaves it out, the gradient itself steps the masters.
    assert_it_holds(make, spoil=spoil)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", OUTSIDE)
def test_the_invariant_holds_inside_every_wrapper(name):
    spoil = jnp.inf if name == "multi_steps_skip" else None

    def make(rate):
        return OUTSIDE[name](optax.adam(rate))

    assert_it_holds(make, spoil=spoil)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", OUTSIDE_FP32)
def test_wrappers_that_read_the_gradients_hold_it_on_fp32_gradients(name):
    spoil = jnp.nan if name == "apply_if_finite" else None

    def make(rate):
        return OUTSIDE_FP32[name](optax.adam(rate))

    assert_it_holds(make, jnp.float32, spoil)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("dtype", HALVES)
def test_inject_hyperparams_outside_holds_it_on_fp32_gradients(dtype):
    def make(rate):
        return injected(
            lambda learning_rate: jamp.master_weights(optax.adam(learning_rate)),
            learning_rate=rate,
        )

    # It looks for one dtype that all params promote to; fp16 and bf16 have none.
    assert_it_holds(make, jnp.float32, halves=(dtype, dtype))


@pytest.mark.standard_promotion
def test_it_holds_through_zero_gradients_and_a_pause():
    params = {"w": jnp.asarray([1.0, -3.0, 0.0, 6e-8, 65504.0], jnp.float16)}
    tx = jamp.master_weights(optax.adam(1e-3))
    state = tx.init(params)
    for g in [0.0, 1.0, 0.0, 0.0, -2.0, 0.0]:
        grads = {"w": jnp.full(5, g, jnp.float16)}
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        assert_invariant(params, state)
    assert float(params["w"][0]) < 1.0


# Limits, which the documentation states


@pytest.mark.standard_promotion
def test_limit_what_comes_after_it_in_a_chain_breaks_the_invariant():
    tx = optax.chain(jamp.master_weights(optax.sgd(1.0)), optax.scale(0.5))
    params = {"w": jnp.asarray([1.0], jnp.float16)}
    state = tx.init(params)
    updates, state = tx.update({"w": jnp.asarray([0.5], jnp.float16)}, state, params)
    params = optax.apply_updates(params, updates)
    (master,) = optax.tree.get(state, "masters")["w"]
    assert (float(params["w"][0]), float(master)) == (0.75, 0.5)
    assert "last" in jamp.master_weights.__doc__


@pytest.mark.standard_promotion
def test_limit_inject_hyperparams_outside_rounds_hyperparameters_to_half_gradients():
    def make(learning_rate, eps):
        return jamp.master_weights(optax.adam(learning_rate, eps=eps))

    tx = injected(make, learning_rate=1e-3, eps=1e-8)
    params = {"w": jnp.ones(2, jnp.float16)}
    _, state = tx.update({"w": jnp.zeros(2, jnp.float16)}, tx.init(params), params)
    # Adam divides 0 by 0 + eps.
    assert float(jnp.float16(1e-8)) == 0.0
    assert np.isnan(optax.tree.get(state, "masters")["w"]).all()
    assert "inject_hyperparams" in jamp.master_weights.__doc__


def test_limit_apply_if_finite_outside_refuses_half_gradients():
    tx = optax.apply_if_finite(jamp.master_weights(optax.sgd(1.0)), 5)
    params = {"w": jnp.ones(2, jnp.float16)}
    grads = {"w": jnp.ones(2, jnp.float16)}
    # Its lax.cond finds zeros in half on one side and our fp32 updates on the other.
    with pytest.raises(TypeError, match="float16.*float32|float32.*float16"):
        tx.update(grads, tx.init(params), params)


# What it computes


@pytest.mark.standard_promotion
def test_twenty_steps_of_adam_match_float64():
    params = tree()
    grads = gradients(params)

    def make(rate):
        return jamp.master_weights(optax.adam(rate))

    history, states = run(make, jnp.float32(1e-2), params, grads)
    flat = [np.asarray(g).astype(np.float64) for g in jax.tree.leaves(grads)]
    expected = oracle.adam(
        [np.asarray(p).astype(np.float64) for p in jax.tree.leaves(params)],
        [[g[t] for g in flat] for t in range(STEPS)],
        learning_rate=np.float32(1e-2),
    )
    masters = optax.tree.get(states, "masters")
    for t, leaves in enumerate(expected, 1):
        pairs = zip(
            jax.tree.leaves(masters, is_leaf=is_hole),
            jax.tree.leaves(history),
            leaves,
            strict=True,
        )
        for master, p, wanted in pairs:
            got = p if is_hole(master) else master
            # Twenty additions of 1e-2, each rounded at 2^-24 of a number near 1.
            np.testing.assert_allclose(got[t], wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", HALVES)
def test_steps_below_half_an_ulp_add_up(dtype):
    # The reason for masters: 1 - 2^-13 rounds to 1 in both halves.
    params = {"w": jnp.ones(3, dtype)}
    tx = jamp.master_weights(optax.sgd(2.0**-13))
    state = tx.init(params)
    for _ in range(64):
        updates, state = tx.update({"w": jnp.ones(3, dtype)}, state, params)
        p = params["w"].astype(jnp.float32) + updates["w"]
        params = {"w": p.astype(dtype)}
    np.testing.assert_array_equal(state.masters["w"], np.float32(1 - 2.0**-7))
    np.testing.assert_array_equal(np.float32(params["w"]), 1 - 2.0**-7)


@pytest.mark.parametrize("dtype", HALVES)
def test_updates_are_the_difference_of_two_halves_in_fp32(dtype):
    params = {"w": jnp.asarray([1.0, 2.0], dtype)}
    tx = jamp.master_weights(optax.sgd(1.0))
    grads = {"w": jnp.asarray([0.25 + 2.0**-9, 2.0**-12], jnp.float32)}
    updates, state = tx.update(grads, tx.init(params), params)
    assert updates["w"].dtype == jnp.float32
    masters = np.float32([0.75 - 2.0**-9, 2.0 - 2.0**-12])
    np.testing.assert_array_equal(state.masters["w"], masters)
    rounded = masters.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(updates["w"], rounded - np.float32([1, 2]))


@pytest.mark.standard_promotion
def test_gradients_are_widened_before_the_inner_transformation_sees_them():
    # 300^2 is beyond fp16, 1e-4^2 below it.
    params = {"w": jnp.zeros(2, jnp.float16)}
    tx = jamp.master_weights(optax.scale_by_adam())
    grads = {"w": jnp.asarray([300.0, 2.0**-14], jnp.float16)}
    _, state = tx.update(grads, tx.init(params), params)
    nu = optax.tree.get(state, "nu")["w"]
    np.testing.assert_allclose(nu, [0.001 * 300**2, 0.001 * 2.0**-28], rtol=1e-4)


def test_the_inner_transformation_steps_the_masters_and_not_the_rounded_params():
    # Weight decay of the master 1 + 2^-12, which is 1 in fp16, shows which one it was.
    half = {"w": jnp.ones(1, jnp.float16)}
    tx = jamp.master_weights(
        optax.chain(optax.add_decayed_weights(1.0), optax.scale(-1.0))
    )
    master = {"w": jnp.asarray([1 + 2.0**-12], jnp.float32)}
    state = tx.init(half)._replace(masters=master)
    _, state = tx.update({"w": jnp.zeros(1, jnp.float16)}, state, half)
    np.testing.assert_array_equal(state.masters["w"], [0.0])


@pytest.mark.standard_promotion
def test_fp32_leaves_get_the_inner_update_itself():
    params = tree()
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    grads = jax.tree.map(lambda g: g[0], gradients(wide))
    inner = optax.adam(1e-2)
    expected, _ = inner.update(grads, inner.init(wide), wide)
    tx = jamp.master_weights(inner)
    updates, _ = tx.update(grads, tx.init(params), params)
    assert_same_bits(updates["norm"], expected["norm"])


@pytest.mark.standard_promotion
def test_a_tree_without_half_leaves_is_the_inner_transformation():
    params = {"w": jnp.asarray([1.0, 2.0], jnp.float32)}
    grads = {"w": jnp.asarray([0.1, -0.1], jnp.float32)}
    inner = optax.adam(1e-2)
    tx = jamp.master_weights(inner)
    state = tx.init(params)
    assert_same_bits(state.inner_state, inner.init(params))
    updates, state = tx.update(grads, state, params)
    expected, expected_state = inner.update(grads, inner.init(params), params)
    assert_same_bits(updates, expected)
    assert_same_bits(state.inner_state, expected_state)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("dtype", HALVES)
def test_what_is_beyond_half_is_clamped_and_comes_back(dtype):
    largest = float(jnp.finfo(dtype).max)
    params = {"w": jnp.asarray([10.0, -10.0], dtype)}
    tx = jamp.master_weights(optax.sgd(1.0))
    state = tx.init(params)
    jump = jnp.asarray([-largest, largest], jnp.float32)
    for grads in [jump, jump * 1e-3, jump * 0.0]:
        updates, state = tx.update({"w": grads}, state, params)
        params = optax.apply_updates(params, updates)
        assert_invariant(params, state)
        np.testing.assert_array_equal(np.float32(params["w"]), [largest, -largest])
    if dtype == jnp.float16:
        assert (np.abs(state.masters["w"]) > largest).all()
    updates, state = tx.update({"w": -jump * 0.9}, state, params)
    params = optax.apply_updates(params, updates)
    assert_invariant(params, state)
    assert (np.abs(np.float32(params["w"])) < largest).all()


@pytest.mark.standard_promotion
def test_an_infinite_master_is_the_largest_half():
    params = {"w": jnp.asarray([1.0, 1.0], jnp.float16)}
    tx = jamp.master_weights(optax.sgd(1.0))
    grads = {"w": jnp.asarray([jnp.inf, -jnp.inf], jnp.float16)}
    updates, state = tx.update(grads, tx.init(params), params)
    params = optax.apply_updates(params, updates)
    np.testing.assert_array_equal(np.float32(params["w"]), [-65504, 65504])
    np.testing.assert_array_equal(state.masters["w"], [-np.inf, np.inf])


# init


def test_init_widens_half_leaves_and_leaves_holes_for_the_others():
    params = tree()
    state = jamp.master_weights(optax.sgd(0.1)).init(params)
    assert isinstance(state, jamp.MasterWeightsState)
    assert state._fields == ("masters", "inner_state")
    assert_same_bits(
        state.masters["dense"],
        jax.tree.map(lambda x: x.astype(jnp.float32), params["dense"]),
    )
    assert is_hole(state.masters["norm"]["scale"])
    assert is_hole(state.masters["norm"]["bias"])


def test_init_gives_the_inner_transformation_fp32_params():
    state = jamp.master_weights(optax.adam(0.1)).init(tree())
    moments = optax.tree.get(state, "mu")
    assert {str(x.dtype) for x in jax.tree.leaves(moments)} == {"float32"}
    assert jax.tree.structure(moments) == jax.tree.structure(tree())


def test_init_from_fp32_params_copies_what_casting_them_loses():
    # 1 + 2^-12 is 1 in fp16. The params are cast after init, and the norm is kept.
    originals = {
        "w": jnp.asarray([1 + 2.0**-12], jnp.float32),
        "norm": jnp.asarray([2.0], jnp.float32),
    }
    tx = jamp.master_weights(optax.sgd(1.0))
    state = tx.init(originals)
    assert_same_bits(state.masters["w"], originals["w"])
    params = {"w": originals["w"].astype(jnp.float16), "norm": originals["norm"]}
    grads = {"w": jnp.asarray([1.0], jnp.float16), "norm": jnp.ones(1, jnp.float32)}
    updates, state = tx.update(grads, state, params)
    assert state.masters["w"] == 2.0**-12
    assert (updates["w"], updates["norm"]) == (2.0**-12 - 1, -1.0)


@pytest.mark.parametrize("make", [optax.sgd, optax.contrib.schedule_free_sgd])
def test_init_shares_no_array_with_the_params_or_within_the_state(make):
    params = tree()
    state = jamp.master_weights(make(0.1)).init(params)
    leaves = jax.tree.leaves((params["dense"], params["list"], state))
    pointers = {x.unsafe_buffer_pointer() for x in leaves}
    assert len(pointers) == len(leaves)


@pytest.mark.parametrize("transform", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_eval_shape_predicts_init(transform):
    params = tree()
    tx = jamp.master_weights(optax.adam(0.1))
    got = transform(tx.init)(params)
    predicted = jax.eval_shape(tx.init, params)
    assert jax.tree.structure(got) == jax.tree.structure(predicted)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(predicted), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


def test_init_under_jit_gives_the_same_bits():
    tx = jamp.master_weights(optax.adam(0.1))
    assert_same_bits(jax.jit(tx.init)(tree()), tx.init(tree()))


def test_none_leaves_pass_through():
    params = {"w": jnp.ones(2, jnp.float16), "bias": None}
    tx = jamp.master_weights(optax.sgd(1.0))
    state = tx.init(params)
    assert state.masters["bias"] is None
    updates, state = tx.update(
        {"w": jnp.ones(2, jnp.float16), "bias": None}, state, params
    )
    assert updates["bias"] is None
    np.testing.assert_array_equal(updates["w"], [-1.0, -1.0])


# The interface of optax


def test_it_is_a_transformation_with_extra_args():
    tx = jamp.master_weights(optax.sgd(0.1))
    assert isinstance(tx, optax.GradientTransformationExtraArgs)
    params = {"w": jnp.ones(2, jnp.float16)}
    # Unknown ones are ignored even where the inner transformation takes none.
    updates, _ = tx.update(params, tx.init(params), params=params, nonsense=1)
    assert updates["w"].shape == (2,)


@pytest.mark.standard_promotion
def test_extra_args_reach_the_inner_transformation():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    tx = jamp.master_weights(optax.chain(optax.sgd(1.0), plateau))
    params = {"w": jnp.ones(2, jnp.float16)}
    state = tx.init(params)
    update = jax.jit(tx.update)
    for value in [1.0, 1.0, 1.0]:
        _, state = update(params, state, params, value=jnp.float32(value))
    # The second and the third value are no better than the first.
    assert optax.tree.get(state, "scale") == 0.25


@pytest.mark.standard_promotion
def test_lbfgs_with_a_line_search_minimises_on_the_masters():
    target = jnp.asarray([0.3, -0.7], jnp.float32)

    def loss_fn(p):
        return jnp.square(p["w"].astype(jnp.float32) - target).sum()

    search = optax.scale_by_backtracking_linesearch(max_backtracking_steps=8)
    tx = jamp.master_weights(optax.lbfgs(linesearch=search))
    params = {"w": jnp.asarray([2.0, 2.0], jnp.float16)}
    state = tx.init(params)

    @jax.jit
    def step(params, state):
        value, grads = jax.value_and_grad(loss_fn)(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = tx.update(
            grads, state, params, value=value, grad=grads, value_fn=loss_fn
        )
        return optax.apply_updates(params, updates), state

    for _ in range(6):
        params, state = step(params, state)
        assert_invariant(params, state)
    np.testing.assert_allclose(state.masters["w"], target, atol=1e-3)


def test_update_without_params_is_an_error():
    params = {"w": jnp.ones(2, jnp.float16)}
    tx = jamp.master_weights(optax.sgd(0.1))
    with pytest.raises(ValueError, match="params"):
        tx.update(params, tx.init(params))


@pytest.mark.parametrize("kind", ["missing", "extra"])
def test_gradients_of_another_structure_are_an_error_with_the_path(kind):
    params = tree()
    tx = jamp.master_weights(optax.sgd(0.1))
    state = tx.init(params)
    grads = tree()
    if kind == "missing":
        del grads["dense"]["bias"]
    else:
        grads["dense"]["bias2"] = jnp.ones(3, jnp.float16)
    with pytest.raises((TypeError, ValueError), match=r"dense\W+bias"):
        tx.update(grads, state, params)


def test_params_of_another_structure_are_an_error_with_the_path():
    params = tree()
    tx = jamp.master_weights(optax.sgd(0.1))
    state = tx.init(params)
    other = tree()
    other["dense"]["gain"] = jnp.ones(3, jnp.float16)
    with pytest.raises((TypeError, ValueError), match="(?s)dense.*gain"):
        tx.update(other, state, other)


def test_a_gradient_of_another_shape_is_an_error_with_the_path():
    params = tree()
    tx = jamp.master_weights(optax.sgd(0.1))
    grads = tree()
    grads["dense"]["bias"] = jnp.ones(1, jnp.float16)  # would broadcast
    with pytest.raises((TypeError, ValueError), match=r"dense\W+bias"):
        tx.update(grads, tx.init(params), params)


def test_wrapping_twice_is_refused():
    with pytest.raises((TypeError, ValueError), match="master.weights"):
        jamp.master_weights(jamp.master_weights(optax.sgd(0.1)))


@pytest.mark.parametrize(
    "bad",
    [optax.sgd, 0.1, None, (optax.sgd(0.1),)],
    ids=["function", "number", "None", "tuple"],
)
def test_what_is_no_transformation_is_refused(bad):
    with pytest.raises(TypeError, match="(?i)transformation"):
        jamp.master_weights(bad)


def test_wrappers_of_one_transformation_are_equal():
    tx = optax.adam(0.1)
    a, b = jamp.master_weights(tx), jamp.master_weights(tx)
    assert a == b
    assert hash(a) == hash(b)
    assert a != jamp.master_weights(optax.adam(0.1))


def test_map_params_visits_masters_and_moments_and_no_counter():
    params = tree()
    tx = jamp.master_weights(optax.adam(0.1))
    state = tx.init(params)
    seen = optax.tree.map_params(
        tx, lambda x: "param", state, transform_non_params=lambda x: "other"
    )
    masters = jax.tree.leaves(seen.masters, is_leaf=is_hole)
    assert masters.count("param") == 4
    assert sum(map(is_hole, masters)) == 2
    assert set(jax.tree.leaves(optax.tree.get(seen, "mu"))) == {"param"}
    assert optax.tree.get(seen, "count") == "other"


def test_map_params_reaches_into_a_chain():
    tx = optax.chain(optax.clip(1.0), jamp.master_weights(optax.sgd(0.1, 0.9)))
    state = optax.tree.map_params(tx, jnp.zeros_like, tx.init(tree()))
    leaves = jax.tree.leaves(state)
    assert len(leaves) == 4 + 6
    assert not any(np.asarray(x).any() for x in leaves)


def test_tree_get_and_set_find_masters_and_the_inner_state():
    params = {"w": jnp.asarray([1.5], jnp.float16)}
    tx = jamp.master_weights(optax.adam(0.1))
    state = tx.init(params)
    assert optax.tree.get(state, "masters")["w"] == 1.5
    assert optax.tree.get(state, "count") == 0
    state = optax.tree.set(state, count=jnp.int32(3))
    assert optax.tree.get(state, "count") == 3


@pytest.mark.standard_promotion
def test_step_2_does_not_retrace():
    traces = []
    params = tree()
    tx = jamp.master_weights(optax.adam(0.1))
    state = tx.init(params)

    @jax.jit
    def update(grads, state, params):
        traces.append(1)
        return tx.update(grads, state, params)

    for _ in range(3):
        _, state = update(params, state, params)
    assert len(traces) == 1


def test_the_state_survives_pickle():
    state = jamp.master_weights(optax.adam(0.1)).init(tree())
    assert_same_bits(pickle.loads(pickle.dumps(state)), state)


def test_it_works_under_vmap():
    params = {"w": jnp.asarray([[1.0, 2.0], [3.0, 4.0]], jnp.float16)}
    tx = jamp.master_weights(optax.sgd(0.5))
    state = jax.vmap(tx.init)(params)
    updates, state = jax.vmap(tx.update)(params, state, params)
    np.testing.assert_array_equal(updates["w"], [[-0.5, -1], [-1.5, -2]])
    np.testing.assert_array_equal(state.masters["w"], [[0.5, 1], [1.5, 2]])
