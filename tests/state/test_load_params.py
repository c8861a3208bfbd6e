"""Test `replace(params=...)` and `load_params`, also in NNX."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.core import FrozenDict

import jamp
import jamp.nnx
from tests.support.bits import assert_same_bits, bits
from tests.support.states import HALF, make

pytestmark = pytest.mark.standard_promotion  # optax and Flax promote

STILL = optax.adam(0.0)
SPLIT = "O5 with remainders"
LEVELS = ("O0", "O1", "O2", "O3", "O5", SPLIT)


def tree(value=0.1):
    return {"w": jnp.full(4, value), "norm": {"scale": jnp.full((), value)}}


def begun(level, tx=STILL, params=None):
    """Returns a state after a step, so that moments and counters are not zero."""
    params = tree() if params is None else params
    return stepped(make(level[:2], params, tx, store_remainder=level == SPLIT))


@jax.jit
def stepped(state):
    ones = jax.tree.map(lambda x: jnp.ones(x.shape, jnp.float32), state.params)
    return state.apply_gradients(grads=ones)


def rounded(x, level):
    return np.asarray(x).astype(HALF.get(level[:2], np.float32))


LOADS = {
    "replace": lambda state, new: state.replace(params=new),
    "load_params": lambda state, new: state.load_params(new),
    "in jit": jax.jit(lambda state, new: state.replace(params=new)),
    "closed over": lambda state, new: jax.jit(lambda n: state.replace(params=n))(new),
    "FrozenDict": lambda state, new: state.replace(params=FrozenDict(new)),
}


@pytest.mark.parametrize("level", LEVELS)
def test_loaded_params_take_the_dtypes_of_the_level(level):
    state, new = begun(level), tree(0.7)
    for how, load in LOADS.items():
        loaded = load(state, new)
        # A step at rate 0 rounds the masters to the params.
        for after in (loaded, stepped(loaded)):
            assert bits(after.params["w"]) == rounded(new["w"], level).tobytes(), how
            assert after.params["norm"]["scale"] == new["norm"]["scale"], how
            assert type(after.params) is dict
        digits = rounded(new["w"], "O3" if level == "O3" else "O0")
        assert bits(jamp.master_params(loaded)["w"]) == np.float32(digits).tobytes()
        moments = (optax.tree.get(s.opt_state, "mu") for s in (loaded, state))
        assert_same_bits(*moments)
        assert (loaded.step, loaded.loss_scale) == (state.step, state.loss_scale)


@pytest.mark.parametrize("level", ["O2", "O5", SPLIT])
def test_unchanged_half_params_keep_their_masters(level):
    state = begun(level, params={"w": jnp.asarray([0.1, 0.3, -0.7])})

    @jax.jit
    def clipped(state, most):
        params = jax.tree.map(lambda w: jnp.clip(w, -most, most), state.params)
        return state.replace(params=params)

    masters = jamp.master_params(clipped(state, state.params["w"][0] * 2))["w"]
    limit = np.float32(rounded(np.float32(0.1), level)) * 2
    assert masters.tolist() == [np.float32(0.1), limit, -limit]
    again = state.replace(params={**state.params})  # compares by identity
    assert again.opt_state.masters["w"] is state.opt_state.masters["w"]


def test_params_with_an_opt_state_or_shapes_are_set_unchanged():
    state, other = begun("O2"), begun("O2", params=tree(7.0))
    both = state.replace(params=other.params, opt_state=state.opt_state)
    assert both.params is other.params and both.opt_state is state.opt_state
    specs = jax.tree.map(lambda _: jax.sharding.PartitionSpec(), state.params)
    assert state.replace(params=specs).params is specs
    shapes = jax.eval_shape(lambda: state)
    assert shapes.replace(params=other.params).params is other.params


def test_one_of_several_groups_is_loaded():
    params, txs = {"a": tree(), "b": tree()}, {"a": STILL, "b": STILL}
    state = jamp.initialize(params, txs, "O2", keep_fp32="norm", verbosity=0)
    after = stepped(state.replace(params={**state.params, "b": tree(0.7)}))
    assert_same_bits(jamp.master_params(after), {"a": tree(), "b": tree(0.7)})
    anew = after.load_params(params, reset_optimizer=True)
    for key in params:
        assert optax.tree.get(after.opt_state[key], "count") == 1
        assert optax.tree.get(anew.opt_state[key], "count") == 0


def test_resetting_the_optimizer_keeps_the_masters():
    state = begun("O2")
    anew = state.load_params(state.params, reset_optimizer=True)
    assert_same_bits(anew.opt_state, make("O2", tree(), STILL).opt_state)
    assert anew.step == 1
    assert jax.tree.structure(stepped(anew)) == jax.tree.structure(anew)


def test_donating_a_loaded_state_keeps_the_given_params():
    state, new = begun("O2"), tree(0.7)
    for given in (new, jax.tree.map(lambda x: x.astype(jnp.float16), new)):
        loaded = jax.tree.map(jnp.copy, state).replace(params=given)
        jax.jit(lambda s: s, donate_argnums=0)(loaded)
        assert not any(x.is_deleted() for x in jax.tree.leaves(given))


def test_a_step_is_not_compiled_again_after_a_load():
    init = lambda _: jnp.asarray(1.0)  # noqa: E731 - weakly typed
    weak = optax.GradientTransformation(init, lambda g, s, _: (g, s))
    state = begun("O2", optax.chain(STILL, weak))
    step = jax.jit(lambda state: stepped.__wrapped__(state))
    step(state)
    step(state.replace(params=tree(0.7)))
    step(state.load_params(tree(0.7), reset_optimizer=True))
    assert step._cache_size() == 1


WRONG = {
    "params have no leaf at ['norm']['scale']": {"w": jnp.ones(4)},
    "params['w'] has dtype int32, expected float16": {**tree(), "w": jnp.arange(4)},
}


@pytest.mark.parametrize("message", WRONG)
def test_other_trees_are_errors_with_the_path(message):
    for load in LOADS.values():
        with pytest.raises(ValueError) as error:
            load(begun("O2"), WRONG[message])
        assert message in str(error.value)


def linear():
    return nnx.Linear(2, 3, rngs=nnx.Rngs(0))


def make_nnx(level):
    options = {"store_remainder": level == SPLIT, "verbosity": 0}
    return jamp.nnx.initialize(linear(), STILL, level[:2], **options)


@nnx.jit
def nnx_step(model, optimizer):
    loss_fn = lambda model: (model(jnp.ones((1, 2))) ** 2).mean()  # noqa: E731
    optimizer.update(model, jamp.nnx.scaled_grad(loss_fn)(model, optimizer))


NNX_LOADS = {
    "State": lambda o, m, new: o.load_params(m, new, reset_optimizer=True),
    "model": lambda o, m, new: o.load_params(m, nnx.merge(nnx.graphdef(linear()), new)),
    "nnx.update": lambda o, m, new: (
        nnx.update(m, jax.tree.map(lambda x: x.astype(m.kernel.dtype), new)),
        o.load_params(m),
    ),
}


@pytest.mark.parametrize("level", ["O2", SPLIT])
def test_nnx_params_are_loaded_in_place(level):
    new = jax.tree.map(lambda x: jnp.full(x.shape, 0.7), nnx.state(linear()))
    for how, load in NNX_LOADS.items():
        model, optimizer = make_nnx(level)
        load(optimizer, model, new)
        nnx_step(model, optimizer)
        masters = jamp.master_params(optimizer.amp_state(model))["bias"]
        expected = np.float32(0.7)
        if how == "nnx.update":
            expected = rounded(expected, level)
        assert bits(model.bias[...]) == rounded(np.full(3, 0.7), level).tobytes(), how
        np.testing.assert_array_equal(masters, np.full(3, expected, np.float32), how)


def test_nnx_update_with_float32_says_what_to_write():
    model, optimizer = make_nnx("O2")
    model.bias.set_value(jnp.ones(3, jnp.float32))
    with pytest.raises(ValueError, match=r"bias.*optimizer.load_params\(model\)"):
        nnx_step(model, optimizer)
    with pytest.raises(ValueError, match=r"params\['bias'\] has shape \(2,\)"):
        optimizer.load_params(model, {"bias": jnp.ones(2), "kernel": jnp.ones((2, 3))})


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("before", [optax.sgd(0.1), None], ids=["another", "none"])
def test_another_optimizer_starts_like_in_a_new_state(level, before):
    """The state before may have no optimizer, and so no masters."""
    options = {"store_remainder": level == SPLIT and before is not None}
    tx = optax.sgd(0.1, momentum=0.9)
    state = make(level[:2], tree(), before, **options).replace(tx=tx)
    state = state.load_params(state.params, reset_optimizer=True)
    wide = jamp.master_params(state)
    new = make(level[:2], wide, tx, **options)
    assert_same_bits(stepped(state).opt_state, stepped(new).opt_state)


@pytest.mark.parametrize("opt_state", [None, {"masters": {}, "inner_state": ()}])
def test_a_step_without_masters_raises(opt_state):
    """A stateless optimizer would step the half params, and nobody would notice."""
    state = make("O2", tree(), None).replace(tx=optax.scale(-0.1))
    state = dataclasses.replace(state, opt_state=opt_state)  # as a tool restored it
    with pytest.raises(TypeError, match="reset_optimizer=True"):
        stepped(state)
