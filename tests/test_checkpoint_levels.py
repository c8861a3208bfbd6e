"""`to_checkpoint` and `from_checkpoint`: from each level to each, and plain Flax."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import serialization
from flax.core import FrozenDict
from flax.training.train_state import TrainState

import jamp
from jamp import optimizers as jo
from tests import subprocesses
from tests.bits import assert_same_bits, bits, copy

pytestmark = pytest.mark.standard_promotion  # for optax.adam on half trees

LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
EXACT = tuple(
    level for level in LEVELS if level != "O3"
)  # they have the params in fp32
HALF = {"O2": jnp.float16, "O3": jnp.float16, "O5": jnp.bfloat16}
ADAM = optax.adam(1e-2)


def params(seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    return {
        "dense": {"kernel": normal(3, 2), "bias": normal(2)},
        "bn1": {"scale": normal(2)},
        "ids": jnp.arange(3) + seed,
    }


def make(level, seed=0, tx=ADAM, tree=None, **kwargs):
    tree = params(seed) if tree is None else tree
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def gradients(tree, seed=5):
    """Float32, as after `unscale`; None for what is no float."""
    rng = np.random.default_rng(seed)

    def leaf(x):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.zeros(x.shape, jax.dtypes.float0)
        return jnp.asarray(rng.normal(size=x.shape), jnp.float32)

    return jax.tree.map(leaf, tree)


def stepped(state, seed=5):
    # Not compiled: each operation in float32 gives the same bits at every level.
    return state.apply_gradients(grads=gradients(state.params, seed))


def skipped(state):
    bad = jax.tree.map(
        lambda g: g if g.dtype == jax.dtypes.float0 else g + jnp.inf,
        gradients(state.params),
    )
    return state.apply_gradients(grads=bad)


def trained(state):
    """After a step, a skip where scales are checked, and a step."""
    state = stepped(state, 1)
    if any(rule.checks for rule in state.loss_scale_rules):
        state = skipped(state)
    return stepped(state, 2)


def lived(state, seed=7):
    """As after a long life: every array has values of its own, drawn by NumPy."""
    rng = np.random.default_rng(seed)

    def draw(x):
        if jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.asarray(rng.normal(size=x.shape), jnp.float32)
        if jnp.issubdtype(x.dtype, jnp.integer):
            return jnp.asarray(rng.integers(1, 100, x.shape), x.dtype)
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = rng.integers(0, 2**32, jax.random.key_data(x).shape, np.uint32)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        return jnp.asarray(rng.choice([True, False], x.shape))

    masters = jax.tree.map(draw, state.params)
    opt_state = jax.tree.map(draw, moments(state.opt_state))
    if isinstance(state.opt_state, jamp.MasterWeightsState):
        is_hole = lambda x: x is None or isinstance(x, optax.MaskedNode)  # noqa: E731
        opt_state = jamp.MasterWeightsState(
            jax.tree.map(
                lambda old, new: old if is_hole(old) else new,
                state.opt_state.masters,
                masters,
                is_leaf=is_hole,
            ),
            opt_state,
        )
    return state.replace(
        params=jax.tree.map(
            lambda m, p: jnp.asarray(rounded(m, p.dtype)), masters, state.params
        ),
        opt_state=opt_state,
        step=draw(state.step),
        skipped_steps=draw(state.skipped_steps),
        last_step_skipped=jnp.asarray(True),
    )


def written(checkpoint):
    """Through a file of msgpack: arrays of NumPy by name."""
    return serialization.msgpack_restore(serialization.msgpack_serialize(checkpoint))


def moved(state, target):
    return jamp.from_checkpoint(target, written(jamp.to_checkpoint(state)))


def moments(opt_state):
    """The optimizer's own state, without masters."""
    has_masters = isinstance(opt_state, jamp.MasterWeightsState)
    return opt_state.inner_state if has_masters else opt_state


def rounded(master, dtype):
    """Float32 to the nearest half, and never infinite; other leaves as they are."""
    if master.dtype != np.float32:
        return np.asarray(master)
    limit = float(jnp.finfo(dtype).max)
    return np.clip(np.asarray(master), -limit, limit).astype(dtype)


