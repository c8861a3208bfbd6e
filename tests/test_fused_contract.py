"""One contract for all fused optimizers: what optax and JAX may do with any of them."""

import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from jax import lax

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

HALVES = [jnp.float16, jnp.bfloat16]


def schema(tree):
    """Structure, shapes, dtypes and weak types, of what jax.eval_shape gave."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, [(x.shape, x.dtype, x.weak_type) for x in leaves]


# It minimises, and compiles once


def losses(params):
    """A parabola and Rosenbrock's function, each of a leaf of its own."""
    x, y = params["parabola"], params["rosenbrock"]
    parabola = jnp.square(x - jnp.asarray([1.0, -1.0, 1.0])).sum()
    return parabola, jnp.square(1 - y[0]) + 100 * jnp.square(y[1] - y[0] ** 2)


@each
def test_it_minimises(name):
    tx = make(name)

    def step(carry, _):
        params, state = carry
        values, vjp = jax.vjp(losses, params)
        (grads,) = vjp((1.0, 1.0))
        updates, state = tx.update(grads, state, params)
        return (optax.apply_updates(params, updates), state), values

    params = {"parabola": jnp.asarray([-1.0, 10.0, 1.0]), "rosenbrock": jnp.zeros(2)}
    carry = params, tx.init(params)
    (params, _), history = jax.jit(lambda x: lax.scan(step, x, length=3000))(carry)
    for values, last in zip(history, losses(params), strict=True):
        assert values[50] < values[0]
        assert last < 2e-2 * values[0]  # LAMB circles the minimum


@each
def test_step_2_does_not_recompile(name):
    tx = make(name)
    params = tree()
    state = jax.jit(tx.init)(params)
    traces = []

    @jax.jit
    def step(grads, state, params):
        traces.append(1)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for seed in range(3):
        params, state = step(gradients(seed), state, params)
    assert len(traces) == 1
    assert step._cache_size() == 1


# States and updates: structure, shapes, dtypes


@each
@pytest.mark.parametrize("dtype", [*HALVES, jnp.float32])
def test_states_are_float32_and_keep_their_shape_and_dtype(name, dtype):
    tx = make(name)
    params = jax.eval_shape(lambda: tree(dtype))
    state = jax.eval_shape(tx.init, params)
    counts = [x for _, x in optax.tree.get_all_with_path(state, "count")]
    assert counts
    for count in counts:
        assert (count.shape, count.dtype) == ((), jnp.int32)
    for field in FIELDS[name]:
        moments = optax.tree.get(state, field)
        assert jax.tree.structure(moments) == jax.tree.structure(params)
        for p, m in zip(*map(jax.tree.leaves, (params, moments)), strict=True):
            is_norm = name == "novograd" and field == "nu"
            assert m.shape == (() if is_norm else p.shape)
            assert m.dtype == jnp.float32 or name == "larc_adam"
    updates, new = jax.eval_shape(tx.update, params, state, params)
    assert schema(new) == schema(state)
    assert jax.tree.structure(updates) == jax.tree.structure(params)
    for p, u in zip(*map(jax.tree.leaves, (params, updates)), strict=True):
        assert u.shape == p.shape
        assert u.dtype == jnp.float32 or name == "larc_adam"


@each_bare
def test_one_tree_may_hold_all_dtypes(name):
    params = {str(i): jnp.ones(3, x) for i, x in enumerate([*HALVES, jnp.float32])}
    # And a gradient may be wider, or narrower, than its parameter.
    grads = dict(zip(params, reversed(params.values()), strict=True))
    updates, _ = update(make(name), grads, make(name).init(params), params)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    expected, _ = update(make(name), wide, make(name).init(wide), wide)
    assert_close(updates, expected)


@each
def test_x64_changes_nothing_for_leaves_of_32_bits(name):
    tx = make(name)
    with jax.enable_x64(True):
        params = jax.eval_shape(tree)
        state = jax.eval_shape(tx.init, params)
        updates, new = jax.eval_shape(tx.update, params, state, params)
    assert schema(new) == schema(state)
    for x in jax.tree.leaves((updates, new)):
        assert x.dtype in (jnp.float32, jnp.int32)


