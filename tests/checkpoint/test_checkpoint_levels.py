"""Test `to_checkpoint` and `from_checkpoint` between all levels and plain Flax."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.training.train_state import TrainState

import jamp
from jamp import optimizers as jo
from tests.support import subprocesses
from tests.support.bits import assert_same_bits, bits, copy
from tests.support.states import RUNNING, State

pytestmark = pytest.mark.standard_promotion  # for optax.adam on half trees

EXACT = ("O0", "O2", "O5")  # float32 params
ADAM = optax.adam(1e-2)


def params(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "dense": {"kernel": normal(3, 2), "bias": normal(2)},
        "bn1": {"scale": normal(2)},
        "ids": jnp.arange(3) + seed,
    }


def make(level, seed=0, tx=ADAM, tree=params, **kwargs):
    tree = tree(seed) if callable(tree) else tree
    return jamp.initialize(tree, tx, level, verbosity=0, state_class=State, **kwargs)


def rounded(master, dtype):
    """Rounds float32 to the nearest finite half, and keeps other leaves."""
    if master.dtype != np.float32:
        return np.asarray(master)
    limit = float(jnp.finfo(dtype).max)
    return np.clip(np.asarray(master), -limit, limit).astype(dtype)


def drawn(tree, seed=7):
    """Fills each array with different values from NumPy."""
    rng = np.random.default_rng(seed)

    def draw(x):
        if not jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            return jnp.asarray(rng.uniform(1, 100, x.shape), x.dtype)  # a bool is True
        data = rng.integers(0, 2**32, jax.random.key_data(x).shape, np.uint32)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))

    return jax.tree.map(draw, tree)


def lived(state):
    """Returns a used state: params are the rounded masters, and static scales stay."""
    old, state = state, drawn(state)
    scales = zip(old.loss_scale_rules, old.loss_scales, state.loss_scales, strict=True)
    scales = [
        now._replace(hysteresis=0 * now.hysteresis) if rule.moves else was
        for rule, was, now in scales
    ]
    half = lambda m, p: jnp.asarray(rounded(m, p.dtype))  # noqa: E731
    params = jax.tree.map(half, jamp.master_params(state), state.params)
    opt_state = state.opt_state  # otherwise, `replace` changes the masters
    return state.replace(params=params, opt_state=opt_state, loss_scales=tuple(scales))


@functools.cache
def at(level):
    return lived(make(level))


def written(checkpoint):
    """Returns NumPy arrays by name, through a msgpack file."""
    return serialization.msgpack_restore(serialization.msgpack_serialize(checkpoint))


def moved(state, target):
    return jamp.from_checkpoint(target, written(jamp.to_checkpoint(state)))


def moments(opt_state):
    """Returns the optimizers' states without masters."""
    has = lambda x: isinstance(x, jamp.MasterWeightsState)  # noqa: E731
    inner = lambda x: x.inner_state if has(x) else x  # noqa: E731
    return jax.tree.map(inner, opt_state, is_leaf=has)


def assert_fits(state, fresh):
    """Checks that a state has `initialize`'s types, so that no step compiles again."""
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    pairs = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(fresh), strict=True)
    for (path, x), y in pairs:
        where = jax.tree_util.keystr(path)
        assert isinstance(x, jax.Array), where
        assert (x.shape, x.dtype) == (y.shape, y.dtype), where
        assert not getattr(x, "weak_type", False), where
        assert x.sharding == y.sharding, where


def assert_rounded(given, masters):
    pairs = zip(jax.tree.leaves(given), jax.tree.leaves(masters), strict=True)
    assert all(bits(x) == rounded(m, x.dtype).tobytes() for x, m in pairs)


def assert_moved(new, old, fresh):
    """Checks that `new` is `old` at the level of `fresh`."""
    assert_fits(new, fresh)
    masters = jamp.master_params(old)
    assert_rounded(new.params, masters)
    if new.properties.opt_level != "O3":
        assert_same_bits(jamp.master_params(new), masters)
    assert_same_bits(moments(new.opt_state), moments(old.opt_state))
    nothing = dict.fromkeys(("params", "opt_state", "loss_scales"))
    counters_and_fields = (jax.tree.leaves(s.replace(**nothing)) for s in (new, old))
    assert_same_bits(*counters_and_fields)
    for i, rule in enumerate(old.loss_scale_rules):
        source = old if rule.moves == new.loss_scale_rules[i].moves else fresh
        assert_same_bits(new.loss_scales[i], source.loss_scales[i])


