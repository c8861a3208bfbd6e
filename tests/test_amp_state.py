"""AmpState: what a step computes, what a skip leaves alone, and what may be donated."""

import pickle
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax.core import FrozenDict
from jax import lax

import jamp
from tests.bits import assert_same_bits, bits, copy
from tests.oracles import adam as oracle

RUNNING = ("O0", "O2", "O3", "O5")
HALF = {"O2": jnp.float16, "O3": jnp.float16, "O5": jnp.bfloat16}
REFUSED = (TypeError, ValueError)
SCALING = {"loss_scales", "skipped_steps", "last_step_skipped"}


def params():
    return {
        "w": jnp.asarray([[1.0, -2.0, 0.5], [0.25, 3.0, -1.5]], jnp.float32),
        "b": jnp.asarray([0.1, 0.2], jnp.float32),
        "norm": {"scale": jnp.asarray(3.0, jnp.float32)},
    }


def make(level="O2", tx=None, tree=None, **kwargs):
    tree = params() if tree is None else tree
    if level in HALF and "norm" in tree:
        kwargs.setdefault("keep_fp32", "norm")
    tx = optax.sgd(0.5, momentum=0.5) if tx is None else tx
    return jamp.initialize(tree, tx, level, verbosity=0, **kwargs)


def dot(p, x):
    """A loss whose gradient is `x`, in the dtypes of the params."""
    products = jax.tree.map(lambda p, x: (p.astype(jnp.float32) * x).sum(), p, x)
    return sum(jax.tree.leaves(products))


def like(tree, value):
    return jax.tree.map(lambda x: jnp.full(x.shape, value, jnp.float32), tree)


def random_like(tree, seed, scale=2.0**-9):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape) * scale, jnp.float32), tree
    )


@jax.jit
def step(state, x, **fields):
    return state.apply_gradients(grads=jamp.scaled_grad(dot)(state, x), **fields)


def fields_of(state):
    names = (f for f in state.__dataclass_fields__)
    return {name: getattr(state, name) for name in names}


def assert_skipped(after, before):
    """Every field has its old bits, but those that count skips."""
    after, before = fields_of(after), fields_of(before)
    assert after.keys() == before.keys()
    assert after.keys() > SCALING
    for name in after.keys() - SCALING:
        a, b = jax.tree.leaves(after[name]), jax.tree.leaves(before[name])
        if all(isinstance(x, jax.Array | np.ndarray) for x in a):
            assert_same_bits(after[name], before[name])
        else:
            assert a == b, name


# What a step computes


@pytest.mark.standard_promotion  # for optax.adam
@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_ten_steps_of_adam_match_float64(level):
    state = make(level, optax.adam(1e-2))
    xs = [random_like(params(), seed) for seed in range(10)]
    half = HALF.get(level, np.float32)
    scale = float(state.loss_scale)

    def seen(x, p):
        """The gradient as it leaves the backward pass: rounded where p is half."""
        return (np.float32(x) * scale).astype(p.dtype).astype(np.float64) / scale

    grads = [
        [
            seen(x, p)
            for x, p in zip(*map(jax.tree.leaves, (x, state.params)), strict=True)
        ]
        for x in xs
    ]
    expected = oracle.adam(
        jax.tree.leaves(params()), grads, learning_rate=np.float32(1e-2)
    )
    for x, leaves in zip(xs, expected, strict=True):
        state = step(state, x)
        masters = jamp.master_params(state)
        for got, wanted in zip(jax.tree.leaves(masters), leaves, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-6, atol=2e-6)
        rounded = np.asarray(masters["w"]).astype(half)
        assert bits(state.params["w"]) == rounded.tobytes()
    assert state.step == 10
    assert state.skipped_steps == 0


def test_o3_computes_in_fp32_and_rounds_the_params_after_each_step():
    state = make("O3")
    xs = [random_like(params(), seed, scale=0.25) for seed in range(10)]
    grads = [[np.float16(x["w"]), np.float16(x["b"])] for x in xs]
    start = [np.float16(params()[k]) for k in "wb"]
    expected = oracle.momentum(
        start, grads, learning_rate=0.5, decay=0.5, storage=np.float16
    )
    for x, (w, b) in zip(xs, expected, strict=True):
        state = step(state, x)
        # The oracle's sums are float64, so a tie may fall to the other side.
        np.testing.assert_allclose(np.float32(state.params["w"]), w, rtol=2.0**-10)
        np.testing.assert_allclose(np.float32(state.params["b"]), b, rtol=2.0**-10)
    assert state.params["w"].dtype == jnp.float16


@pytest.mark.standard_promotion
def test_o3_moments_are_fp32_and_hold_what_half_cannot():
    state = step(make("O3", optax.adam(1e-3)), like(params(), 2.0**-14))
    nu = optax.tree.get(state.opt_state, "nu")["w"]
    assert nu.dtype == jnp.float32
    np.testing.assert_allclose(nu, 1e-3 * 2.0**-28, rtol=1e-4)


