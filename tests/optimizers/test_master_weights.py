"""`jamp.master_weights` as a transformation of optax, without the rest of the library.

`masters.py` has the invariant, and what runs a transformation with masters of both
kinds and without.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp import optimizers as jo
from tests.bits import assert_same_bits
from tests.optimizers.fused import fresh
from tests.optimizers.masters import BF16, F16, F32, assert_it_holds, is_hole, tree

HALVES = [F16, BF16]
# optax.apply_updates adds fp32 to half.
standard = pytest.mark.standard_promotion


def labels(params):
    return {"dense": "a", "list": ["b", "a"], "norm": "b"}


def only(*keys):
    """A mask that is True on these top-level keys."""
    return lambda params: {k: k in keys for k in params}


def every_third(tx, skip=None):
    steps = optax.MultiSteps(tx, 3, should_skip_update_fn=skip)
    return steps.gradient_transformation()


INSIDE = {
    "chain": lambda rate: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(rate, weight_decay=0.1)
    ),
    # Where the mask leaves it out, the gradient itself steps the masters.
    "masked": lambda rate: optax.masked(optax.adam(rate), only("dense", "norm")),
    "multi_transform": lambda rate: optax.multi_transform(
        {"a": optax.adam(rate), "b": optax.sgd(rate)}, labels
    ),
    "multi_steps": lambda rate: every_third(optax.adam(rate)),
    "inject_hyperparams": lambda rate: optax.inject_hyperparams(optax.adam)(rate),
}
# Each takes what keeps masters, and what is to be wrapped.
OUTSIDE = {
    "last_in_chain": lambda keep, tx: optax.chain(optax.clip(1.0), keep(tx)),
    "masked": lambda keep, tx: optax.chain(
        optax.masked(keep(tx), only("dense", "list")), optax.masked(tx, only("norm"))
    ),
    "multi_steps_skip": lambda keep, tx: every_third(
        keep(tx), optax.transforms.skip_not_finite
    ),
}
# These look at the gradients before the wrapper widens them, so they get fp32 ones.
OUTSIDE_FP32 = {
    "clip_by_global_norm": lambda keep, tx: optax.chain(
        optax.clip_by_global_norm(0.5), keep(tx)
    ),
    "apply_if_finite": lambda keep, tx: optax.apply_if_finite(keep(tx), 5),
    "inject_hyperparams": lambda keep, tx: optax.inject_hyperparams(
        lambda by: keep(optax.chain(tx, optax.scale(by)))
    )(by=1.0),
}


@standard
@pytest.mark.parametrize("name", INSIDE)
def test_the_invariant_holds_around_every_transformation(name):
    assert_it_holds(INSIDE[name], halves=(BF16, BF16))


@standard
@pytest.mark.parametrize("name", [*OUTSIDE, *OUTSIDE_FP32])
def test_the_invariant_holds_inside_every_wrapper(name):
    spoil = {"multi_steps_skip": np.inf, "apply_if_finite": np.nan}.get(name)
    # Half gradients are added up in half; one dtype for hyperparameters is looked for,
    # to which all params promote; and each part needs params for remainders.
    alike = name.startswith(("multi", "inject"))
    halves = (BF16, BF16) if alike else (F16, BF16)
    dtype = F32 if name in OUTSIDE_FP32 else None
    assert_it_holds(optax.adam, (OUTSIDE | OUTSIDE_FP32)[name], dtype, spoil, halves)


@standard
@pytest.mark.parametrize("name", ["adam", "lamb", "larc_sgd"])
def test_params_are_their_rounded_masters_after_every_step(name):
    halves = (F16 if name == "adam" else BF16, BF16)
    assert_it_holds(lambda rate: fresh(name, learning_rate=rate), halves=halves)


@pytest.mark.parametrize("dtype", HALVES)
def test_updates_are_the_difference_of_two_halves_in_fp32(dtype):
    params = {"w": jnp.asarray([1.0, 2.0], dtype)}
    tx = jamp.master_weights(optax.sgd(1.0))
    grads = {"w": jnp.asarray([0.25 + 2.0**-9, 2.0**-12], F32)}
    updates, state = tx.update(grads, tx.init(params), params, unknown=1)
    assert updates["w"].dtype == F32
    masters = np.float32([0.75 - 2.0**-9, 2.0 - 2.0**-12])
    np.testing.assert_array_equal(state.masters["w"], masters)
    rounded = masters.astype(dtype).astype(np.float32)
    np.testing.assert_array_equal(updates["w"], rounded - np.float32([1, 2]))


@standard
@pytest.mark.parametrize("dtype, store", [(F16, False), (BF16, True)])
def test_what_is_beyond_half_is_clamped_and_comes_back(dtype, store):
    largest = float(jnp.finfo(dtype).max)
    tx = jamp.master_weights(optax.sgd(1.0), store_remainder=store)
    params = {"w": jnp.asarray([10.0, -10.0], dtype)}
    state = tx.init(params)

    def step(grad):
        nonlocal params, state
        updates, state = tx.update({"w": jnp.asarray(grad, F32)}, state, params)
        params = optax.apply_updates(params, updates)
        return np.float64(params["w"])

    jump = np.asarray([-largest, largest])
    for grads in [jump, jump * 1e-3, jump * 0.0]:
        np.testing.assert_array_equal(step(grads), [largest, -largest])
    if not store:
        assert (np.abs(state.masters["w"]) > largest).all()
    assert (np.abs(step(-jump * 0.9)) < largest).all()
    # An infinite master, too; it stays so, or is the largest that rounds to a finite.
    np.testing.assert_array_equal(step([-np.inf, np.inf]), [largest, -largest])
    if not store:
        np.testing.assert_array_equal(state.masters["w"], [np.inf, -np.inf])


@pytest.mark.parametrize("store", [False, True])
def test_init_widens_half_leaves_and_leaves_holes_for_the_others(store):
    params = tree(BF16, BF16) | {"none": None}
    tx = jamp.master_weights(optax.adam(0.1), store_remainder=store)
    state = tx.init(params)
    kept = [x.astype(F32) for x in jax.tree.leaves(params["dense"])]
    if store:  # two bytes, which half params lack nothing of
        kept = [jnp.zeros(x.shape, jnp.uint16) for x in kept]
    assert_same_bits(jax.tree.leaves(state.masters["dense"]), kept)
    assert is_hole(state.masters["norm"]["scale"])
    assert is_hole(state.masters["norm"]["bias"])
    assert state.masters["none"] is None
    moments = optax.tree.get(state, "mu")
    assert {str(x.dtype) for x in jax.tree.leaves(moments)} == {"float32"}
    assert jax.tree.structure(moments) == jax.tree.structure(params)
    assert_same_bits(jax.jit(tx.init)(params), state)


def test_init_from_fp32_params_copies_what_casting_them_loses():
    # 1 + 2^-12 is 1 in fp16. The params are cast after init, and the norm is kept.
    originals = {"w": jnp.asarray([1 + 2.0**-12], F32), "norm": jnp.asarray([2.0], F32)}
    tx = jamp.master_weights(optax.sgd(1.0))
    state = tx.init(originals)
    assert_same_bits(state.masters["w"], originals["w"])
    params = {"w": originals["w"].astype(F16), "norm": originals["norm"]}
    grads = {"w": jnp.asarray([1.0], F16), "norm": jnp.ones(1, F32)}
    updates, state = tx.update(grads, state, params)
    assert state.masters["w"] == 2.0**-12
    assert (updates["w"], updates["norm"]) == (2.0**-12 - 1, -1.0)


@pytest.mark.parametrize("make", [optax.sgd, optax.contrib.schedule_free_sgd])
def test_init_shares_no_array_with_the_params_or_within_the_state(make):
    params = tree()
    for given in (params, jax.tree.map(lambda x: x.astype(F32), params)):
        state = jamp.master_weights(make(0.1)).init(given)
        leaves = jax.tree.leaves((given["dense"], given["list"], state))
        assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


# The interface of optax


PARAMS = tree()
DENSE = PARAMS["dense"]
CAST = PARAMS | {"norm": jax.tree.map(lambda x: x.astype(F16), PARAMS["norm"])}
ERRORS = {
    "missing": (PARAMS | {"dense": {"kernel": 0}}, PARAMS, r"dense\W+bias"),
    "another shape": (  # would broadcast
        PARAMS | {"dense": DENSE | {"bias": jnp.ones(1, BF16)}},
        PARAMS,
        r"dense\W+bias",
    ),
    "no params": (PARAMS, None, "master_weights needs the params"),
    "cast since": (CAST, CAST, "norm.*is float16 but was float32.*no master"),
}


@pytest.mark.message
@pytest.mark.parametrize("row", ERRORS)
def test_trees_that_do_not_match_are_an_error_with_the_path(row):
    grads, params, text = ERRORS[row]
    tx = jamp.master_weights(optax.sgd(0.1))
    state = tx.init(PARAMS)
    with pytest.raises((TypeError, ValueError), match=text):
        tx.update(grads, state, params)
    with pytest.raises(TypeError, match="EmptyState.*expected the MasterWeightsState"):
        tx.update(PARAMS, optax.EmptyState(), PARAMS)


@pytest.mark.message
def test_what_is_no_transformation_or_wrapped_already_is_refused():
    for bad in (optax.sgd, 0.1, None, (optax.sgd(0.1),)):
        with pytest.raises(TypeError, match="(?i)transformation"):
            jamp.master_weights(bad)
    with pytest.raises(ValueError, match="keeps master weights already"):
        jamp.master_weights(jamp.master_weights(optax.sgd(0.1)))


def test_equal_arguments_make_equal_wrappers():
    stored = functools.partial(jamp.master_weights, store_remainder=True)
    a, b = stored(jo.fused_adam(1e-3)), stored(jo.fused_adam(1e-3))
    assert a == b and hash(a) == hash(b)
    assert a.inner == jo.fused_adam(1e-3)
    assert a not in (jamp.master_weights(a.inner), stored(jo.fused_adam(2e-3)))
