"""Test the contract of all fused optimizers with JAX's and optax's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jamp
from jamp import optimizers as jo
from tests.optimizers.fused import (
    FIELDS,
    OPTIMIZERS,
    each,
    each_bare,
    first,
    fresh,
    gradients,
    make,
    tree,
    update,
)
from tests.oracles import fused as oracle
from tests.support.bits import assert_rounded_alike, assert_same_bits


def schema(tree):
    """Returns the structure, shapes, dtypes and weak types of a tree of shapes."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, x.weak_type) for x in leaves]


@each
def test_states_are_float32_and_keep_their_shape_and_dtype(name):
    tx = make(name)
    params = jax.eval_shape(lambda: tree(jnp.float16))
    state = jax.eval_shape(tx.init, params)
    found = [x for _, x in optax.tree.get_all_with_path(state, "count")]
    assert found and {(x.shape, x.dtype) for x in found} == {((), jnp.dtype("int32"))}
    for field in FIELDS[name]:
        moments = optax.tree.get(state, field)
        assert jax.tree.structure(moments) == jax.tree.structure(params)
        for p, m in zip(*map(jax.tree.leaves, (params, moments)), strict=True):
            is_norm = name == "novograd" and field == "nu"
            assert m.shape == (() if is_norm else p.shape)
            assert m.dtype == jnp.float32
    updates, new = jax.eval_shape(tx.update, params, state, params)
    assert schema(new) == schema(state)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    for p, u in zip(*map(jax.tree.leaves, (params, updates)), strict=True):
        assert (u.shape, u.dtype) == (p.shape, jnp.float32)
    with jax.enable_x64(True):  # has no effect
        assert schema(jax.eval_shape(tx.init, params)) == schema(state)
    params = {k: jnp.ones(3) for k in "ab"}
    leaves = jax.tree.leaves((params, tx.init(params)))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)  # donated


@pytest.mark.standard_promotion  # norms of leaves together
@each_bare
@pytest.mark.parametrize("scale", [None, 3.0])
def test_float64_leaves_are_stepped_in_float64(name, scale):
    """Compares with the oracle, beside a leaf that stays float32 if nothing clips."""
    rng, rate = np.random.default_rng(0), OPTIMIZERS[name][1]["learning_rate"]
    changes = [{}, {"learning_rate": lambda count: rate / (1 + count)}]
    changes += [{"max_grad_norm": 0.3}] if name in ("adam", "lamb") else []
    for change in changes:
        options = OPTIMIZERS[name][1] | change
        clips = name == "lamb" or "max_grad_norm" in change
        dtypes = np.float64, np.float64 if clips else np.float32
        draw = lambda: [rng.normal(size=3).astype(d) for d in dtypes]  # noqa: B023, E731
        start, grads = draw(), [draw() for _ in range(8)]
        wanted = getattr(oracle, f"fused_{name}")(start, grads, **options)
        with jax.enable_x64(True):
            tx, params = fresh(name, **options), [*map(jnp.asarray, start)]
            state, step = tx.init(params), jax.jit(tx.update)
            how = {} if scale is None else {"grad_scale": jnp.float32(scale)}
            for gs, (leaves, _) in zip(grads, wanted, strict=True):
                gs = [jnp.asarray(g) * g.dtype.type(scale or 1) for g in gs]
                updates, state = step(gs, state, params, **how)
                assert schema(updates) == schema(params)
                params = optax.apply_updates(params, updates)
                for p, x in zip(params, leaves, strict=True):
                    error = 1e-13 if p.dtype == np.float64 else 1e-5
                    np.testing.assert_allclose(p, x, error, error)
            kept = jamp.master_weights(tx)
            updates, state = kept.update(params, kept.init(params), params)
            np.testing.assert_array_equal(state.masters[0], params[0] + updates[0])


@each
def test_found_inf_keeps_every_bit_of_the_state_and_updates_nothing(name):
    tx, params, grads = make(name), tree(), gradients()
    scaled = jax.tree.map(lambda g: g * 1024.0, grads)
    # torch's found_inf is a float. The test under vmap passes a bool.
    how = {"grad_scale": jnp.float32(1024), "found_inf": jnp.float32(0)}
    # Optimizers ignore optax's extra argument `value`.
    clean = first(tx, params, scaled, **how, value=jnp.float32(1))
    assert_rounded_alike(clean, first(tx, params, grads))
    bad = jax.tree.map(lambda x: x + jnp.nan, params)
    # Both arguments may be Python numbers.
    updates, after = tx.update(bad, clean[1], params, grad_scale=8, found_inf=True)
    assert_same_bits(after, clean[1])
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates))