# O1 and O4 store the same as O0, and O6 as O5: each occurs once per side.
PAIRS = list(itertools.product(RUNNING, RUNNING)) + [("O1", "O2"), ("O3", "O1")]
PAIRS += [("O4", "O5"), ("O2", "O4"), ("O6", "O2"), ("O1", "O6"), ("O6", "O6")]


@pytest.mark.parametrize("source, target", PAIRS)
def test_from_each_level_to_each(source, target):
    state, fresh = at(source), make(target, seed=1)
    new = moved(state, fresh)
    assert_moved(new, state, fresh)
    assert_same_bits(moved(state, jax.eval_shape(lambda: fresh)), new)
    if source == target:
        assert_same_bits(new, state)
        checkpoint = jamp.to_checkpoint(state)
        assert checkpoint["opt_level"] == int(source[1])
        assert_same_bits(checkpoint["params"], jamp.master_params(state))
        shapes = jax.eval_shape(jamp.to_checkpoint, state)
        assert shapes == jax.eval_shape(lambda: checkpoint)
    if source == "O5" and target in EXACT:
        there_and_back = moved(new, make("O5", seed=2))
        assert_same_bits(there_and_back.params, state.params)
        assert_same_bits(there_and_back.opt_state, state.opt_state)


def test_a_static_scale_is_neither_saved_nor_loaded():
    # A static scale is compiled into the step, so another value would be wrong.
    static = lived(make("O2", loss_scale=128.0))
    for source, rule, scale in (
        (at("O2"), 128.0, 128.0),
        (static, None, 2.0**16),
        (static, 64.0, 64.0),
    ):
        new = moved(source, make("O2", seed=1, loss_scale=rule))
        assert new.loss_scale == new.loss_scales[0].scale == scale
        assert_same_bits(new.opt_state, source.opt_state)


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_restored_state_needs_no_compilation_and_can_be_donated(level):
    state = at("O0")
    kept, fresh = copy(state), make(level, seed=1)
    step = jax.jit(lambda s: s.replace(step=s.step + 1), donate_argnums=0)
    step(make(level))
    for given in (jamp.to_checkpoint(state), state):  # accepted as a state
        assert step(jamp.from_checkpoint(fresh, given)).step == state.step + 1
    assert step._cache_size() == 1
    assert_same_bits(jax.tree.map(jnp.asarray, kept), state)


# Masters of 16 bits and a bfloat16 param. On ties, rounded masters differ.
ODD = np.uint32(
    [0x3F808000, 0x3F818000, 0x3F80FFFF, 0xBF808001, 0x7F7F7FFF, 0x80000000, 0x00012345]
).view(np.float32)


@pytest.mark.parametrize("level", ["O0", "O2", "O5", "remainders"])
def test_remainders_return_bit_for_bit_through_masters_too(level):
    def remainders(values):
        tree = {"w": jnp.asarray(values)}
        return make("O5", tree=tree, store_remainder=True)

    state = remainders(ODD)
    assert state.opt_state.masters["w"].dtype == jnp.uint16
    assert bits(state.params["w"]) != ODD.astype(jnp.bfloat16).tobytes()
    assert bits(jamp.to_checkpoint(state)["params"]["w"]) == ODD.tobytes()
    there = state
    if level != "remainders":
        there = moved(state, make(level, tree={"w": jnp.zeros(ODD.size, jnp.float32)}))
        assert bits(jamp.master_params(there)["w"]) == ODD.tobytes()
        w = there.params["w"][:-1]  # the CPU flushes denormals
        assert bits(w) == rounded(ODD[:-1], w.dtype).tobytes()
    assert_same_bits(moved(there, remainders(ODD[::-1])), state)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """A module that is a pytree, as in Equinox, which Flax does not register."""

    kernel: Any
    bias: Any


