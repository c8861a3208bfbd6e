"""state.add_params: what is new, that nothing else changes a bit, what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from flax.traverse_util import flatten_dict

import jamp
from jamp.optimizers import fused_adam
from tests.support.bits import assert_same_bits, bits, copy
from tests.support.states import HALF, State

LR = 2.0**-6


def pair(*values, dtype=jnp.float32):
    """All shapes are one, so that operations compile once."""
    return jnp.asarray(values, dtype)


def old():
    return {
        "body": {"w": pair(1.0, -2.1)},
        "norm": {"scale": pair(3.1, 0.3)},
        "n": pair(3, 4, dtype=jnp.int32),
    }


def new():
    """One leaf more in a mapping that is there, and a new mapping."""
    norm, n = {"bias": pair(0.1, 0.9)}, pair(1, 2, dtype=jnp.int32)
    head = {"w": pair(1.1, -0.3), "norm": norm, "n": n}
    return {"body": {"extra": pair(0.1, -0.7)}, "head": head}


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
    return jamp.initialize(
        tree, tx, level, loss_scale=rule, verbosity=0, state_class=State, **kwargs
    )


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
    for seed in (0, 1, 2):
        xs = gradients(old(), seed, bad=seed == 1)
        state = step(state, xs | {k: np.zeros_like(x) for k, x in dict(zeros).items()})
    return state


def by_path(state):
    leaves = jax.tree.leaves_with_path((state.params, state.opt_state))
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def assert_old_bits(after, before):
    """All leaves that `before` has are there, and scales and counters."""
    now, was = by_path(after), by_path(before)
    assert_same_bits({path: now[path] for path in was}, was)
    for name in ("step", "loss_scales", "skipped_steps", "last_step_skipped"):
        assert_same_bits(getattr(after, name), getattr(before, name))


ADAM, FUSED = optax.adam(LR), fused_adam(LR)
REMAINDER = {"store_remainder": True}
COMBINATIONS = [("O0", ADAM, {}), ("O2", FUSED, {}), ("O5", FUSED, REMAINDER)]


@pytest.mark.standard_promotion  # for optax.adam
@pytest.mark.parametrize("level, tx, options", COMBINATIONS)
def test_old_bits_stay_and_new_params_begin_afresh(level, tx, options):
    state, given = trained(make(level, old(), tx, **options)), new()
    before = copy(state)
    after = state.add_params(given)
    assert_same_bits(copy(state), before)
    assert_old_bits(after, state)
    assert (type(after), after.properties) == (type(state), state.properties)

    masters, params = named(jamp.master_params(after)), named(after.params)
    assert params.keys() == named(both()).keys()
    for path, value in named(given).items():
        whole = level not in HALF or "norm" in path or path == "head/n"
        dtype = value.dtype if whole else HALF[level]
        assert params[path].dtype == dtype, path
        if not options:  # with remainders a tie may be rounded the other way
            assert bits(params[path]) == np.asarray(value).astype(dtype).tobytes()
        assert bits(masters[path]) == bits(value), path
    for moment in ("mu", "nu"):
        moments = floats(optax.tree.get(after.opt_state, moment))
        assert moments.keys() == floats(both()).keys()
        assert not any(moments[path].any() for path in floats(given))

    # Later steps are those of params that had no gradient so far.
    other = trained(make(level, both(), tx, **options), floats(given))
    for seed in (3, 4, 5):
        xs = gradients(both(), seed, bad=seed == 4)
        after, other = step(after, xs), step(other, xs)
        for field in ("params", "opt_state", "loss_scales"):
            assert_same_bits(copy(getattr(after, field)), copy(getattr(other, field)))
    assert (after.step, after.skipped_steps) == (4, 2)


def test_the_state_has_arrays_of_its_own():
    given = new()
    state = make("O2", old(), optax.sgd(LR, momentum=0.5)).add_params(given)
    arrays = jax.tree.leaves((state, given))
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)


def test_params_keep_their_mapping():
    state = make("O2", FrozenDict(old()), optax.sgd(LR, 0.5))
    assert_same_bits(copy(state.add_params({})), copy(state))
    assert type(state.add_params(new()).params) is FrozenDict


def test_extra_fields_grow_alike_and_name_the_new_batchnorms():
    leaf, more = {"scale": pair(1, 1)}, {"other": {"mean": pair(3), "var": pair(3)}}
    fields = {"batch_stats": {"bn": {"mean": pair(0), "var": pair(0)}}, "rate": pair(1)}
    state = jamp.initialize(
        {"bn": leaf}, SGD, "O2", verbosity=0, state_class=State, **fields
    )
    after = state.add_params({"other": leaf, "plain": leaf}, batch_stats=more)
    dtypes = {name: p["scale"].dtype for name, p in after.params.items()}
    assert dtypes == {"bn": "f4", "other": "f4", "plain": "f2"}
    assert_same_bits(after.batch_stats, fields["batch_stats"] | more)
    assert_same_bits(after.rate, state.rate)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("pack", [dict, list])
def test_new_groups_begin_as_in_a_state_of_their_own(pack):
    a, b = "ab" if pack is dict else range(2)

    def packed(key, value):
        return {key: value} if pack is dict else [value]

    state = make("O5", packed(a, old()), packed(a, ADAM), **REMAINDER)
    for seed in (0, 1):
        xs = gradients(old(), seed, bad=seed == 1)
        grads = jamp.scaled_grad(lambda p, xs: dot(p[a], xs), wrt=a)(state, xs)
        state = state.apply_gradients(grads=packed(a, grads))
    before = copy(state)
    after = state.add_params(packed(b, both()), packed(b, FUSED))
    assert_same_bits(copy(state), before)
    fresh = make("O5", both(), FUSED, **REMAINDER)
    for name in ("params", "opt_state", "skipped_steps", "last_step_skipped"):
        now, was = getattr(after, name), getattr(state, name)
        assert (type(now), len(now)) == (type(was), 2)
        assert_same_bits(now[a], was[a])
        assert_same_bits(now[b], getattr(fresh, name))
    assert_same_bits((after.step, after.loss_scales), (state.step, state.loss_scales))
    assert (after.skipped_steps[a], after.tx[b]) == (1, fresh.tx)


def test_what_each_group_or_the_state_has_more_is_named():
    tree, tx, zero = {"w": pair(1, 1)}, optax.sgd(1.0), pair(0, 0)
    state = make("O0", {"a": tree}, {"a": tx}, stats={"a": zero}, shared=zero)
    with pytest.raises(ValueError, match="stats has one entry per group"):
        state.add_params({"b": tree}, {"b": tx})
    after = state.add_params({"b": tree}, {"b": tx}, stats={"b": pair(1, 1)})
    assert_same_bits(after.stats, {"a": zero, "b": pair(1, 1)})
    assert_same_bits(after.shared, zero)
    with pytest.raises(TypeError, match="'statz', but .*'stats'"):
        one(stats=LEAF).add_params({"head": LEAF}, statz=LEAF)


LEAF = {"v": jnp.ones(2, jnp.float32)}
SGD = optax.sgd(1.0)


def begin(tree, tx=SGD, **fields):
    return jamp.initialize(tree, tx, "O0", verbosity=0, state_class=State, **fields)


def one(tx=SGD, **fields):
    return begin({"body": {"w": LEAF["v"]}, "norm": {"scale": LEAF["v"]}}, tx, **fields)


def two():
    return begin({"a": LEAF, "b": LEAF}, {"a": SGD, "b": SGD})


def keeping(init):
    """An optimizer of such a state."""
    return optax.GradientTransformation(
        init, lambda updates, state, _=None: (updates, state)
    )


def flat(p):
    """All moments in one vector."""
    return {"moments": jnp.zeros(sum(x.size for x in jax.tree.leaves(p)))}


def by_count(p):
    """Under a name that is another with more params."""
    return {f"of {len(jax.tree.leaves(p))}": jnp.zeros(2)}


IN_HALF = {"head": {"v": jnp.ones(2, jnp.float16)}}
FP8 = {"params": LEAF, "_overwrite_with_gradient": {}}
WRAPPED = jamp.master_weights(SGD)
NORM = ({"norm": {"scale": LEAF["v"]}},)
# The state, what add_params is given, the error, and words that it says.
REFUSED = [
    (one, NORM, ValueError, "'norm'.*'scale'.* exists already"),
    (one, ({"norm": LEAF["v"]},), ValueError, "'norm'.* exists already"),
    (one, (IN_HALF,), ValueError, r"params\['head'\]\['v'\].*float16"),
    (one, ([LEAF["v"]],), TypeError, "merges a mapping.* got list for .* dict"),
    (one, (LEAF, SGD), TypeError, "the state has one group"),
    (lambda: begin(LEAF, None), (LEAF,), TypeError, "The state has no optimizer"),
    (
        lambda: one(keeping(flat)),
        (LEAF,),
        ValueError,
        "not kept per param at .*moments",
    ),
    (
        lambda: one(keeping(by_count)),
        (LEAF,),
        ValueError,
        "not kept per param at .*of 2",
    ),
    (lambda: begin(FP8), (LEAF,), ValueError, r"are collections: .* got \['v'\]"),
    (two, ({"c": LEAF}, SGD), TypeError, "several groups: .* dict.*tx=Gradient"),
    (
        two,
        ({"b": LEAF}, {"b": SGD}),
        ValueError,
        r"params\['b'\]\['v'\] exists already",
    ),
    (two, ({"c": LEAF}, {"c": WRAPPED}), ValueError, "master_weights"),
]


@pytest.mark.parametrize("make_state, args, error, words", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(
    make_state, args, error, words
):
    state = make_state()
    before = copy(state)
    with pytest.raises(error, match=f"(?s){words}"):
        state.add_params(*args)
    assert_same_bits(copy(state), before)