@pytest.mark.parametrize("level", RUNNING)
def test_plain_gradients_are_taken_as_unscaled(level):
    state = make(level, optax.sgd(0.5))
    plain = state.apply_gradients(grads=like(params(), 0.25))
    scaled = step(state, like(params(), 0.25))
    assert_same_bits(plain.params, scaled.params)
    assert plain.step == 1
    expected = np.asarray(params()["w"]) - 0.125
    rounded = expected.astype(HALF.get(level, np.float32))
    assert bits(plain.params["w"]) == rounded.tobytes()


def test_params_are_exact_where_apply_updates_would_round():
    # |p| / |new| beyond 2^13: f32(new) - f32(p) cannot bring p to new by an addition.
    state = make("O2", optax.sgd(1.0), {"w": jnp.asarray([60000.0], jnp.float32)})
    new = np.float32(2.0**-12 + 2.0**-20)
    grads = {"w": jnp.asarray([60000.0], jnp.float32)}
    state = state.apply_gradients(grads=grads)
    state = state.apply_gradients(grads={"w": jnp.asarray([-new])})
    assert jamp.master_params(state)["w"][0] == new
    assert bits(state.params["w"]) == np.float16([new]).tobytes()


def test_params_beyond_half_are_clamped_and_come_back():
    state = make("O2", optax.sgd(1.0), {"w": jnp.asarray([1.0], jnp.float32)})
    state = state.apply_gradients(grads={"w": jnp.asarray([-1e6], jnp.float32)})
    assert np.float32(state.params["w"]) == 65504
    assert jamp.master_params(state)["w"] == 1000001.0
    state = state.apply_gradients(grads={"w": jnp.asarray([1e6], jnp.float32)})
    assert np.float32(state.params["w"]) == 1


def test_the_fp32_step_is_not_lost_between_half_params():
    state = make("O2", optax.sgd(2.0**-13), {"w": jnp.ones(1, jnp.float32)})
    for _ in range(8):
        state = state.apply_gradients(grads={"w": jnp.ones(1, jnp.float32)})
    assert jamp.master_params(state)["w"] == 1 - 2.0**-10
    assert np.float32(state.params["w"]) == 1 - 2.0**-10


@pytest.mark.standard_promotion  # optax's plateau
def test_update_args_reach_the_optimizer():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=1)
    grads = {"w": jnp.ones(2, jnp.float32)}
    state = make("O2", optax.chain(optax.sgd(1.0), plateau), grads)
    for _ in range(2):
        state = state.apply_gradients(
            grads=grads, update_args={"value": jnp.float32(1)}
        )
    assert optax.tree.get(state.opt_state, "scale") == 0.5


def test_grads_are_keyword_only_as_in_flax():
    with pytest.raises(TypeError):
        make().apply_gradients(params())


# Skipping


class Noisy(nn.Module):
    """A Dense layer and a BatchNorm."""

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(4)(x)
        return nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)


def everything():
    """An optimizer that remembers counters, a PRNG key, moments, an accumulator."""
    return optax.chain(
        optax.clip_by_global_norm(10.0),
        optax.add_noise(1e-3, 0.5, key=3),
        optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
        optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 10)),
        optax.ema(0.9),
    )


BAD = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}
PLACES = {"first": 0, "middle": 5, "last": 11}


@pytest.fixture(scope="module")
def trained():
    """A Linen state at O2 after three steps, and the step."""
    model = Noisy()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3)), jnp.float32)
    with jax.numpy_dtype_promotion("standard"):
        variables = model.init(jax.random.key(0), x)
        state = jamp.initialize(
            variables["params"],
            everything(),
            "O2",
            apply_fn=model.apply,
            batch_stats=variables["batch_stats"],
            ema=variables["params"],
            verbosity=0,
            loss_scale=jamp.DynamicLossScale(init_scale=2.0**10),
        )

        @jax.jit
        def step(state, x, spoil):
            """`spoil` has the params' shapes and is added to the gradients, scaled."""

            def loss_fn(params):
                variables = {"params": params, "batch_stats": state.batch_stats}
                out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
                loss = jnp.square(out - 1.0).mean() + dot(params, spoil)
                return loss, new["batch_stats"]

            grads, stats = jamp.scaled_grad(loss_fn, has_aux=True)(state)
            return state.apply_gradients(
                grads=grads, batch_stats=stats, ema=stats_of(state)
            )

        def stats_of(state):
            return jax.tree.map(
                lambda e, m: 0.5 * e + 0.5 * m, state.ema, jamp.master_params(state)
            )

        clean = like(state.params, 0.0)
        for _ in range(3):
            state = step(state, x, clean)
        yield state, step, x, clean


