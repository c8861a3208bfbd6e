"""Test `state.add_params`: new params start fresh, and old ones keep their bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict

import jamp
from jamp.optimizers import fused_adam
from tests.support.bits import assert_same_bits, copy
from tests.support.states import SGD, dot, make, step_on

RULE = jamp.DynamicLossScale(2.0**8, window=3)


def pair(*values, dtype=jnp.float32):
    """Returns an array. One shape for all means that operations compile once."""
    return jnp.asarray(values, dtype)


def old():
    return {
        "body": {"w": pair(1.0, -2.1)},
        "norm": {"scale": pair(3.1, 0.3)},
        "n": pair(3, 4, dtype=jnp.int32),
    }


def new():
    """Returns one more leaf in a mapping of `old`, and a new mapping."""
    norm, n = {"bias": pair(0.1, 0.9)}, pair(1, 2, dtype=jnp.int32)
    head = {"w": pair(1.1, -0.3), "norm": norm, "n": n}
    return {"body": {"extra": pair(0.1, -0.7)}, "head": head}


def merged(tree, more):
    return tree | more | {"body": tree["body"] | more["body"]}


def gradients(tree, seed):
    """Returns gradients that are exact in half. Seeds 1 and 4 have an infinity."""
    rng = np.random.default_rng(seed)
    xs = jax.tree.map(lambda x: np.float32(rng.integers(-8, 8, x.shape) / 64), tree)
    if seed in (1, 4):
        xs["body"]["w"][1] = np.inf
    return xs


step = step_on(dot)


def trained(state, more):
    """Returns the state after two steps with a skip between them."""
    for seed in (0, 1, 2):
        state = step(state, merged(gradients(old(), seed), more))
    return state


ADAM, FUSED = optax.adam(2.0**-6), fused_adam(2.0**-6)
REMAINDER = {"store_remainder": True}
COMBINATIONS = [("O0", ADAM, {}), ("O2", FUSED, {}), ("O5", FUSED, REMAINDER)]


@pytest.mark.slow
@pytest.mark.standard_promotion  # for optax.adam
@pytest.mark.parametrize("level, tx, options", COMBINATIONS)
def test_new_params_start_as_if_their_gradients_had_been_zero(level, tx, options):
    options = {"tx": tx, "loss_scale": RULE, "keep_fp32": None} | options
    if level != "O0":
        options["keep_fp32"] = "norm"
    state = trained(make(level, old(), **options), {"body": {}})
    before = copy(state)
    after = state.add_params(new())
    assert_same_bits(copy(state), before)
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, np.float32), new())
    other = trained(make(level, merged(old(), new()), **options), zeros)
    for seed in (3, 4, 5):
        assert_same_bits(copy(after), copy(other))
        xs = gradients(merged(old(), new()), seed)
        after, other = step(after, xs), step(other, xs)
    assert_same_bits(copy(after), copy(other))
    assert (after.step, after.skipped_steps) == (4, 2)


def test_params_keep_their_mapping_and_the_state_shares_no_array():
    given, state = new(), make("O2", FrozenDict(old()))
    assert_same_bits(copy(state.add_params({})), copy(state))
    state = state.add_params(given)
    assert type(state.params) is FrozenDict
    arrays = jax.tree.leaves((state, given))
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)


def test_extra_fields_grow_and_identify_new_batchnorms():
    leaf, more = {"scale": pair(1, 1)}, {"other": {"mean": pair(3), "var": pair(3)}}
    fields = {"batch_stats": {"bn": {"mean": pair(0), "var": pair(0)}}, "rate": pair(1)}
    state = make("O2", {"bn": leaf}, **fields)
    after = state.add_params({"other": leaf, "plain": leaf}, batch_stats=more)
    dtypes = {name: p["scale"].dtype for name, p in after.params.items()}
    assert dtypes == {"bn": "f4", "other": "f4", "plain": "f2"}
    assert_same_bits(after.batch_stats, fields["batch_stats"] | more)
    assert_same_bits(after.rate, state.rate)
    # A name identifies a BatchNorm without statistics, as in initialize.
    after = state.add_params({"bn_head": leaf})
    every = make("O2", {"bn": leaf, "bn_head": leaf}, **fields)
    assert_same_bits(copy(after.params), copy(every.params))


@pytest.mark.standard_promotion
@pytest.mark.parametrize("pack", [dict, list])
def test_new_groups_start_like_in_a_separate_state(pack):
    a, b = "ab" if pack is dict else range(2)

    def packed(key, value):
        return {key: value} if pack is dict else [value]

    options = {"loss_scale": RULE, "keep_fp32": "norm"} | REMAINDER
    state = make("O5", packed(a, old()), packed(a, ADAM), **options)
    for seed in (0, 1):
        backward = jamp.scaled_grad(lambda p, xs: dot(p[a], xs), wrt=a)
        grads = packed(a, backward(state, gradients(old(), seed)))
        state = state.apply_gradients(grads=grads)
    before, more = copy(state), merged(old(), new())
    after = state.add_params(packed(b, more), packed(b, FUSED))
    assert_same_bits(copy(state), before)
    fresh = make("O5", more, FUSED, **options)
    for name in ("params", "opt_state", "skipped_steps", "last_step_skipped"):
        now, was = getattr(after, name), getattr(state, name)
        assert (type(now), len(now)) == (type(was), 2)
        assert_same_bits(now[a], was[a])
        assert_same_bits(now[b], getattr(fresh, name))
    assert_same_bits((after.step, after.loss_scales), (state.step, state.loss_scales))
    assert (after.skipped_steps[a], after.tx[b]) == (1, fresh.tx)


@pytest.mark.parametrize("pack", [list, tuple])
def test_rules_see_the_paths_that_initialize_sees(pack):
    tree, bn = {"w": pair(1, 2)}, {"bn": {"scale": pair(1, 1)}}
    groups = pack([tree | bn, tree | bn, tree | bn])
    for rule in ("^0/", "^0/w|^1/w", lambda path, _: path.startswith("1/")):
        for level in ("O2", "O5"):
            every = make(level, groups, pack([SGD] * 3), keep_fp32=rule)
            state = make(level, groups[:1], pack([SGD]), keep_fp32=rule)
            state = state.add_params(groups[1:2], pack([SGD]))
            state = state.add_params(groups[2:], pack([SGD]))
            assert_same_bits(copy(state), copy(every))


LEAF = {"v": jnp.ones(2, jnp.float32)}


def one(tx=SGD, **fields):
    tree = {"body": {"w": LEAF["v"]}, "norm": {"scale": LEAF["v"]}}
    return make("O0", tree, tx, **fields)


def two():
    return make("O0", {"a": LEAF, "b": LEAF}, {"a": SGD, "b": SGD})


def test_fields_take_more_entries():
    tree, zero = {"w": pair(1, 1)}, pair(0, 0)
    state = make("O0", {"a": tree}, {"a": SGD}, stats={"a": zero}, shared=zero)
    assert_same_bits(state.add_params({"b": tree}, {"b": SGD}).stats, {"a": zero})
    after = state.add_params({"b": tree}, {"b": SGD}, stats={"b": pair(1, 1)})
    assert_same_bits(after.stats, {"a": zero, "b": pair(1, 1)})
    assert_same_bits(after.shared, zero)
    with pytest.raises(TypeError, match="'statz'"):
        one(stats=LEAF).add_params({"head": LEAF}, statz=LEAF)


def keeping(init):
    """Returns an optimizer with a state of all leaves, which `init` makes."""
    init_all = lambda params: init(jax.tree.leaves(params))  # noqa: E731
    return optax.GradientTransformation(init_all, lambda g, state, _: (g, state))


# All moments in one vector, and under a name with the number of params.
FLAT = keeping(lambda leaves: {"moments": jnp.zeros(sum(x.size for x in leaves))})
COUNTED = keeping(lambda leaves: {f"of {len(leaves)}": jnp.zeros(2)})
IN_HALF = {"head": {"v": jnp.ones(2, jnp.float16)}}
FP8 = {"params": LEAF, "_overwrite_with_gradient": {}}
NORM, WRAPPED = {"norm": {"scale": LEAF["v"]}}, jamp.master_weights(SGD)
# The state, the arguments of add_params, the error, and its message.
REFUSED = [
    (one, (NORM,), ValueError, "'norm'.*'scale'.* exists already"),
    (one, ({"norm": LEAF["v"]},), ValueError, "'norm'.* exists already"),
    (one, (IN_HALF,), ValueError, r"params\['head'\]\['v'\].*float16"),
    (one, ([LEAF["v"]],), ValueError, "params exists already as a dict.* got a list"),
    (one, (LEAF, SGD), TypeError, "one group share its optimizer: leave tx out"),
    (lambda: one(None), (LEAF,), TypeError, "params stepped by None"),
    (lambda: one(FLAT), (LEAF,), ValueError, "at .*moments.* is not kept per param"),
    (lambda: one(COUNTED), (LEAF,), ValueError, "at .*of 2.* is not kept per param"),
    (lambda: make("O0", FP8), (LEAF,), ValueError, r"are collections: .* got \['v'\]"),
    (two, ({"c": LEAF},), TypeError, "tx=None .*New groups need their own"),
    (two, ({"c": LEAF}, SGD), ValueError, "tx exists already as a dict"),
    (two, ({"b": LEAF}, {"b": SGD}), ValueError, r"\['b'\]\['v'\] exists already"),
    (two, ({"c": LEAF}, {"c": WRAPPED}), ValueError, "master_weights"),
]


@pytest.mark.parametrize("begin, args, error, words", REFUSED)
def test_misfits_are_refused_and_change_nothing(begin, args, error, words):
    state = begin()
    before = copy(state)
    with pytest.raises(error, match=f"(?s){words}"):
        state.add_params(*args)
    assert_same_bits(copy(state), before)