def assert_fits(state, fresh):
    """What `state` is made of is what `initialize` makes: no step compiles anew."""
    assert jax.tree.structure(state) == jax.tree.structure(fresh)
    pairs = zip(jax.tree.leaves_with_path(state), jax.tree.leaves(fresh), strict=True)
    for (path, x), y in pairs:
        where = jax.tree_util.keystr(path)
        assert isinstance(x, jax.Array), where
        assert (x.shape, x.dtype) == (y.shape, y.dtype), where
        assert not getattr(x, "weak_type", False), where
        assert x.sharding == y.sharding, where


def assert_moved(new, old, fresh):
    """`new` is `old` at the level of `fresh`."""
    assert_fits(new, fresh)
    masters = jamp.master_params(old)
    for new_param, master in zip(
        jax.tree.leaves(new.params), jax.tree.leaves(masters), strict=True
    ):
        assert bits(new_param) == rounded(master, new_param.dtype).tobytes()
    if new.properties.opt_level != "O3":
        assert_same_bits(jamp.master_params(new), masters)
    assert_same_bits(moments(new.opt_state), moments(old.opt_state))
    for name in ("step", "skipped_steps", "last_step_skipped"):
        assert_same_bits(getattr(new, name), getattr(old, name))
    scales = zip(new.loss_scales, old.loss_scales, fresh.loss_scales, strict=True)
    for rules, (scale, before, initial) in zip(
        zip(new.loss_scale_rules, old.loss_scale_rules, strict=True),
        scales,
        strict=True,
    ):
        if all(isinstance(rule, jamp.DynamicLossScale) for rule in rules):
            assert_same_bits(scale, before)
        else:
            assert_same_bits(scale.scale, initial.scale)


@pytest.fixture(scope="module")
def at():
    """By level, a state that has trained."""
    with jax.numpy_dtype_promotion("standard"):
        return {level: trained(make(level)) for level in LEVELS}


# From each level to each


def test_the_fixture_has_something_to_lose(at):
    for level in ("O1", "O2"):
        (scale,) = at[level].loss_scales
        assert (scale.scale, scale.unskipped, at[level].skipped_steps) == (
            2.0**15,
            1,
            1,
        )
    for level in LEVELS:
        masters = jamp.master_params(at[level])["dense"]["kernel"]
        half = level == "O3"
        assert np.array_equal(masters.astype(jnp.float16), masters) == half
        assert optax.tree.get(at[level].opt_state, "count") == 2
        nu = optax.tree.get(at[level].opt_state, "nu")["dense"]["kernel"]
        assert not np.array_equal(nu.astype(jnp.float16), nu)


@pytest.mark.parametrize("target", LEVELS)
@pytest.mark.parametrize("source", LEVELS)
def test_from_each_level_to_each(at, source, target):
    new = moved(at[source], make(target, seed=1))
    assert_moved(new, at[source], make(target, seed=1))
    if source == target:
        assert_same_bits(new, at[source])


@pytest.mark.parametrize("target", EXACT)
def test_training_goes_on_with_the_same_masters_and_moments(at, target):
    new, old = moved(at["O2"], make(target, seed=1)), at["O2"]
    for seed in (3, 4):
        new, old = stepped(new, seed), stepped(old, seed)
        assert_same_bits(jamp.master_params(new), jamp.master_params(old))
        assert_same_bits(moments(new.opt_state), moments(old.opt_state))
    assert new.step == 4


def test_there_and_back_through_an_exact_level_loses_nothing(at):
    for through in EXACT:
        there = moved(at["O5"], make(through, seed=1))
        again = moved(there, make("O5", seed=2))
        assert_same_bits(again.params, at["O5"].params)
        assert_same_bits(again.opt_state, at["O5"].opt_state)


def test_a_pending_skip_is_kept():
    state = skipped(make("O2", loss_scale=jamp.DynamicLossScale(hysteresis=2)))
    rule = jamp.DynamicLossScale(hysteresis=2)
    new = moved(state, make("O5", seed=1, loss_scale=rule))
    assert new.last_step_skipped
    assert_same_bits(new.loss_scales, state.loss_scales)
    assert (new.loss_scale, new.loss_scales[0].hysteresis) == (2.0**16, 1)
    assert (skipped(new).loss_scale, skipped(new).skipped_steps) == (2.0**15, 2)