class Stack:
    """A pytree without names for its children."""

    def __init__(self, *layers):
        self.layers = layers


jax.tree_util.register_pytree_node(
    Stack, lambda s: (s.layers, None), lambda _, layers: Stack(*layers)
)


def linear(seed):
    return Linear(**params(seed)["dense"])


FP8 = "_overwrite_with_gradient"
TREES = {
    "registered classes": lambda seed: Stack(linear(seed), linear(seed + 10)),
    "names with slashes": lambda seed: {"a/b": params(seed), "a": {"b": linear(seed)}},
    "values of fp8": lambda seed: {"params": params(seed), FP8: {"amax": jnp.ones(2)}},
}
OPTIMIZERS = {
    "fused_adam": jo.fused_adam(1e-2, weight_decay=0.1),
    "larc": jo.larc(jo.fused_sgd(1e-2, 0.9)),
    # Schedules, a PRNG key, an accumulator, masks, hyperparameters, empty states.
    "many parts": optax.chain(
        optax.clip_by_global_norm(10.0),
        optax.add_noise(1e-3, 0.5, key=3),
        optax.masked(optax.trace(0.9), {"dense": True, "bn1": False, "ids": False}),
        optax.inject_hyperparams(optax.scale)(step_size=optax.linear_schedule(1, 0, 9)),
        optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    ),
}


def with_groups(level, seed):
    trees = {"g": params(seed), "d": params(seed + 10)}
    txs = {"g": ADAM, "d": jo.fused_sgd(0.1, 0.9)}
    return make(level, 0, txs, trees, loss_scale="dynamic", num_losses=3)


def with_fields(level, seed):
    keys = jax.random.key(seed), jax.random.split(jax.random.key(seed, impl="rbg"))
    ema = {"mean": jnp.full(2, seed, jnp.bfloat16), "seen": jnp.asarray(seed)}
    return make(level, seed, ema=ema, rng=keys)


KINDS = {
    **{name: functools.partial(make, tree=tree) for name, tree in TREES.items()},
    **{name: functools.partial(make, tx=tx) for name, tx in OPTIMIZERS.items()},
    "groups": with_groups,
    "fields": with_fields,
}


@pytest.mark.parametrize("kind", KINDS)
def test_states_of_every_kind_move(kind):
    fresh = KINDS[kind]
    state = lived(fresh("O2", 0))
    for level in ("O2", "O5", "O0"):
        target = fresh(level, 1)
        new = moved(state, target)
        assert_moved(new, state, target)
        if level == "O2":
            assert_same_bits(new, state)


@pytest.mark.parametrize("tx, level", [(ADAM, "O0"), (ADAM, "O5"), (None, "O2")])
def test_inference_loads_only_params_and_fields(tx, level):
    state = lived(make("O2", tx=tx, ema=jnp.full(2, 3.0)))
    target = make(level, seed=1, tx=None, ema=jnp.zeros(2))
    new = moved(state, target)
    assert_fits(new, target)
    assert_rounded(new.params, jamp.master_params(state))
    assert_same_bits(new.ema, state.ema)
    assert_same_bits(moved(state, jax.eval_shape(lambda: target)), new)


def flax_state():
    tree = {k: params()[k] for k in ("dense", "bn1")}
    state = TrainState.create(apply_fn=None, params=tree, tx=ADAM)
    return state.replace(step=2, opt_state=drawn(state.opt_state))


def like_flax(level, seed=1, **kwargs):
    tree = {k: params(seed)[k] for k in ("dense", "bn1")}
    return make(level, tree=tree, **kwargs)


to_dict = serialization.to_state_dict
FORMS = (lambda state: state, to_dict, lambda state: written(to_dict(state)))


def test_a_tree_that_orbax_restores_without_a_target_loads(tmp_path):
    # Tuples become lists, and empty states None.
    ours = lived(like_flax("O0"))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "ours", jamp.to_checkpoint(ours))
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "ours")
    new = jamp.from_checkpoint(like_flax("O2"), found)
    assert_same_bits(jamp.master_params(new), ours.params)
    assert_same_bits(moments(new.opt_state), ours.opt_state)
    assert new.step == ours.step