def test_the_fixture_moves_everything(trained):
    # Or a skip that leaves all alone would show nothing.
    state, step, x, clean = trained
    assert (state.step, state.skipped_steps) == (3, 0)
    with jax.numpy_dtype_promotion("standard"):
        after = step(state, x, clean)
    for name in ("params", "opt_state", "batch_stats", "ema"):
        pairs = zip(
            jax.tree.leaves_with_path(fields_of(state)[name]),
            jax.tree.leaves(fields_of(after)[name]),
            strict=True,
        )
        same = [jax.tree_util.keystr(k) for (k, a), b in pairs if bits(a) == bits(b)]
        # MultiSteps empties its accumulator and holds its inner optimizer still on
        # every other step; two of its flags are constant.
        held = (
            "inner_opt_state",
            "skip_state",
            "acc_grads",
            "Dense_0",
            "scale",
            "bias",
        )
        assert all(any(h in k for h in held) for k in same), (name, same)
    assert optax.tree.get(after.opt_state, "rng_key") is not None


@pytest.mark.parametrize("value", BAD)
@pytest.mark.parametrize("place", PLACES)
def test_one_bad_element_changes_scale_and_counters_and_nothing_else(
    trained, place, value
):
    state, step, x, clean = trained
    spoil = dict(clean, Dense_0=dict(clean["Dense_0"]))
    kernel = np.zeros(12, np.float32)
    kernel[PLACES[place]] = BAD[value]
    spoil["Dense_0"]["kernel"] = jnp.asarray(kernel.reshape(3, 4))
    assert_spoilt(state, step, x, spoil)


@pytest.mark.parametrize(
    "module, leaf", [("Dense_0", "bias"), ("BatchNorm_0", "scale")]
)
def test_a_bad_element_in_another_leaf_does_the_same(trained, module, leaf):
    state, step, x, clean = trained
    spoil = dict(clean, **{module: dict(clean[module])})
    spoil[module][leaf] = clean[module][leaf].at[1].set(jnp.inf)
    assert_spoilt(state, step, x, spoil)


def assert_spoilt(state, step, x, spoil):
    with jax.numpy_dtype_promotion("standard"):
        after = step(state, x, spoil)
    assert_skipped(after, state)
    (old,), (new,) = state.loss_scales, after.loss_scales
    assert (old.scale, new.scale) == (2.0**10, 2.0**9)
    assert (old.unskipped, new.unskipped) == (3, 0)
    assert (old.consecutive_skips, new.consecutive_skips) == (0, 1)
    assert (state.skipped_steps, after.skipped_steps) == (0, 1)
    assert (bool(state.last_step_skipped), bool(after.last_step_skipped)) == (
        False,
        True,
    )


def test_the_step_after_a_skip_is_the_step_that_would_have_been(trained):
    state, step, x, clean = trained
    bad = jax.tree.map(lambda s: s + jnp.inf, clean)
    with jax.numpy_dtype_promotion("standard"):
        late, now = step(step(state, x, bad), x, clean), step(state, x, clean)
    # Powers of two: the lower scale rounds gradients the same way, short of underflow.
    for name in ("batch_stats", "step", "ema"):
        assert_same_bits(fields_of(late)[name], fields_of(now)[name])
    for a, b in zip(*map(jax.tree.leaves, (late.params, now.params)), strict=True):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=1e-3, atol=1e-6)
    assert (late.skipped_steps, bool(late.last_step_skipped)) == (1, False)


@pytest.mark.parametrize("level", RUNNING)
def test_a_plain_tree_is_checked_too(level):
    state = make(level, loss_scale="dynamic")
    bad = like(params(), 0.25)
    bad["b"] = bad["b"].at[1].set(jnp.nan)
    after = state.apply_gradients(grads=bad)
    assert_skipped(after, state)
    assert (after.loss_scale, after.skipped_steps) == (2.0**15, 1)
    after = after.apply_gradients(grads=like(params(), 0.25))
    assert (after.step, after.loss_scales[0].unskipped) == (1, 1)


@pytest.mark.parametrize("level", RUNNING)
def test_a_static_scale_checks_nothing(level):
    # apex_semantics 4.5: inf and NaN are handed to the optimizer.
    state = make(level, loss_scale=4.0)
    bad = like(params(), 0.25)
    bad["w"] = bad["w"].at[0, 0].set(jnp.nan)
    after = step(state, bad)
    assert (after.step, after.skipped_steps, after.loss_scale) == (1, 0, 4.0)
    assert not after.last_step_skipped
    assert np.isnan(jamp.master_params(after)["w"]).any()
    assert not np.array_equal(after.params["b"], state.params["b"])