def test_a_static_scale_neither_gives_nor_takes(at):
    # The factor of a static scale is compiled in: another one would be a lie.
    new = moved(at["O2"], make("O2", seed=1, loss_scale=128.0))
    assert new.loss_scale == 128.0
    assert_same_bits(new.opt_state, at["O2"].opt_state)
    static = trained(make("O2", loss_scale=128.0))
    assert moved(static, make("O2", seed=1)).loss_scale == 2.0**16
    assert moved(static, make("O2", seed=1, loss_scale=64.0)).loss_scale == 64.0


def test_masters_beyond_half_come_through_and_are_clamped():
    values = np.float32([1e6, -1e6, 1e-8, -0.0, 65520.0, 3e38])
    state = make("O0", tree={"w": jnp.asarray(values)})
    new = moved(state, make("O2", tree={"w": jnp.zeros(6, jnp.float32)}))
    assert bits(new.opt_state.masters["w"]) == values.tobytes()
    expected = np.float16([65504, -65504, 0, -0.0, 65504, 65504])
    assert bits(new.params["w"]) == expected.tobytes()


# What is in it


def test_a_checkpoint_says_what_it_holds(at):
    checkpoint = jamp.to_checkpoint(at["O2"])
    assert set(checkpoint) == {
        "version",
        "opt_level",
        "step",
        "params",
        "opt_state",
        "loss_scaler0",
        "skipped_steps",
        "last_step_skipped",
        "fields",
    }
    assert checkpoint["version"].dtype == checkpoint["opt_level"].dtype == jnp.int32
    assert (checkpoint["version"], checkpoint["opt_level"]) == (1, 2)
    assert (checkpoint["step"], checkpoint["skipped_steps"]) == (2, 1)
    scaler = checkpoint["loss_scaler0"]
    assert set(scaler) == {
        "loss_scale",
        "unskipped",
        "hysteresis",
        "consecutive_skips",
        "dynamic",
    }
    assert (scaler["loss_scale"], scaler["unskipped"]) == (2.0**15, 1)
    assert scaler["dynamic"]
    assert set(checkpoint["opt_state"]) == {"0", "1"}
    assert set(checkpoint["opt_state"]["0"]) == {"count", "mu", "nu"}
    assert checkpoint["opt_state"]["1"] == {}


@pytest.mark.parametrize("level", LEVELS)
def test_params_are_the_masters_in_float32_under_their_names(at, level):
    checkpoint = jamp.to_checkpoint(at[level])
    assert checkpoint["opt_level"] == int(level[1])
    assert_same_bits(checkpoint["params"], jamp.master_params(at[level]))


def test_nothing_is_copied(at):
    state = at["O2"]
    checkpoint = jamp.to_checkpoint(state)
    pairs = [
        (checkpoint["params"]["dense"]["kernel"], state.opt_state.masters["dense"]),
        (
            checkpoint["opt_state"]["0"]["nu"]["dense"]["kernel"],
            moments_of(state, "nu"),
        ),
    ]
    for given, tree in pairs:
        assert given.unsafe_buffer_pointer() == tree["kernel"].unsafe_buffer_pointer()


def moments_of(state, name):
    return optax.tree.get(state.opt_state, name)["dense"]


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_shapes_of_a_checkpoint_are_known_without_the_arrays(at, level):
    shapes = jax.eval_shape(jamp.to_checkpoint, at[level])
    checkpoint = jamp.to_checkpoint(at[level])
    assert jax.tree.structure(shapes) == jax.tree.structure(checkpoint)
    for x, y in zip(jax.tree.leaves(shapes), jax.tree.leaves(checkpoint), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)


@pytest.mark.parametrize("target", ["O0", "O2", "O5"])
def test_a_target_may_be_shapes_alone(at, target):
    shapes = jax.eval_shape(functools.partial(make, target, seed=1))
    checkpoint = written(jamp.to_checkpoint(at["O2"]))
    new = jamp.from_checkpoint(shapes, checkpoint)
    assert_moved(new, at["O2"], make(target))