def test_the_states_are_those_of_the_page():
    params = tree()
    assert jo.FusedAdamState._fields == ("count", "mu", "nu")
    assert jo.FusedSGDState._fields == ("count", "trace")
    assert jo.FusedLAMBState._fields == ("count", "mu", "nu")
    assert jo.FusedNovoGradState._fields == ("count", "mu", "nu")
    assert jo.FusedAdagradState._fields == ("count", "sum_of_squares")
    assert jo.LARCState._fields == ("count", "inner_state")
    assert jo.fused_sgd(0.1).init(params).trace is None
    assert isinstance(make("larc_sgd").init(params).inner_state, jo.FusedSGDState)
    for name in OPTIMIZERS:
        tx = make(name)
        assert isinstance(tx, optax.GradientTransformationExtraArgs)
        assert isinstance(tx, jo.FusedTransformation) or name.startswith("larc")


@each
def test_init_shares_no_array_with_the_params_or_within_the_state(name):
    params = {k: jnp.ones(3) for k in "ab"}
    leaves = jax.tree.leaves((params, make(name).init(params)))
    assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)


@each
def test_the_count_counts_and_saturates(name):
    tx = make(name)
    params = tree()
    _, state = update(tx, params, tx.init(params), params)
    last = np.iinfo(np.int32).max

    def counts(state):
        return [int(x) for _, x in optax.tree.get_all_with_path(state, "count")]

    assert set(counts(state)) == {1}
    full = jax.tree.map(
        lambda x: jnp.int32(last) if x.dtype == jnp.int32 else x, tx.init(params)
    )
    updates, state = update(tx, params, full, params)
    assert set(counts(state)) == {last}
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(updates))


# grad_scale and found_inf


# torch's found_inf is a float; under vmap below there is a bool.
CLEAN, INF = jnp.float32(0), jnp.float32(1)


@each
def test_found_inf_keeps_every_bit_of_the_state_and_updates_nothing(name):
    tx = make(name)
    params = tree()
    _, state = update(tx, gradients(), tx.init(params), params, found_inf=CLEAN)
    bad = jax.tree.map(lambda x: x + jnp.nan, params)
    updates, after = update(tx, bad, state, params, found_inf=INF)
    assert_same_bits(after, state)
    for x in jax.tree.leaves(updates):
        assert (np.asarray(x) == 0).all()


@each
def test_a_step_that_found_no_inf_is_a_step(name):
    params = tree()
    args = make(name), gradients(), make(name).init(params), params
    assert_close(update(*args, found_inf=CLEAN), update(*args))


@pytest.mark.parametrize("name", ["sgd", "larc_sgd"])
def test_found_inf_and_grad_scale_may_be_numbers_of_python(name):
    tx = make(name)
    params = {"w": jnp.ones(3)}
    args = params, tx.init(params), params
    updates, state = tx.update(*args, found_inf=True)
    assert_same_bits((updates["w"], state), (jnp.zeros(3), tx.init(params)))
    assert_close(tx.update(*args, found_inf=False), tx.update(*args))
    scaled = tx.update({"w": 8 * params["w"]}, *args[1:], grad_scale=8)
    assert_close(scaled, tx.update(*args))


@each
def test_gradients_are_divided_by_grad_scale(name):
    tx = make(name)
    params, grads = tree(), gradients()
    scaled = jax.tree.map(lambda g: g * 1024.0, grads)
    state = tx.init(params)
    got = update(tx, scaled, state, params, grad_scale=jnp.float32(1024))
    assert_close(got, update(tx, grads, state, params))


@each
def test_without_found_inf_nobody_looks_for_one(name):
    tx = make(name)
    params, bad = tree(), gradients()
    bad["gain"] += jnp.nan
    _, state = update(tx, gradients(), tx.init(params), params)
    updates, after = update(tx, bad, state, params)
    assert np.isnan(updates["gain"])
    assert {int(x) for _, x in optax.tree.get_all_with_path(after, "count")} == {2}


# What JAX does with them