@pytest.mark.parametrize("level", RUNNING)
def test_a_static_scale_that_checks_skips_and_stays(level):
    state = make(level, loss_scale=jamp.StaticLossScale(4.0, check=True))
    bad = like(params(), 0.25)
    bad["w"] = bad["w"].at[0, 0].set(jnp.nan)
    after = step(state, bad)
    assert_skipped(after, state)
    assert (after.loss_scale, after.skipped_steps) == (4.0, 1)
    assert after.last_step_skipped


def test_counters_over_a_run_of_clean_and_bad_steps():
    state = make(loss_scale=jamp.DynamicLossScale(init_scale=16.0, window=2))
    good, bad = like(params(), 2.0**-6), like(params(), jnp.inf)
    history = []
    for x in (good, bad, bad, good, good, good, bad):
        state = step(state, x)
        history.append(
            [int(state.step), int(state.skipped_steps), int(state.last_step_skipped)]
            + [float(state.loss_scale)]
        )
    assert history == [
        [1, 0, 0, 16],
        [1, 1, 1, 8],
        [1, 2, 1, 4],
        [2, 2, 0, 4],
        [3, 2, 0, 8],
        [4, 2, 0, 8],
        [4, 3, 1, 4],
    ]


def test_one_bad_micro_batch_skips_the_accumulated_step():
    state = make()
    grad = jamp.scaled_grad(dot)
    good, bad = (grad(state, like(params(), v)) for v in (2.0**-6, jnp.inf))
    after = state.apply_gradients(grads=(good + bad + good) / 3)
    assert_skipped(after, state)
    assert (after.skipped_steps, after.loss_scale) == (1, 2.0**15)


def test_master_weights_and_fp32_leaves_accumulate_at_a_static_scale_of_one():
    # apex_semantics 6.6: apex drops what fp32 leaves had accumulated.
    state = make("O5", optax.sgd(1.0))
    assert state.loss_scale == 1.0
    grad = jamp.scaled_grad(dot)
    total = grad(state, like(params(), 0.25)) + grad(state, like(params(), 0.5))
    masters = jamp.master_params(state.apply_gradients(grads=total))
    np.testing.assert_allclose(masters["norm"]["scale"], 3.0 - 0.75)
    np.testing.assert_allclose(masters["w"], np.asarray(params()["w"]) - 0.75)


# Donation, tracing, transformations


@pytest.mark.parametrize("level", RUNNING)
def test_a_donated_state_takes_the_users_arrays_nowhere(level):
    users = params()
    users["tied"] = users["w"]  # one array, two leaves
    stats = {"mean": jnp.zeros(2, jnp.float32)}
    before = copy((users, stats))
    state = make(level, tree=users, batch_stats=stats, ema=users)
    first = state

    def loss_fn(p, x):
        # Not linear, or jit would drop the params that no gradient needs.
        return dot(p, jax.tree.map(lambda p, x: x * p.astype(jnp.float32), p, x))

    def body(state, x):
        fields = {"batch_stats": {"mean": state.batch_stats["mean"] + 1}}
        return state.apply_gradients(
            grads=jamp.scaled_grad(loss_fn)(state, x), **fields
        )

    donating = jax.jit(body, donate_argnums=0)
    # Warnings are errors here: "Some donated buffers were not usable".
    for seed in range(3):
        state = donating(state, random_like(users, seed))
    assert state.step == 3
    leaves = jax.tree.leaves_with_path(first)
    kept = [jax.tree_util.keystr(k) for k, x in leaves if not x.is_deleted()]
    assert kept == [".last_step_skipped"]  # no step reads it, so jit drops it too
    assert_same_bits(copy((users, stats)), before)


ALIASING = {
    "schedule_free": lambda: optax.contrib.schedule_free_sgd(0.1),
    "ema": lambda: optax.chain(optax.ema(0.9), optax.sgd(0.1)),
    "copies the params": lambda: optax.GradientTransformation(
        lambda params: {"anchor": params}, lambda u, s, p=None: (u, s)
    ),
}


@pytest.mark.standard_promotion
@pytest.mark.parametrize("level", RUNNING)
@pytest.mark.parametrize("name", ALIASING)
def test_an_optimizer_whose_state_is_the_params_can_be_donated(name, level):
    state = make(level, ALIASING[name]())
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(state)]
    assert len(set(pointers)) == len(pointers)
    donating = jax.jit(
        lambda s: s.apply_gradients(grads=like(params(), 0.25)), donate_argnums=0
    )
    state = donating(donating(state))
    assert state.step == 2


@pytest.mark.parametrize("level", RUNNING)
def test_nothing_retraces_on_step_2_or_for_a_second_state(level):
    traces = []

    @jax.jit
    def counted(state, x):
        traces.append(1)
        grads = jamp.scaled_grad(dot)(state, x)
        return state.apply_gradients(grads=grads, batch_stats=state.batch_stats)

    model, tx = Noisy(), optax.sgd(0.5, momentum=0.5)
    stats = {"mean": jnp.zeros(2, jnp.float32)}
    x = random_like(params(), 0)
    for _ in range(2):
        state = make(level, tx, batch_stats=stats, apply_fn=model.apply)
        for _ in range(3):
            state = counted(state, x)
    assert len(traces) == 1