def test_a_step_is_not_compiled_anew_for_a_restored_state(at):
    step = jax.jit(lambda s: s.replace(step=s.step + 1))
    for level in ("O2", "O5"):
        step(make(level, seed=1))
        before = step._cache_size()
        step(moved(at["O2"], make(level, seed=1)))
        assert step._cache_size() == before


def test_a_restored_state_can_be_donated_and_leaves_the_others_alone(at):
    kept = copy(at["O0"])
    checkpoint = jamp.to_checkpoint(at["O0"])
    for level in ("O0", "O2"):
        new = jamp.from_checkpoint(make(level, seed=1), checkpoint)
        step = jax.jit(lambda s: s.replace(step=s.step + 1), donate_argnums=0)
        assert step(new).step == 3
    assert_same_bits(jax.tree.map(jnp.asarray, kept), at["O0"])


# Masters as 16 bits beside bfloat16

ODD = np.uint32(
    [0x3F808000, 0x3F818000, 0x3F80FFFF, 0xBF808001, 0x7F7F7FFF, 0x80000000, 0x00012345]
).view(np.float32)


def remainders(seed):
    tree = {"w": jnp.asarray(ODD if seed == 0 else ODD[::-1])}
    return make("O5", tree=tree, store_remainder=True)


def test_remainders_come_back_bit_for_bit():
    # Ties among them: params rounded from masters would be others.
    state = remainders(0)
    assert state.opt_state.masters["w"].dtype == jnp.uint16
    assert bits(state.params["w"]) != ODD.astype(jnp.bfloat16).tobytes()
    checkpoint = jamp.to_checkpoint(state)
    assert bits(checkpoint["params"]["w"]) == ODD.tobytes()
    assert_same_bits(moved(state, remainders(1)), state)


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_remainders_to_masters_and_back(level):
    plain = make(level, tree={"w": jnp.zeros(ODD.size, jnp.float32)})
    new = moved(remainders(0), plain)
    assert bits(jamp.master_params(new)["w"]) == ODD.tobytes()
    half = rounded(ODD, HALF.get(level, jnp.float32))
    assert bits(new.params["w"][:-1]) == half[:-1].tobytes()  # the CPU has no denormals
    assert_same_bits(moved(new, remainders(1)), remainders(0))


def test_training_goes_on_from_remainders(at):
    new = moved(at["O2"], make("O5", seed=1, store_remainder=True))
    assert_same_bits(jamp.master_params(new), jamp.master_params(at["O2"]))
    after, expected = stepped(new, 3), stepped(at["O2"], 3)
    assert_same_bits(jamp.master_params(after), jamp.master_params(expected))


# Optimizers

FUSED = {
    "adam": functools.partial(jo.fused_adam, 1e-2, weight_decay=0.1),
    "sgd": functools.partial(jo.fused_sgd, 1e-2, 0.9),
    "lamb": functools.partial(jo.fused_lamb, 1e-2),
    "novograd": functools.partial(jo.fused_novograd, 1e-2),
    "adagrad": functools.partial(jo.fused_adagrad, 1e-2),
    "larc": lambda: jo.larc(jo.fused_sgd(1e-2, 0.9)),
}


@pytest.mark.parametrize("target", ["O0", "O2", "O5"])
@pytest.mark.parametrize("name", FUSED)
def test_the_state_of_fused_optimizers_moves(name, target):
    tx = FUSED[name]()
    state = lived(make("O2", tx=tx))
    new = moved(state, make(target, seed=1, tx=tx))
    assert_moved(new, state, make(target, seed=1, tx=tx))
    if target == "O2":
        assert_same_bits(new, state)


def many_parts():
    """Schedules, a PRNG key, an accumulator, masks, hyperparameters, empty states."""
    return optax.chain(
        optax.clip_by_global_norm(10.0),
        optax.add_noise(1e-3, 0.5, key=3),
        optax.masked(optax.trace(0.9), {"dense": True, "bn1": False, "ids": False}),
        optax.inject_hyperparams(optax.scale)(step_size=optax.linear_schedule(1, 0, 9)),
        optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
    )


def test_every_sort_of_optimizer_state_moves():
    tx = many_parts()
    state = lived(make("O2", tx=tx))
    assert_moved(moved(state, make("O5", 1, tx)), state, make("O5", 1, tx))
    keys = [optax.tree.get(s.opt_state, "rng_key") for s in (state, make("O2", tx=tx))]
    assert bits(keys[0]) != bits(keys[1])


