"""state.add_params: what is new, and that nothing else changes a bit."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict

import jamp
from jamp.optimizers import fused_adam
from tests.bits import assert_same_bits, bits, copy
from tests.oracles import adam as oracle

HALF = {"O2": np.float16, "O3": np.float16, "O5": ml_dtypes.bfloat16}
LR = 2.0**-6


# All shapes are one, so that operations compile once.
def old():
    return {
        "body": {"w": jnp.asarray([1.0, -2.1], jnp.float32)},
        "norm": {"scale": jnp.asarray([3.1, 0.3], jnp.float32)},
        "n": jnp.asarray([3, 4], jnp.int32),
    }


def new():
    """One leaf more in a mapping that is there, and a new mapping."""
    return {
        "body": {"extra": jnp.asarray([0.1, -0.7], jnp.float32)},
        "head": {
            "w": jnp.asarray([1.1, -0.3], jnp.float32),
            "norm": {"bias": jnp.asarray([0.1, 0.9], jnp.float32)},
            "n": jnp.asarray([1, 2], jnp.int32),
        },
    }


def both():
    tree, more = old(), new()
    return tree | more | {"body": tree["body"] | more["body"]}


def named(tree):
    return flatten_dict(tree, sep="/")


def floats(tree):
    """The float32 leaves by name; moments hold None for the others."""
    leaves = {k: x for k, x in named(tree).items() if x is not None}
    return {k: x for k, x in leaves.items() if x.dtype == np.float32}


def make(level, tree, tx, **kwargs):
    if level in HALF:
        kwargs = {"keep_fp32": "norm"} | kwargs
    rule = jamp.DynamicLossScale(2.0**8, window=3)
    return jamp.initialize(tree, tx, level, loss_scale=rule, verbosity=0, **kwargs)


def dot(p, xs):
    """A loss whose gradient is `xs`, given by the names of leaves."""
    leaves = named(p)
    return sum((leaves[k].astype(jnp.float32) * x).sum() for k, x in xs.items())


def step(state, xs):
    return state.apply_gradients(grads=jamp.scaled_grad(dot)(state, xs))


def gradients(tree, seed, bad=False):
    """Exact in both halves; or one of them infinite."""
    rng = np.random.default_rng(seed)
    xs = {k: rng.integers(-8, 8, x.shape) / 64.0 for k, x in floats(tree).items()}
    if bad:
        xs["body/w"][1] = np.inf
    return {k: np.float32(x) for k, x in xs.items()}


def trained(state, zeros=()):
    """After two steps with a skip between them; `zeros` had no gradient."""
    for seed, bad in ((0, False), (1, True), (2, False)):
        xs = gradients(old(), seed, bad)
        state = step(state, xs | {k: np.zeros_like(x) for k, x in dict(zeros).items()})
    return state


def by_path(state):
    leaves = jax.tree.leaves_with_path((state.params, state.opt_state))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_old_bits(after, before):
    """All leaves that `before` has are there, and scales and counters."""
    now = by_path(after)
    for path, leaf in by_path(before).items():
        assert leaf.dtype == now[path].dtype, path
        assert bits(leaf) == bits(now[path]), path
    for name in ("step", "loss_scales", "skipped_steps", "last_step_skipped"):
        assert_same_bits(getattr(after, name), getattr(before, name))


ADAM = optax.adam(LR)
FUSED = fused_adam(LR)
REMAINDER = {"store_remainder": True}
COMBINATIONS = {
    "O0 adam": ("O0", ADAM, {}),
    "O1 adam": ("O1", ADAM, {}),
    "O2 adam": ("O2", ADAM, {}),
    "O3 adam": ("O3", ADAM, {}),
    "O5 adam, remainders": ("O5", ADAM, REMAINDER),
    "O2 fused_adam": ("O2", FUSED, {}),
    "O5 fused_adam, remainders": ("O5", FUSED, REMAINDER),
}


@functools.cache
def trained_at(name):
    level, tx, options = COMBINATIONS[name]
    return trained(make(level, old(), tx, **options))


# One group


@pytest.mark.standard_promotion  # for optax.adam
@pytest.mark.parametrize("name", COMBINATIONS)
def test_old_bits_stay_and_new_params_begin_afresh(name):
    level, tx, options = COMBINATIONS[name]
    state = trained_at(name)
    before, given = copy(state), new()
    after = state.add_params(given)
    assert_same_bits(copy(state), before)
    assert_old_bits(after, state)
    assert type(after) is type(state)
    assert (after.step, after.skipped_steps) == (2, 1)
    assert after.properties == state.properties

    masters, params = named(jamp.master_params(after)), named(after.params)
    assert params.keys() == named(both()).keys()
    for path, value in named(given).items():
        half = HALF.get(level, np.float32)
        whole = level not in HALF or "norm" in path or path == "head/n"
        dtype = value.dtype if whole else half
        assert params[path].dtype == dtype, path
        if not options:  # with remainders a tie may be rounded the other way
            assert bits(params[path]) == np.asarray(value).astype(dtype).tobytes()
        kept = np.asarray(params[path]).astype(value.dtype) if level == "O3" else value
        assert bits(masters[path]) == bits(kept), path
    for moment in ("mu", "nu"):
        moments = floats(optax.tree.get(after.opt_state, moment))
        assert moments.keys() == floats(both()).keys()
        assert not any(moments[path].any() for path in floats(given))
    assert optax.tree.get(after.opt_state, "count") == 2


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", COMBINATIONS)
def test_later_steps_are_those_of_params_that_had_no_gradient_so_far(name):
    level, tx, options = COMBINATIONS[name]
    state = trained_at(name).add_params(new())
    other = trained(make(level, both(), tx, **options), floats(new()))
    later = [gradients(both(), 3), gradients(both(), 4, bad=True), gradients(both(), 5)]
    for xs in later:
        state, other = step(state, xs), step(other, xs)
        assert_same_bits(copy(state.params), copy(other.params))
        assert_same_bits(copy(state.opt_state), copy(other.opt_state))
        assert_same_bits(state.loss_scales, other.loss_scales)
    assert (state.step, state.skipped_steps) == (4, 2)

    # So is the plain run in float64, with no skipped step in it.
    if level == "O3":
        return  # it has no masters to compare
    paths = list(floats(both()))
    clean = [gradients(old(), 0), gradients(old(), 2), later[0], later[2]]
    grads = [
        [xs.get(k, np.zeros(floats(both())[k].shape)) for k in paths] for xs in clean
    ]
    *_, expected = oracle.adam(
        [np.asarray(floats(both())[k]) for k in paths], grads, learning_rate=LR
    )
    masters = named(jamp.master_params(state))
    for path, wanted in zip(paths, expected, strict=True):
        np.testing.assert_allclose(masters[path], wanted, rtol=2e-6, atol=2e-6)


def test_a_compiled_step_goes_on_and_a_donated_one_leaves_the_users_arrays():
    tx, given = optax.sgd(LR, momentum=0.5), new()
    before = copy(given)
    donating = jax.jit(step, donate_argnums=0)
    state = donating(make("O2", old(), tx), gradients(old(), 0))
    state = state.add_params(given)
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)
    xs = gradients(both(), 1)
    # Momentum 0.5 on dyadic numbers: float64 and float32 agree in every bit.
    for _ in range(2):
        state = donating(state, xs)
    assert_same_bits(copy(given), before)
    masters = named(jamp.master_params(state))
    for path, value in floats(given).items():
        g = xs[path].astype(np.float64)
        steps = (np.float64(value), np.float32(LR * g), np.float32(LR * 1.5 * g))
        wanted = np.float32(np.float32(steps[0] - steps[1]) - steps[2])
        np.testing.assert_array_equal(masters[path], wanted)


def multi_steps():
    return optax.MultiSteps(optax.sgd(LR, 0.5), 3).gradient_transformation()


def labelled():
    def label(params):
        return jax.tree.map_with_path(lambda path, _: path[0].key, params)

    txs = {name: optax.sgd(LR, 0.5) for name in ("body", "norm", "head", "n")}
    return optax.partition(txs, label)


OTHERS = {
    "MultiSteps": multi_steps,
    "partition": labelled,
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(1e-3),
    "chain": lambda: optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.ema(0.5),
        optax.add_noise(1e-3, 0.5, key=3),
        optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 10)),
    ),
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("name", OTHERS)
def test_optimizers_of_every_kind_take_params_on(name):
    state = trained(make("O2", old(), OTHERS[name]()))
    after = state.add_params(new())
    assert_old_bits(after, state)
    for path, leaf in by_path(after).items():
        if "extra" in path and path.startswith("[1]") and "masters" not in path:
            start = {"schedule_free": new()["body"]["extra"]}.get(name, [0, 0])
            np.testing.assert_array_equal(leaf, start, path)
    later = step(after, gradients(both(), 3))
    assert later.step == 3
    now, was = (jamp.master_params(s)["head"]["w"] for s in (later, after))
    assert bits(now) != bits(was)  # MultiSteps has its third gradient


@pytest.mark.parametrize("kind", [dict, FrozenDict])
def test_params_keep_their_mapping(kind):
    state = make("O2", kind(old()), optax.sgd(LR)).add_params(kind(new()))
    assert type(state.params) is kind
    assert named(dict(state.params["head"])).keys() == named(new()["head"]).keys()


def test_params_may_be_added_again_and_nothing_adds_nothing():
    state = trained(make("O2", old(), optax.sgd(LR, 0.5)))
    assert_same_bits(copy(state.add_params({})), copy(state))
    once = state.add_params(new())
    parts = [{"head": new()["head"]}, {"body": new()["body"]}]
    twice = state.add_params(parts[0]).add_params(parts[1])
    assert_same_bits(copy(twice.params), copy(once.params))
    assert_same_bits(copy(twice.opt_state), copy(once.opt_state))


def test_a_value_beyond_half_is_clamped_and_its_master_is_not():
    state = make("O2", old(), optax.sgd(1.0))
    state = state.add_params({"v": jnp.asarray([1e6], jnp.float32)})
    assert (state.params["v"], jamp.master_params(state)["v"]) == (65504, 1e6)


@pytest.mark.parametrize("level, dtype", [("O0", np.float32), ("O2", np.float16)])
def test_half_params_may_be_allowed(level, dtype):
    state, half = make(level, old(), optax.sgd(1.0)), {"v": jnp.ones(2, jnp.bfloat16)}
    after = state.add_params(half, allow_incoming_model_not_fp32=True)
    assert jamp.master_params(after)["v"].dtype == jnp.float32
    assert after.params["v"].dtype == dtype


def test_extra_fields_grow_alike_and_name_the_new_batchnorms():
    zero, three = jnp.zeros(2, jnp.float32), jnp.full(2, 3.0, jnp.float32)
    stats = {"bn": {"mean": zero, "var": zero}}
    tree = {"bn": {"scale": jnp.ones(2, jnp.float32)}}
    state = jamp.initialize(
        tree, optax.sgd(1.0), "O2", batch_stats=stats, rate=jnp.ones(()), verbosity=0
    )
    more = {"other": {"mean": three, "var": three}}
    leaf = {"scale": jnp.ones(2, jnp.float32)}
    after = state.add_params({"other": leaf, "plain": leaf}, batch_stats=more)
    dtypes = {name: p["scale"].dtype for name, p in after.params.items()}
    assert dtypes == {"bn": "f4", "other": "f4", "plain": "f2"}
    assert after.batch_stats.keys() == {"bn", "other"}
    assert_same_bits(after.batch_stats["other"], more["other"])
    assert_same_bits(after.batch_stats["bn"], state.batch_stats["bn"])
    assert after.rate == 1


# Several groups


def keyed(values):
    return dict(zip("abcd", values, strict=False))


def following(pack, values):
    """The container of groups to add to two."""
    return dict(zip("cd", values, strict=False)) if pack is keyed else pack(values)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("level, tx", [("O0", ADAM), ("O2", ADAM), ("O5", FUSED)])
@pytest.mark.parametrize("pack", [keyed, list, tuple])
def test_new_groups_begin_as_in_a_state_of_their_own(pack, level, tx):
    keys = "abcd" if pack is keyed else range(4)
    options = REMAINDER if tx is FUSED else {}

    def loss_fn(p, key, xs):
        return dot(p[key], xs)

    def step(state, key, xs):
        grads = jamp.scaled_grad(loss_fn, wrt=key)(state, key, xs)
        return state.apply_gradients(grads=grads)

    state = make(level, pack([old(), old()]), pack([ADAM, tx]), **options)
    for seed, bad in ((0, False), (1, True)):
        for key in keys[:2]:
            state = step(state, key, gradients(old(), seed, bad))
    before = copy(state)
    trees = following(pack, [both(), old()])
    after = state.add_params(trees, following(pack, [tx, ADAM]))
    assert_same_bits(copy(state), before)
    assert_old_bits_of_groups(after, state, keys[:2])

    fresh = make(level, both(), tx, **options)
    rounded = named(after.params[keys[2]])
    assert {k: x.dtype for k, x in rounded.items()} == {
        k: x.dtype for k, x in named(fresh.params).items()
    }
    assert_same_bits(after.params[keys[2]], fresh.params)
    assert_same_bits(after.opt_state[keys[2]], fresh.opt_state)
    assert [int(after.skipped_steps[key]) for key in keys] == [1, 1, 0, 0]

    fresh = fresh.replace(loss_scales=after.loss_scales)
    for seed, bad in ((2, False), (3, True), (4, False)):
        xs = gradients(both(), seed, bad)
        after = step(after, keys[2], xs)
        fresh = fresh.apply_gradients(grads=jamp.scaled_grad(dot)(fresh, xs))
        assert_same_bits(after.params[keys[2]], fresh.params)
        assert_same_bits(after.opt_state[keys[2]], fresh.opt_state)
        assert_same_bits(after.loss_scales, fresh.loss_scales)
        for name in ("params", "opt_state"):
            for key in keys[:2]:
                assert_same_bits(getattr(after, name)[key], getattr(state, name)[key])
    assert [int(after.skipped_steps[key]) for key in keys] == [1, 1, 1, 0]
    assert after.step == 4


def assert_old_bits_of_groups(after, before, keys):
    for name in ("params", "opt_state", "skipped_steps", "last_step_skipped"):
        now, was = getattr(after, name), getattr(before, name)
        assert type(now) is type(was)
        assert len(now) == 4
        for key in keys:
            assert_same_bits(now[key], was[key])
    for name in ("step", "loss_scales"):
        assert_same_bits(getattr(after, name), getattr(before, name))


def test_fields_of_each_group_get_entries_for_the_new_ones():
    zero, one = jnp.zeros(2, jnp.float32), jnp.ones(2, jnp.float32)
    tree, tx = {"w": one}, optax.sgd(1.0)
    state = make("O0", {"a": tree}, {"a": tx}, stats={"a": zero}, shared=zero)
    with pytest.raises(ValueError, match="stats"):
        state.add_params({"b": tree}, {"b": tx})
    after = state.add_params({"b": tree}, {"b": tx}, stats={"b": one})
    assert {key: x.tolist() for key, x in after.stats.items()} == {
        "a": [0, 0],
        "b": [1, 1],
    }
    assert_same_bits(after.shared, zero)