def test_static_parts_compare_and_hash_by_value():
    model, tx = Noisy(), optax.sgd(0.5)

    def treedef(**kwargs):
        state = make("O2", tx, apply_fn=model.apply, batch_stats={}, **kwargs)
        return jax.tree.structure(state)

    assert treedef() == treedef()
    assert hash(treedef()) == hash(treedef())
    assert treedef() != treedef(loss_scale=3.0)
    assert treedef() != treedef(keep_fp32=["norm", "b"])


def test_it_is_a_carry_of_scan():
    state = make(loss_scale=jamp.DynamicLossScale(init_scale=16.0, window=2))
    values = [2.0**-6, np.inf, 2.0**-6, 2.0**-6]
    xs = jax.tree.map(
        lambda p: jnp.stack([jnp.full(p.shape, v, jnp.float32) for v in values]),
        params(),
    )
    scanned, _ = jax.jit(lambda s: lax.scan(lambda s, x: (step(s, x), None), s, xs))(
        state
    )
    for value in values:
        state = step(state, like(params(), value))
    assert_same_bits(scanned, state)
    assert (scanned.step, scanned.skipped_steps) == (3, 1)


def test_an_ensemble_under_vmap_skips_each_member_alone():
    stacked = {"w": jnp.asarray([[1.0, 2.0], [3.0, 4.0]], jnp.float32)}
    tx = optax.sgd(1.0)
    states = jax.vmap(lambda p: make("O2", tx, p))(stacked)
    x = {"w": jnp.asarray([[2.0**-6, 0.0], [jnp.inf, 0.0]], jnp.float32)}
    states = jax.jit(jax.vmap(step))(states, x)
    assert states.step.tolist() == [1, 0]
    assert states.skipped_steps.tolist() == [0, 1]
    assert states.loss_scale.tolist() == [2.0**16, 2.0**15]
    masters = jamp.master_params(states)["w"]
    np.testing.assert_array_equal(masters, [[1 - 2.0**-6, 2], [3, 4]])


# Fields


class Mine(jamp.AmpState):
    batch_stats: Any
    epoch: Any = None


def with_stats(level="O2", **kwargs):
    stats = {"bn": {"mean": jnp.zeros(2, jnp.float32), "n": jnp.asarray(0, jnp.int32)}}
    return make(level, batch_stats=stats, **kwargs)


def new_stats(mean=None, n=None):
    mean = jnp.ones(2, jnp.float32) if mean is None else mean
    return {"bn": {"mean": mean, "n": jnp.asarray(1, jnp.int32) if n is None else n}}


def test_a_declared_field_moves_with_a_step_and_not_with_a_skip():
    state = with_stats(state_class=Mine)
    assert type(state) is Mine
    after = step(state, like(params(), 2.0**-6), batch_stats=new_stats())
    assert after.batch_stats["bn"]["mean"].tolist() == [1, 1]
    after = step(state, like(params(), jnp.inf), batch_stats=new_stats())
    assert_same_bits(after.batch_stats, state.batch_stats)
    assert after.epoch is None


def test_a_field_that_is_not_passed_stays():
    state = with_stats()
    after = step(state, like(params(), 2.0**-6))
    assert_same_bits(after.batch_stats, state.batch_stats)


def test_a_field_comes_back_in_its_old_dtype():
    half = new_stats(jnp.asarray([1.5, 2.5], jnp.float16))
    after = step(with_stats(), like(params(), 2.0**-6), batch_stats=half)
    assert after.batch_stats["bn"]["mean"].dtype == jnp.float32
    assert after.batch_stats["bn"]["mean"].tolist() == [1.5, 2.5]


BAD_FIELDS = {
    "shape": (new_stats(jnp.ones(3, jnp.float32)), r"bn\W+mean"),
    "broadcast": (new_stats(jnp.ones((), jnp.float32)), r"bn\W+mean"),
    "missing": ({"bn": {"mean": jnp.ones(2, jnp.float32)}}, r"bn\W+n\b"),
    "extra": ({"bn": new_stats()["bn"] | {"var": jnp.ones(2)}}, r"bn\W+var"),
    "none": (None, r"batch_stats"),
}


@pytest.mark.parametrize("name", BAD_FIELDS)
def test_a_field_of_another_structure_or_shape_is_an_error_with_the_path(name):
    bad, path = BAD_FIELDS[name]
    with pytest.raises(REFUSED, match=rf"(?s)batch_stats.*{path}|{path}") as caught:
        with_stats().apply_gradients(grads=like(params(), 0.25), batch_stats=bad)
    assert "batch_stats" in str(caught.value)