def test_a_state_without_an_optimizer_moves():
    state = make("O2", tx=None)
    assert_same_bits(moved(state, make("O2", seed=1, tx=None)), state)
    widened = moved(state, make("O0", seed=1, tx=None))
    half = state.params["dense"]["kernel"]
    assert bits(widened.params["dense"]["kernel"]) == np.float32(half).tobytes()


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_for_inference_params_and_fields_are_read_alone(level):
    state = lived(make("O2", ema=jnp.full(2, 3.0)))
    target = make(level, seed=1, tx=None, ema=jnp.zeros(2))
    new = moved(state, target)
    assert_fits(new, target)
    masters = jax.tree.leaves(jamp.master_params(state))
    for x, master in zip(jax.tree.leaves(new.params), masters, strict=True):
        assert bits(x) == rounded(master, x.dtype).tobytes()
    assert_same_bits(new.ema, state.ema)
    assert_same_bits(moved(state, jax.eval_shape(lambda: target)), new)


def test_a_state_itself_is_taken_as_its_checkpoint(at):
    new = jamp.from_checkpoint(make("O5", seed=1), at["O2"])
    assert_moved(new, at["O2"], make("O5"))


def test_params_that_were_added_move():
    state = lived(make("O2", tree=params()["dense"]))
    state = state.add_params({"head": params(2)["dense"]})
    target = make("O5", tree=params(1)["dense"] | {"head": params(3)["dense"]})
    assert_moved(moved(state, target), state, target)


def test_a_disabled_state_moves(at):
    plain = trained(make("O2", enabled=False))
    assert_moved(moved(plain, make("O2", seed=1)), plain, make("O2"))
    new = moved(at["O2"], make("O2", seed=1, enabled=False))
    assert_same_bits(jamp.master_params(new), jamp.master_params(at["O2"]))


# Trees of all kinds


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Linear:
    """A module that is a pytree, as Equinox has them; Flax does not know it."""

    weight: Any
    bias: Any


class Stack:
    """One without names for its children."""

    def __init__(self, *layers):
        self.layers = layers


jax.tree_util.register_pytree_node(
    Stack, lambda s: (s.layers, None), lambda _, layers: Stack(*layers)
)


class Pair(NamedTuple):
    first: Any
    second: Any


def linear(seed):
    tree = params(seed)["dense"]
    return Linear(tree["kernel"], tree["bias"])


TREES = {
    "FrozenDict": lambda seed: FrozenDict(params(seed)),
    "registered classes": lambda seed: Stack(linear(seed), linear(seed + 10)),
    "classes in a dict": lambda seed: {"a": linear(seed), "b": (linear(seed + 10),)},
    "lists and tuples": lambda seed: [params(seed), (params(seed + 10),)],
    "NamedTuple": lambda seed: Pair(params(seed), None),
    "one array": lambda seed: params(seed)["dense"]["kernel"],
    "no array": lambda seed: {},
    "names of digits": lambda seed: {"10": params(seed), "9": params(seed + 10)},
    "names with slashes": lambda seed: {"a/b": params(seed), "a": {"b": linear(seed)}},
}


@pytest.mark.parametrize("kind", TREES)
def test_params_may_be_any_tree(kind):
    def fresh(level, seed):
        return make(level, tree=TREES[kind](seed))

    state = lived(fresh("O2", 0))
    for target in ("O2", "O5", "O0"):
        new = moved(state, fresh(target, 1))
        assert_moved(new, state, fresh(target, 1))
    assert_same_bits(moved(state, fresh("O2", 1)), state)


def test_fp8_values_and_integers_stay_as_they_are():
    def fresh(level, seed):
        tree = {
            "params": params(seed),
            "_overwrite_with_gradient": {"amax": jnp.asarray([3.0 + seed, 5.0])},
        }
        return make(level, tree=tree)

    state = fresh("O2", 0)
    for target in ("O2", "O5", "O0"):
        new = moved(state, fresh(target, 1))
        assert_moved(new, state, fresh(target, 1))
        kept = new.params["_overwrite_with_gradient"]["amax"]
        assert bits(kept) == np.float32([3.0, 5.0]).tobytes()
        assert bits(new.params["params"]["ids"]) == np.arange(3, dtype="i4").tobytes()