@pytest.mark.parametrize("level", RUNNING)
def test_from_plain_flax_and_back(level):
    plain, fresh = flax_state(), like_flax(level)
    new, *same = (jamp.from_checkpoint(fresh, form(plain)) for form in FORMS)
    shapes = jax.eval_shape(lambda: fresh)
    same.append(jamp.from_checkpoint(shapes, to_dict(plain)))
    for other in same:
        assert_same_bits(other, new)
    assert_fits(new, fresh)
    assert_rounded(new.params, plain.params)
    assert_same_bits(moments(new.opt_state), plain.opt_state)
    assert (new.step, new.skipped_steps) == (2, 0)
    assert new.loss_scale == fresh.loss_scale

    # Eager float32 operations give the same bits at every level.
    grads = drawn(plain.params, seed=5)
    new = new.apply_gradients(grads=grads)
    checkpoint = written(jamp.to_checkpoint(new))
    names = {k: checkpoint[k] for k in ("step", "params", "opt_state")}
    back = serialization.from_state_dict(plain, names)
    assert_same_bits(jax.tree.map(jnp.asarray, back.params), jamp.master_params(new))
    assert back.step == 3
    if level in EXACT:
        after = plain.apply_gradients(grads=grads)
        assert_same_bits(after.params, jamp.master_params(new))


VERSION_1_TX = optax.adam(optax.constant_schedule(1e-3))
DATA = subprocesses.ROOT / "tests" / "data" / "checkpoint_v1.msgpack"


def version_1(level):
    """Returns the saved state: O2, Adam, two losses, BatchNorm, a field and a key."""
    two = jnp.zeros(2)
    dense = {"kernel": jnp.zeros((2, 2)), "bias": two}
    return make(
        level,
        tx=VERSION_1_TX,
        tree={"Dense_0": dense, "BatchNorm_0": {"scale": two}},
        num_losses=2,
        batch_stats={"BatchNorm_0": {"mean": two, "var": two}},
        rng=jax.random.key(1),
    )


@pytest.mark.parametrize("level", ["O2", "O0", "O5"])
def test_version_1_loads_for_ever(level):
    data = DATA.read_bytes()
    assert len(data) < 4096
    checkpoint = serialization.msgpack_restore(data)
    state = jamp.from_checkpoint(version_1(level), checkpoint)
    assert_fits(state, version_1(level))

    masters = jamp.master_params(state)
    mu, nu = (optax.tree.get(state.opt_state, name) for name in ("mu", "nu"))
    stats = state.batch_stats["BatchNorm_0"]
    for given, values in (
        (masters["Dense_0"]["kernel"], [[0.1, -2.5], [1e-6, 70000.0]]),
        (masters["Dense_0"]["bias"], [0.25, -0.3]),
        (masters["BatchNorm_0"]["scale"], [1.1, 0.9]),
        (mu["Dense_0"]["kernel"], [[1, 2], [3, 4]]),
        (nu["Dense_0"]["bias"], [1e-12, 1e-3]),
        (nu["BatchNorm_0"]["scale"], [0.5, 0.75]),
        (stats["mean"], [-1.5, 0.1]),
        (stats["var"], [2.0, 0.125]),
    ):
        assert bits(given) == np.float32(values).tobytes()
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    assert [int(count) for _, count in counts] == [41, 41]
    assert (state.step, state.skipped_steps) == (41, 3)
    assert bool(state.last_step_skipped) is True
    assert jax.random.key_data(state.rng).tolist() == [0, 12345]
    if level == "O2":
        # 0.1 and 1e-6 are rounded to float16, and 70000 is clamped.
        half = np.uint16([[0x2E66, 0xC100], [0x0011, 0x7BFF]])
        assert bits(state.params["Dense_0"]["kernel"]) == half.tobytes()
        first, second = state.loss_scales
        assert tuple(map(int, first)) == (2**14, 0, 1, 2)
        assert tuple(map(int, second)) == (2**17, 7, 1, 0)