def test_the_shapes_of_a_bad_field_are_in_the_message():
    bad = new_stats(jnp.ones(3, jnp.float32))
    with pytest.raises(REFUSED, match=r"(?s)\(3,\).*\(2,\)|\(2,\).*\(3,\)"):
        with_stats().apply_gradients(grads=like(params(), 0.25), batch_stats=bad)


def test_an_unknown_field_is_an_error_that_names_it():
    with pytest.raises(REFUSED, match="batch_statz"):
        with_stats().apply_gradients(
            grads=like(params(), 0.25), batch_statz=new_stats()
        )


@pytest.mark.parametrize("name", ["params", "opt_state", "step", "loss_scales"])
def test_the_states_own_fields_are_no_extra_fields(name):
    state = with_stats()
    with pytest.raises(REFUSED, match=name):
        state.apply_gradients(
            grads=like(params(), 0.25), **{name: getattr(state, name)}
        )


def test_undeclared_fields_share_one_picklable_class():
    a, b = with_stats(), with_stats("O5")
    assert type(a) is type(b)
    assert type(a) is not jamp.AmpState
    again = pickle.loads(pickle.dumps(type(a)))
    assert again is type(a)


def test_replace_works_as_for_every_flax_dataclass():
    state = with_stats().replace(batch_stats=new_stats())
    assert state.batch_stats["bn"]["n"] == 1
    assert state.step == 0


# Bad gradients


BAD_GRADS = {
    "missing": (lambda g: {k: v for k, v in g.items() if k != "b"}, r"\bb\b"),
    "extra": (lambda g: g | {"extra": jnp.ones(2, jnp.float32)}, r"\bextra\b"),
    "nested": (lambda g: g | {"norm": {}}, r"norm\W+scale"),
    "shape": (lambda g: g | {"b": jnp.ones(1, jnp.float32)}, r"\bb\b"),
    "none": (lambda g: None, r"\bb\b"),
}


@pytest.mark.parametrize("level", ["O0", "O2", "O3"])
@pytest.mark.parametrize("name", BAD_GRADS)
def test_gradients_of_another_structure_are_an_error_with_the_path(name, level):
    spoil, path = BAD_GRADS[name]
    with pytest.raises(REFUSED, match=path):
        make(level).apply_gradients(grads=spoil(like(params(), 0.25)))


def test_scaled_grads_of_another_model_are_an_error():
    other = make(tree={"v": jnp.ones(3, jnp.float32)})
    grads = jamp.scaled_grad(dot)(other, {"v": jnp.ones(3, jnp.float32)})
    with pytest.raises(REFUSED, match=r"\b[vwb]\b"):
        make().apply_gradients(grads=grads)


# Several losses


@pytest.mark.parametrize("pack", [tuple, list], ids=["tuple", "list"])
def test_losses_with_different_scales_are_summed_in_fp32(pack):
    state = make("O2", optax.sgd(1.0), num_losses=2)
    scales = [
        s._replace(scale=jnp.float32(v))
        for s, v in zip(state.loss_scales, (8.0, 2.0), strict=True)
    ]
    state = state.replace(loss_scales=tuple(scales))
    # 2^-9 + 2^4: fp16 has no such number.
    values = (2.0**-9, 16.0)
    grads = pack(
        jamp.scaled_grad(dot, loss_id=i)(state, like(params(), v))
        for i, v in enumerate(values)
    )
    after = state.apply_gradients(grads=grads)
    expected = np.asarray(params()["w"]) - np.float32(16 + 2.0**-9)
    np.testing.assert_array_equal(jamp.master_params(after)["w"], expected)
    assert after.step == 1
    assert [int(s.unskipped) for s in after.loss_scales] == [1, 1]


def test_an_overflow_of_one_loss_skips_and_moves_only_its_own_scale():
    state = make("O2", num_losses=2)
    grads = [
        jamp.scaled_grad(dot, loss_id=i)(state, like(params(), v))
        for i, v in enumerate((2.0**-9, jnp.inf))
    ]
    after = state.apply_gradients(grads=grads)
    assert_skipped(after, state)
    assert after.skipped_steps == 1
    assert tuple(map(float, after.loss_scale)) == (2.0**16, 2.0**15)
    assert [int(s.unskipped) for s in after.loss_scales] == [1, 0]


def test_a_loss_that_took_no_part_keeps_its_scale():
    state = make("O2", num_losses=2)
    grads = jamp.scaled_grad(dot, loss_id=1)(state, like(params(), 2.0**-9))
    after = state.apply_gradients(grads=grads)
    assert [int(s.unskipped) for s in after.loss_scales] == [0, 1]
    assert_same_bits(after.loss_scales[0], state.loss_scales[0])