@pytest.mark.parametrize(
    "pack",
    [list, tuple, lambda x: dict(zip("gd", x, strict=True))],
    ids=["list", "tuple", "dict"],
)
def test_groups_and_losses_move(pack):
    def fresh(level, seed):
        trees = pack([params(seed), params(seed + 10)])
        txs = pack([ADAM, jo.fused_sgd(0.1, 0.9)])
        rule = jamp.DynamicLossScale(init_scale=2.0**10)
        return make(level, tx=txs, tree=trees, num_losses=3, loss_scale=rule)

    state = fresh("O2", 0)
    keys = ["g", "d"] if isinstance(state.params, dict) else [0, 1]

    def loss_fn(tree, x):
        return sum((p.astype(jnp.float32) * x).sum() for p in jax.tree.leaves(tree))

    for loss_id, (key, x) in enumerate(
        zip([*keys, keys[0]], [1, jnp.inf, 1], strict=True)
    ):
        grads = jamp.scaled_grad(
            lambda tree, x, k=key: loss_fn(tree[k]["dense"], x),
            loss_id=loss_id,
            wrt=key,
        )(state, jnp.float32(x))
        state = state.apply_gradients(grads=grads)
    assert [float(s) for s in state.loss_scale] == [1024, 512, 1024]

    checkpoint = jamp.to_checkpoint(state)
    assert {f"loss_scaler{k}" for k in range(3)} < set(checkpoint)
    for target in ("O2", "O5", "O0"):
        new = moved(state, fresh(target, 1))
        assert_fits(new, fresh(target, 1))
        assert_same_bits(jamp.master_params(new), jamp.master_params(state))
        for key in keys:
            pair = (moments(s.opt_state[key]) for s in (new, state))
            assert_same_bits(*pair)
            assert new.skipped_steps[key] == state.skipped_steps[key]
        assert_same_bits(new.loss_scales, state.loss_scales)
    assert_same_bits(moved(state, fresh("O2", 1)), state)


class Mine(jamp.AmpState):
    ema: Any
    rng: Any


def with_fields(level, seed, **kwargs):
    return make(
        level,
        seed,
        ema={"mean": jnp.full(2, seed, jnp.bfloat16), "seen": jnp.asarray(seed)},
        rng=(
            jax.random.key(seed),
            jax.random.split(jax.random.key(seed, impl="rbg"), 2),
        ),
        **kwargs,
    )


@pytest.mark.parametrize("state_class", [jamp.AmpState, Mine])
@pytest.mark.parametrize("target", ["O2", "O5"])
def test_extra_fields_move_and_typed_keys_too(target, state_class):
    state = with_fields("O2", 3, state_class=state_class)
    fresh = with_fields(target, 1, state_class=state_class)
    new = moved(state, fresh)
    assert_moved(new, state, fresh)
    for name in ("ema", "rng"):
        assert_same_bits(getattr(new, name), getattr(state, name))
    draw, expected = (jax.random.uniform(s.rng[0], (3,)) for s in (new, state))
    assert bits(draw) == bits(expected)


# Orbax, and other devices


def test_through_orbax_at_another_level(tmp_path):
    state = with_fields("O2", 3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", jamp.to_checkpoint(state))
        checkpointer.wait_until_finished()
        target = with_fields("O5", 1)
        shapes = jax.eval_shape(jamp.to_checkpoint, target)
        checkpoint = checkpointer.restore(tmp_path / "state", shapes)
    assert_moved(jamp.from_checkpoint(target, checkpoint), state, target)


@pytest.mark.parametrize("kind", ["to_checkpoint", "plain Flax"])
def test_what_orbax_restores_without_a_target_is_read(tmp_path, kind):
    # Tuples come back as lists, empty states as None.
    state = lived(like_flax("O0")) if kind == "to_checkpoint" else flax_state()
    tree = jamp.to_checkpoint(state) if kind == "to_checkpoint" else state
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "tree", tree)
        checkpointer.wait_until_finished()
        found = checkpointer.restore(tmp_path / "tree")
    assert isinstance(found, dict)
    new = jamp.from_checkpoint(like_flax("O2"), found)
    assert_same_bits(jamp.master_params(new), state.params)
    assert_same_bits(moments(new.opt_state), state.opt_state)
    assert new.step == state.step