@each
def test_under_scan_and_cond(name):
    tx = make(name)
    params = tree()
    grads = jax.tree.map(lambda *x: jnp.stack(x), *map(gradients, range(3)))
    skips = jnp.asarray([False, True, False])

    def step(carry, x):
        params, state = carry
        grads, skip = x

        def still():
            zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
            return zeros, state

        def go():
            return tx.update(grads, state, params)

        updates, state = lax.cond(skip, still, go)
        return (optax.apply_updates(params, updates), state), None

    carry = params, tx.init(params)
    got, _ = jax.jit(lambda c: lax.scan(step, c, (grads, skips)))(carry)
    params, state = carry
    for seed in (0, 2):
        updates, state = update(tx, gradients(seed), state, params)
        params = optax.apply_updates(params, updates)
    assert_close(got, (params, state), rtol=1e-5)


@each
def test_under_vmap_with_a_learning_rate_each(name):
    factory, kwargs = OPTIMIZERS[name]

    @jax.jit
    @jax.vmap
    def step(learning_rate, grads, params, found_inf):
        tx = factory(**(kwargs | {"learning_rate": learning_rate}))
        return tx.update(grads, tx.init(params), params, found_inf=found_inf)

    def stack(trees):
        return jax.tree.map(lambda *x: jnp.stack(x), *trees)

    params = [tree(seed=seed) for seed in range(3)]
    grads = [gradients(seed) for seed in range(3, 6)]
    rates, flags = [0.1, 0.1, 0.2], jnp.asarray([False, True, False])
    got = step(jnp.asarray(rates), stack(grads), stack(params), flags)
    for i in (0, 2):
        tx = make(name, learning_rate=rates[i])
        one = update(tx, grads[i], tx.init(params[i]), params[i])
        assert_close(jax.tree.map(lambda x, i=i: x[i], got), one)
    updates, state = jax.tree.map(lambda x: x[1], got)
    assert_same_bits(state, make(name, learning_rate=0.1).init(params[1]))
    assert not any(np.asarray(x).any() for x in jax.tree.leaves(updates))


@each
def test_without_jit(name):
    tx = make(name)
    params = {"w": jnp.ones(3), "none": None}
    args = params, tx.init(params), params
    assert_close(tx.update(*args), update(tx, *args))


# Values: equal, hashable, saved


@each_bare
def test_equal_hyperparameters_make_equal_transformations(name):
    a, b = fresh(name), fresh(name)
    assert a == b
    assert hash(a) == hash(b)
    for other in (make(name, learning_rate=0.7), make(name, mask=False)):
        assert a != other
    rates = {make(n, learning_rate=0.1) for n in BARE}
    assert len(rates) == len(BARE)
    around, again = jo.larc(a, 0.1), jo.larc(b, 0.1)
    assert around == again
    assert hash(around) == hash(again)
    assert around != jo.larc(a, 0.1, clip=False)
    assert a != around


@each
def test_they_survive_pickle(name):
    params = tree()
    tx = make(name)
    state = tx.init(params)
    assert_same_bits(pickle.loads(pickle.dumps(state)), state)
    if name != "larc_adam":  # optax's own are closures
        again = pickle.loads(pickle.dumps(tx))
        assert again == tx
        assert hash(again) == hash(tx)


@pytest.fixture(scope="module")
def stepped():
    """By name: a state after one step."""
    with jax.numpy_dtype_promotion("standard"):
        return {
            name: update(tx, gradients(), tx.init(tree()), tree())[1]
            for name, tx in ((name, make(name)) for name in OPTIMIZERS)
        }


@each
def test_a_state_comes_back_through_flax(name, stepped):
    target = make(name).init(tree())
    saved = serialization.to_state_dict(stepped[name])
    fields = ("inner_state",) if name.startswith("larc") else FIELDS[name]
    assert set(saved) == {"count", *fields}
    assert_same_bits(serialization.from_state_dict(target, saved), stepped[name])
    saved = serialization.to_bytes(stepped[name])
    assert_same_bits(serialization.from_bytes(target, saved), stepped[name])


def test_all_states_come_back_through_orbax(stepped, tmp_path):
    target = {name: make(name).init(tree()) for name in OPTIMIZERS}
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "states", stepped)
        checkpointer.wait_until_finished()
        again = checkpointer.restore(tmp_path / "states", target)
    assert_same_bits(again, stepped)