def test_two_backward_passes_of_one_loss_move_its_scale_twice():
    # apex_semantics 4.5: with a shared scaler the counter advances once per backward.
    state = make("O2", loss_scale=jamp.DynamicLossScale(init_scale=16.0, window=2))
    grad = jamp.scaled_grad(dot)
    grads = [grad(state, like(params(), v)) for v in (2.0**-6, 2.0**-7)]
    after = state.apply_gradients(grads=grads)
    assert (after.step, after.loss_scale) == (1, 32.0)
    grads = [grad(state, like(params(), jnp.inf))] * 2
    after = state.apply_gradients(grads=grads)
    assert (after.skipped_steps, after.loss_scale) == (1, 4.0)


# Several groups


def pair(pack, level="O2", tx=None, **kwargs):
    tx = optax.sgd(1.0, momentum=0.5) if tx is None else tx
    trees = pack([{"w": jnp.full(2, v, jnp.float32)} for v in (1.0, 2.0)])
    return jamp.initialize(trees, pack([tx, tx]), level, verbosity=0, **kwargs)


def gan(values):
    return dict(zip(("d", "g"), values, strict=True))


def grads_of(state, key, slope, loss_id=0):
    def loss_fn(p):
        return (p[key]["w"].astype(jnp.float32) * slope).sum()

    return jamp.scaled_grad(loss_fn, wrt=key, loss_id=loss_id)(state)


GOOD = 2.0**-6


@pytest.mark.parametrize(
    "pack, keys",
    [(gan, "dg"), (list, (0, 1)), (tuple, (0, 1))],
    ids=["dict", "list", "tuple"],
)
def test_an_overflow_in_one_group_leaves_the_other_stepping(pack, keys):
    state = pair(pack, num_losses=2)
    first, second = keys
    grads = [grads_of(state, first, GOOD, 0), grads_of(state, second, jnp.inf, 1)]
    after = state.apply_gradients(grads=grads)
    for name in ("params", "opt_state", "skipped_steps", "last_step_skipped"):
        before, now = getattr(state, name), getattr(after, name)
        assert type(now) is type(before), name
        assert jax.tree.structure(now) == jax.tree.structure(before), name
    masters = jamp.master_params(after)
    np.testing.assert_array_equal(masters[first]["w"], 1 - GOOD)
    assert_same_bits(after.params[second], state.params[second])
    assert_same_bits(after.opt_state[second], state.opt_state[second])
    assert (after.skipped_steps[first], after.skipped_steps[second]) == (0, 1)
    assert not after.last_step_skipped[first]
    assert after.last_step_skipped[second]
    assert after.step == 1
    assert tuple(map(float, after.loss_scale)) == (2.0**16, 2.0**15)


def test_one_backward_over_both_groups_skips_both():
    state = pair(gan)

    def loss_fn(p):
        return (p["d"]["w"].astype(jnp.float32) * GOOD).sum() + (
            p["g"]["w"].astype(jnp.float32) * jnp.inf
        ).sum()

    after = state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state))
    assert_skipped(after, state)
    assert (after.skipped_steps["d"], after.skipped_steps["g"]) == (1, 1)
    assert after.step == 0


@pytest.mark.parametrize("value", [GOOD, np.inf], ids=["clean", "overflow"])
def test_a_group_that_is_not_covered_does_not_move(value):
    state = pair(gan)
    after = state.apply_gradients(grads=grads_of(state, "d", value))
    assert_same_bits(after.params["g"], state.params["g"])
    assert_same_bits(after.opt_state["g"], state.opt_state["g"])
    assert (after.skipped_steps["g"], bool(after.last_step_skipped["g"])) == (0, False)
    clean = value == GOOD
    assert (after.step, after.skipped_steps["d"]) == ((1, 0) if clean else (0, 1))


def test_wrt_a_sequence_covers_its_groups():
    state = pair(gan)

    def loss_fn(p):
        return sum((p[k]["w"].astype(jnp.float32) * GOOD).sum() for k in "dg")

    grads = jamp.scaled_grad(loss_fn, wrt=("g", "d"))(state)
    masters = jamp.master_params(state.apply_gradients(grads=grads))
    np.testing.assert_array_equal(masters["d"]["w"], 1 - GOOD)
    np.testing.assert_array_equal(masters["g"]["w"], 2 - GOOD)


def test_a_plain_tree_may_leave_a_group_out_with_none():
    state = pair(gan)
    after = state.apply_gradients(
        grads={"d": like({"w": jnp.ones(2)}, GOOD), "g": None}
    )
    np.testing.assert_array_equal(jamp.master_params(after)["d"]["w"], 1 - GOOD)
    assert_same_bits(after.params["g"], state.params["g"])
    assert_same_bits(after.opt_state["g"], state.opt_state["g"])