def test_a_step_may_donate_what_orbax_still_writes(tmp_path):
    state = make("O2", tree={"w": jnp.full(2**20, 0.1)})
    grads = {"w": jnp.ones(2**20)}
    step = jax.jit(lambda s, g: s.apply_gradients(grads=g), donate_argnums=0)
    with ocp.CheckpointManager(tmp_path) as checkpoints:
        args = ocp.args.StandardSave(jamp.to_checkpoint(state))
        checkpoints.save(0, args=args)  # in the background
        shapes = jax.eval_shape(jamp.to_checkpoint, state)
        state = step(step(state, grads), grads)
        checkpoints.wait_until_finished()
        args = ocp.args.StandardRestore(shapes)
        checkpoint = checkpoints.restore(0, args=args)
    assert state.step == 2
    assert checkpoint["step"] == 0
    assert (checkpoint["params"]["w"] == np.float32(0.1)).all()
    assert (checkpoint["opt_state"]["0"]["mu"]["w"] == 0).all()


@pytest.fixture(scope="module")
def elsewhere():
    return subprocesses.on_devices(2, "tests.resharding")


@pytest.mark.parametrize("way", ["to a mesh", "across the mesh", "to one device"])
@pytest.mark.parametrize(
    "form", ["raw orbax", "orbax", "numpy", "orbax into shapes", "numpy into shapes"]
)
def test_another_sharding(elsewhere, form, way):
    expected = {"same": True, "misplaced": []}
    if way == "across the mesh":
        expected["step"] = 8
    assert elsewhere[f"{form}, {way}"] == expected


# Plain Flax


class WithStats(TrainState):
    batch_stats: Any


def flax_state(cls=TrainState, **fields):
    tree = {k: params()[k] for k in ("dense", "bn1")}
    state = cls.create(apply_fn=None, params=tree, tx=ADAM, **fields)
    for seed in (1, 2):
        state = state.apply_gradients(grads=gradients(tree, seed))
    return state


def like_flax(level, seed=1, **kwargs):
    tree = {k: params(seed)[k] for k in ("dense", "bn1")}
    return make(level, tree=tree, **kwargs)


def as_bytes(state):
    return serialization.msgpack_restore(serialization.to_bytes(state))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", [lambda s: s, serialization.to_state_dict, as_bytes])
def test_from_plain_flax(form, level):
    plain = flax_state()
    new = jamp.from_checkpoint(like_flax(level), form(plain))
    assert_fits(new, like_flax(level))
    for x, p in zip(*map(jax.tree.leaves, (new.params, plain.params)), strict=True):
        assert bits(x) == rounded(p, x.dtype).tobytes()
    if level in EXACT:
        assert_same_bits(jamp.master_params(new), plain.params)
        after = plain.apply_gradients(grads=gradients(plain.params))
        assert_same_bits(jamp.master_params(stepped(new)), after.params)
    assert_same_bits(moments(new.opt_state), plain.opt_state)
    assert (new.step, new.skipped_steps) == (2, 0)
    assert new.loss_scale == like_flax(level).loss_scale


def test_from_plain_flax_into_shapes_alone():
    plain = flax_state()
    shapes = jax.eval_shape(functools.partial(like_flax, "O2"))
    new = jamp.from_checkpoint(shapes, serialization.to_state_dict(plain))
    assert_same_bits(new, jamp.from_checkpoint(like_flax("O2"), plain))


def test_for_inference_plain_flax_gives_its_params():
    plain, target = flax_state(), like_flax("O0", tx=None)
    for form in (plain, serialization.to_state_dict(plain)):
        new = jamp.from_checkpoint(target, form)
        assert_fits(new, target)
        assert_same_bits(new.params, plain.params)


def test_params_alone_are_enough():
    plain, target = flax_state(), like_flax("O2")
    new = jamp.from_checkpoint(target, {"params": plain.params})
    assert_same_bits(jamp.master_params(new), plain.params)
    assert_same_bits(moments(new.opt_state), moments(target.opt_state))
    assert new.step == 0


