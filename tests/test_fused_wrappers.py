"""The fused optimizers inside what optax wraps around transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jamp import optimizers as jo
from tests.bits import assert_same_bits
from tests.fused import (
    BARE,
    FIELDS,
    OPTIMIZERS,
    assert_close,
    each,
    each_bare,
    fresh,
    gradients,
    make,
    tree,
    update,
)


@each
def test_in_a_chain(name):
    tx = make(name)
    chain = optax.chain(optax.clip_by_global_norm(0.5), tx, optax.scale(0.5))
    params, grads = tree(), gradients()
    clipped = jax.tree.map(lambda g: g * (0.5 / optax.tree.norm(grads)), grads)
    got, state = update(chain, grads, chain.init(params), params)
    expected, inner = update(tx, clipped, tx.init(params), params)
    assert_close(got, jax.tree.map(lambda u: u * 0.5, expected), rtol=1e-5)
    assert_close(state[1], inner, rtol=1e-5)


@each
def test_masked(name):
    tx = make(name, learning_rate=0.1)
    masked = optax.masked(tx, {"dense": True, "gain": False, "rest": False})
    params, grads = tree(), gradients()
    got, state = update(masked, grads, masked.init(params), params)
    part = {"dense": params["dense"]}
    expected, inner = update(tx, {"dense": grads["dense"]}, tx.init(part), part)
    assert_close(got["dense"], expected["dense"])
    assert_same_bits(got["gain"], grads["gain"])
    for field in FIELDS[name]:
        moments = optax.tree.get(state, field)
        assert isinstance(moments["gain"], optax.MaskedNode)
        assert_close(moments["dense"], optax.tree.get(inner, field)["dense"])


@each_bare
def test_masked_with_a_mask_of_decay_inside(name):
    def decays(mask):
        return fresh(name, weight_decay=0.1, mask=mask)

    where = {"a": True, "b": False, "c": False}
    params = {k: jnp.arange(1.0, 4.0) for k in "abc"}
    masked = optax.masked(decays(where), {"a": True, "b": True, "c": False})
    got, _ = update(masked, params, masked.init(params), params)
    part = {k: params[k] for k in "ab"}
    tx = decays({"a": True, "b": False})
    expected, _ = update(tx, part, tx.init(part), part)
    assert_close({k: got[k] for k in "ab"}, expected)


@each
def test_multi_transform(name):
    a, b = make(name), make(name, learning_rate=0.3)
    labels = {"dense": "a", "gain": "b", "rest": "b"}
    tx = optax.multi_transform({"a": a, "b": b}, labels)
    params, grads = tree(), gradients()
    got, _ = update(tx, grads, tx.init(params), params)
    for one, keys in [(a, ["dense"]), (b, ["gain", "rest"])]:
        p, g = ({k: x[k] for k in keys} for x in (params, grads))
        expected, _ = update(one, g, one.init(p), p)
        assert_close({k: got[k] for k in keys}, expected)


@pytest.mark.standard_promotion  # it adds half gradients up
@each
def test_multi_steps(name):
    tx = make(name)
    steps = optax.MultiSteps(tx, 2)
    dtype = jnp.bfloat16
    params = {"w": jnp.asarray([1.0, -2.0, 3.0], dtype)}
    grads = [{"w": jnp.asarray(g, dtype)} for g in ([1.0, 2, 3], [3.0, -6, 1])]
    state = steps.init(params)
    first, state = update(steps, grads[0], state, params)
    np.testing.assert_array_equal(np.float32(first["w"]), 0)
    got, state = update(steps, grads[1], state, params)
    mean = {"w": jnp.asarray([2.0, -2.0, 2.0], dtype)}
    expected, inner = update(tx, mean, tx.init(params), params)
    assert_close(got, expected)
    assert_close(state.inner_opt_state, inner)


@functools.cache
def injected(name):
    """All numbers are arrays of the state, the defaults too; booleans are Python's."""
    factory, kwargs = OPTIMIZERS[name]
    static = "norm_type" if name == "novograd" else ()
    return optax.inject_hyperparams(factory, static)(**kwargs)