def test_two_losses_over_one_group_both_count():
    # As in a GAN: the discriminator learns from two losses, the generator from one.
    state = pair(gan, num_losses=3)
    grads = [
        grads_of(state, "d", GOOD, 0),
        grads_of(state, "d", 2 * GOOD, 1),
        grads_of(state, "g", GOOD, 2),
    ]
    masters = jamp.master_params(state.apply_gradients(grads=grads))
    np.testing.assert_array_equal(masters["d"]["w"], 1 - 3 * GOOD)
    np.testing.assert_array_equal(masters["g"]["w"], 2 - GOOD)


def test_fields_keyed_as_the_groups_are_selected_per_group():
    zero = jnp.zeros(2, jnp.float32)
    state = pair(gan, num_losses=2, stats={"d": zero, "g": zero}, shared=zero)
    grads = [grads_of(state, "d", GOOD, 0), grads_of(state, "g", jnp.inf, 1)]
    one = jnp.ones(2, jnp.float32)
    fields = {"stats": {"d": one, "g": one}, "shared": one}
    after = state.apply_gradients(grads=grads, **fields)
    assert after.stats["d"].tolist() == [1, 1]
    assert after.stats["g"].tolist() == [0, 0]
    # A field of no group changes only if all covered groups were clean.
    assert after.shared.tolist() == [0, 0]
    after = state.apply_gradients(grads=grads[0], **fields)
    assert after.shared.tolist() == [1, 1]


def test_groups_do_not_retrace_and_can_be_donated():
    traces = []

    def body(state):
        traces.append(1)
        return state.apply_gradients(grads=grads_of(state, "d", GOOD))

    donating = jax.jit(body, donate_argnums=0)
    state = pair(gan)
    for _ in range(3):
        state = donating(state)
    assert state.step == 3
    assert len(traces) == 1


# Values that are overwritten with their gradient, as Flax's fp8 does


@jax.custom_vjp
def measured(scale, x):
    return x * 1.0


measured.defvjp(
    lambda scale, x: (measured(scale, x), None),
    lambda _, g: (jnp.asarray(7.0, jnp.float32), g),
)


def fp8_params():
    return {
        "params": {"w": jnp.asarray([1.0, 2.0], jnp.float32)},
        "_overwrite_with_gradient": {"amax": jnp.asarray(3.0, jnp.float32)},
    }


@pytest.mark.parametrize("level", RUNNING)
def test_overwrite_with_gradient_is_honoured(level):
    state = make(level, optax.sgd(1.0, momentum=0.9), fp8_params(), loss_scale=8.0)
    amax = state.params["_overwrite_with_gradient"]["amax"]
    assert (amax.dtype, amax) == (jnp.float32, 3.0)
    assert len(jax.tree.leaves(optax.tree.get(state.opt_state, "trace"))) == 1

    def loss_fn(p, x):
        w = p["params"]["w"].astype(jnp.float32)
        return (measured(p["_overwrite_with_gradient"]["amax"], w) * x).sum()

    @jax.jit
    def fp8_step(state, x):
        return state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state, x))

    after = fp8_step(state, GOOD)
    # Not scaled, not unscaled, not stepped: written.
    amax = after.params["_overwrite_with_gradient"]["amax"]
    assert (amax.dtype, amax) == (jnp.float32, 7.0)
    w = np.float32([1 - GOOD, 2 - GOOD]).astype(HALF.get(level, np.float32))
    assert bits(after.params["params"]["w"]) == w.tobytes()


def test_overwrite_with_gradient_is_honoured_in_a_frozen_dict():
    # Flax's TrainState asks `in`, so it does not mind which mapping it is.
    state = make("O2", optax.sgd(1.0, momentum=0.9), FrozenDict(fp8_params()))
    amax = state.params["_overwrite_with_gradient"]["amax"]
    assert (amax.dtype, amax) == (jnp.float32, 3.0)
    grads = {"w": jnp.ones(2, jnp.float32)}
    new = {"amax": jnp.asarray(7.0, jnp.float32)}
    grads = FrozenDict({"params": grads, "_overwrite_with_gradient": new})
    after = state.apply_gradients(grads=grads)
    assert isinstance(after.params, FrozenDict)
    assert after.params["_overwrite_with_gradient"]["amax"] == 7.0


def test_overwritten_values_are_part_of_the_skip():
    state = make("O2", optax.sgd(1.0), fp8_params())

    def loss_fn(p, x):
        w = p["params"]["w"].astype(jnp.float32)
        return (measured(p["_overwrite_with_gradient"]["amax"], w) * x).sum()

    grads = jamp.scaled_grad(loss_fn)(state, jnp.inf)
    after = state.apply_gradients(grads=grads)
    assert_skipped(after, state)


def test_master_params_of_a_level_without_masters_are_its_params_in_fp32():
    for level, dtype in {
        "O0": np.float32,
        "O3": ml_dtypes.finfo(np.float16).dtype,
    }.items():
        masters = jamp.master_params(make(level))
        expected = np.asarray(params()["b"]).astype(dtype).astype(np.float32)
        assert bits(masters["b"]) == expected.tobytes()