@pytest.mark.parametrize(
    "dtype, backend",
    [(jnp.float16, "xla"), (jnp.float32, "xla"), (jnp.bfloat16, "interpret")],
)
def test_all_finite_checks_the_unscaled_gradients(dtype, backend):
    tx, largest = jo.fused_sgd(0.1, backend=backend), float(jnp.finfo(dtype).max)
    small = np.random.default_rng(0).normal(size=300).astype(dtype)
    ask = jax.jit(tx.all_finite)
    for value in (1.0, largest, -largest, np.inf, np.nan):
        grads = [small, small[:5].copy()]
        for place in ((0, 299), (1, 3)):
            grads[place[0]][place[1]] = value
        for scale in (None, 2.0**-3, 0.3, 1.0, 3.0, 65536.0):
            unscaled = [np.abs(np.float64(g)) / (scale or 1.0) for g in grads]
            wanted = all((g <= np.finfo(np.float32).max).all() for g in unscaled)
            factor = None if scale is None else jnp.float32(scale)
            assert ask([jnp.asarray(g) for g in grads], factor) == wanted


@pytest.mark.slow
@each
def test_under_vmap_with_a_learning_rate_each(name):
    @jax.jit
    @jax.vmap
    def step(learning_rate, grads, params, found_inf):
        tx = fresh(name, learning_rate=learning_rate)
        return tx.update(grads, tx.init(params), params, found_inf=found_inf)

    def stack(trees):
        return jax.tree.map(lambda *x: jnp.stack(x), *trees)

    params = [tree(seed=seed) for seed in range(3)]
    grads = [gradients(seed) for seed in range(3, 6)]
    rates, flags = [0.1, 0.1, 0.2], jnp.asarray([False, True, False])
    got = step(jnp.asarray(rates), stack(grads), stack(params), flags)
    for i in (0, 2):
        one = first(make(name, learning_rate=rates[i]), params[i], grads[i])
        assert_rounded_alike(jax.tree.map(lambda x, i=i: x[i], got), one)
    updates, state = jax.tree.map(lambda x: x[1], got)
    assert_same_bits(state, make(name, learning_rate=0.1).init(params[1]))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates))


OPTIONS = [
    *((name, {}) for name in OPTIMIZERS),
    ("adam", {"legacy": True, "eps_inside_sqrt": True, "max_grad_norm": 1}),
    ("sgd", {"momentum": 0.9, "nesterov": True}),
    # A decay other than 0 enables the trust ratio, traced or not.
    ("lamb", {"weight_decay": 0.0, "max_grad_norm": None}),
    ("lamb", {"weight_decay": 0.0, "use_nvlamb": True}),
]


@pytest.mark.slow
@pytest.mark.parametrize("name, options", OPTIONS)
def test_injected_hyperparameters_and_a_schedule(name, options):
    """optax makes all numbers arrays, including defaults, but no booleans."""

    def schedule(count):
        assert (count.shape, count.dtype) == ((), jnp.int32)
        return 0.1 * (count + 1).astype(jnp.float32)

    factory, kwargs = OPTIMIZERS[name]
    static = "norm_type" if name == "novograd" else ()
    traced = optax.inject_hyperparams(factory, static)(**(kwargs | options))
    scheduled, params = fresh(name, learning_rate=schedule, **options), tree()
    state, expected = jax.jit(traced.init)(params), scheduled.init(params)
    assert {"learning_rate"} < set(state.hyperparams)
    for count in range(2):
        state.hyperparams["learning_rate"] = jnp.float32(0.1 * (count + 1))
        got, state = update(traced, gradients(count), state, params)
        wanted, expected = update(scheduled, gradients(count), expected, params)
        assert_rounded_alike(got, wanted, rtol=1e-5)


def test_a_norm_type_that_optax_traces_is_an_error_with_the_way_out():
    tx = optax.inject_hyperparams(jo.fused_novograd)(learning_rate=0.1)
    with pytest.raises((TypeError, ValueError), match="(?s)norm_type.*static_args"):
        first(tx, {"w": jnp.ones(2)})