@each
def test_inject_hyperparams(name):
    tx, traced = make(name), injected(name)
    params, grads = tree(), gradients()
    state, expected = jax.jit(traced.init)(params), tx.init(params)
    assert {"learning_rate"} < set(state.hyperparams)
    for _ in range(2):
        got, state = update(traced, grads, state, params)
        wanted, expected = update(tx, grads, expected, params)
        assert_close(got, wanted, rtol=1e-5)
    state.hyperparams["learning_rate"] = jnp.float32(0.25)
    got, _ = update(traced, grads, state, params)
    wanted, _ = update(make(name, learning_rate=0.25), grads, expected, params)
    assert_close(got, wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "factory, options",
    [
        (jo.fused_adam, {"legacy": True, "eps_inside_sqrt": True, "max_grad_norm": 1}),
        (jo.fused_adam, {"adam_w_mode": False, "bias_correction": False}),
        (jo.fused_sgd, {"momentum": 0.9, "nesterov": True}),
        (jo.fused_sgd, {"wd_after_momentum": True}),
        (jo.fused_lamb, {"use_nvlamb": True, "grad_averaging": False}),
        (jo.fused_lamb, {"max_grad_norm": None}),
        (jo.fused_adagrad, {"adagrad_w_mode": True}),
    ],
    ids=lambda x: x.__name__ if callable(x) else "-".join(x),
)
def test_inject_hyperparams_with_every_option(factory, options):
    params = {"w": jnp.asarray([1.0, -2.0])}
    traced = optax.inject_hyperparams(factory)(learning_rate=0.1, **options)
    got, _ = update(traced, params, traced.init(params), params)
    tx = factory(0.1, **options)
    expected, _ = tx.update(params, tx.init(params), params)
    assert_close(got, expected, rtol=1e-5)


@pytest.mark.message
def test_a_norm_type_that_optax_traces_is_an_error_with_the_way_out():
    tx = optax.inject_hyperparams(jo.fused_novograd)(learning_rate=0.1)
    params = {"w": jnp.ones(2)}
    with pytest.raises((TypeError, ValueError), match="(?s)norm_type.*static_args"):
        update(tx, params, tx.init(params), params)


@each
def test_apply_if_finite(name):
    tx = optax.apply_if_finite(make(name), 5)
    params = tree()
    _, state = update(tx, gradients(), tx.init(params), params)
    bad = gradients(2)
    bad["gain"] += jnp.inf
    updates, after = update(tx, bad, state, params)
    assert_same_bits(after.inner_state, state.inner_state)
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates))


@each
def test_a_schedule_gets_the_count_of_the_steps_before(name):
    def schedule(count):
        assert (count.shape, count.dtype) == ((), jnp.int32)
        return 0.1 * (count + 1).astype(jnp.float32)

    tx = make(name, learning_rate=schedule)
    reference = injected(name)
    params = tree()
    state, expected = tx.init(params), reference.init(params)
    for count in range(3):
        grads = gradients(count)
        got, state = update(tx, grads, state, params)
        expected.hyperparams["learning_rate"] = jnp.float32(0.1 * (count + 1))
        wanted, expected = update(reference, grads, expected, params)
        assert_close(got, wanted, rtol=1e-5)


@each
def test_unknown_extra_args_are_ignored(name):
    params = tree()
    tx = make(name)
    plain = update(tx, params, tx.init(params), params)
    extra = update(tx, params, tx.init(params), params=params, value=jnp.float32(1))
    assert_same_bits(extra, plain)


@each
def test_state_functions_of_optax(name):
    params = tree()
    tx = make(name)
    _, state = update(tx, params, tx.init(params), params)
    for field in FIELDS[name]:
        assert jax.tree.leaves(optax.tree.get(state, field))
    if name in BARE:  # in LARC the inner state has a count of its own
        assert optax.tree.get(state, "count") == 1
        assert optax.tree.set(state, count=jnp.int32(7)).count == 7
    seen = optax.tree.map_params(
        tx, lambda x: "param", state, transform_non_params=lambda x: "other"
    )
    for field in FIELDS[name]:
        assert set(jax.tree.leaves(optax.tree.get(seen, field))) == {"param"}
    assert {x for _, x in optax.tree.get_all_with_path(seen, "count")} == {"other"}