def test_fields_of_plain_flax_come_along():
    plain = flax_state(WithStats, batch_stats={"mean": jnp.full(2, 3.0)})
    for form in (plain, serialization.to_state_dict(plain)):
        target = like_flax("O2", batch_stats={"mean": jnp.zeros(2)})
        new = jamp.from_checkpoint(target, form)
        assert_same_bits(new.batch_stats, plain.batch_stats)


@pytest.mark.parametrize("level", LEVELS)
def test_to_plain_flax(level):
    state = trained(like_flax(level))
    checkpoint = written(jamp.to_checkpoint(state))
    names = {k: checkpoint[k] for k in ("step", "params", "opt_state")}
    plain = serialization.from_state_dict(flax_state(), names)
    assert type(plain) is TrainState
    assert_same_bits(jax.tree.map(jnp.asarray, plain.params), jamp.master_params(state))
    assert plain.step == 2
    if level in EXACT:
        after = plain.apply_gradients(grads=gradients(plain.params))
        assert_same_bits(after.params, jamp.master_params(stepped(state)))


# Checkpoints of released versions

VERSION_1_TX = optax.adam(optax.constant_schedule(1e-3))
DATA = subprocesses.ROOT / "tests" / "data" / "checkpoint_v1.msgpack"


def version_1(level, seed=1, **kwargs):
    """What had been saved: O2, Adam, two losses, BatchNorm, a field and a key."""
    tree = {
        "Dense_0": {"kernel": jnp.zeros((2, 2)), "bias": jnp.zeros(2)},
        "BatchNorm_0": {"scale": jnp.zeros(2)},
    }
    return make(
        level,
        tx=VERSION_1_TX,
        tree=tree,
        num_losses=2,
        batch_stats={"BatchNorm_0": {"mean": jnp.zeros(2), "var": jnp.zeros(2)}},
        rng=jax.random.key(seed),
        **kwargs,
    )


@pytest.mark.parametrize("level", ["O2", "O0", "O5"])
def test_version_1_loads_for_ever(level):
    data = DATA.read_bytes()
    assert len(data) < 4096
    checkpoint = serialization.msgpack_restore(data)
    state = jamp.from_checkpoint(version_1(level), checkpoint)
    assert_fits(state, version_1(level))

    masters = jamp.master_params(state)
    kernel = np.float32([[0.1, -2.5], [1e-6, 70000.0]])
    assert bits(masters["Dense_0"]["kernel"]) == kernel.tobytes()
    assert bits(masters["Dense_0"]["bias"]) == np.float32([0.25, -0.3]).tobytes()
    assert bits(masters["BatchNorm_0"]["scale"]) == np.float32([1.1, 0.9]).tobytes()
    if level == "O2":
        # 0.1 and 1e-6 to the nearest float16; 70000 clamped.
        half = np.uint16([[0x2E66, 0xC100], [0x0011, 0x7BFF]])
        assert bits(state.params["Dense_0"]["kernel"]) == half.tobytes()
    mu, nu = (optax.tree.get(state.opt_state, name) for name in ("mu", "nu"))
    assert bits(mu["Dense_0"]["kernel"]) == np.float32([[1, 2], [3, 4]]).tobytes()
    assert bits(nu["Dense_0"]["bias"]) == np.float32([1e-12, 1e-3]).tobytes()
    assert bits(nu["BatchNorm_0"]["scale"]) == np.float32([0.5, 0.75]).tobytes()
    counts = optax.tree.get_all_with_path(state.opt_state, "count")
    assert [int(count) for _, count in counts] == [41, 41]

    assert (state.step, state.skipped_steps) == (41, 3)
    assert bool(state.last_step_skipped) is True
    stats = state.batch_stats["BatchNorm_0"]
    assert bits(stats["mean"]) == np.float32([-1.5, 0.1]).tobytes()
    assert bits(stats["var"]) == np.float32([2.0, 0.125]).tobytes()
    assert jax.random.key_data(state.rng).tolist() == [0, 12345]
    if level == "O2":
        first, second = state.loss_scales
        assert tuple(map(int, first)) == (2**14, 0, 1, 2)
        assert tuple(map(int, second)) == (2**17, 7, 1, 0)
