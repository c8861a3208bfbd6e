"""Test AmpState: steps against float64, skips, fields and donation."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax.core import FrozenDict

import jamp
from jamp.optimizers import fused_sgd
from tests.oracles import fused as oracle
from tests.support.bits import assert_same_bits, bits, copy
from tests.support.states import (
    HALF,
    RUNNING,
    SGD,
    assert_skipped,
    dot,
    like,
    make,
    params,
    wide,
    with_scales,
)


def random_like(tree, seed, scale=2.0**-9):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: np.float32(rng.normal(size=x.shape) * scale), tree)


@jax.jit
def step(state, x, **fields):
    return state.apply_gradients(grads=jamp.scaled_grad(dot)(state, x), **fields)


def halved(x, level):
    return np.asarray(x).astype(HALF.get(level, np.float32))


@pytest.mark.standard_promotion  # for optax.adam
@pytest.mark.parametrize("level", RUNNING)
def test_steps_match_float64_and_round_the_params(level):
    tx, expected, tol = optax.adam(1e-2), oracle.adam, 2e-6
    options = {"learning_rate": np.float32(1e-2)}
    if level == "O3":  # without masters, params are rounded after each step
        # The oracle's sums are float64, so it may round a tie differently.
        tx, expected, tol = SGD, oracle.momentum, 2.0**-10
        options = {"learning_rate": 0.5, "decay": 0.5, "storage": np.float16}
    state = make(level, tx=tx, keep_fp32="norm" if level in ("O2", "O5") else None)
    xs = [random_like(params(), seed, scale=2.0**-3) for seed in range(8)]
    scale = np.float32(state.loss_scale)

    def seen(x, p):
        """Returns the gradient of the backward pass, rounded if p is half."""
        return (x * scale).astype(p.dtype).astype(np.float64) / scale

    grads = [jax.tree.leaves(jax.tree.map(seen, x, state.params)) for x in xs]
    start = jax.tree.leaves(jamp.master_params(state))
    for x, leaves in zip(xs, expected(start, grads, **options), strict=True):
        state = step(state, x)
        masters = jamp.master_params(state)
        for got, wanted in zip(jax.tree.leaves(masters), leaves, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=tol, atol=tol)
        assert bits(state.params["w"]) == halved(masters["w"], level).tobytes()
    assert (state.step, state.skipped_steps) == (8, 0)


@pytest.mark.standard_promotion
@pytest.mark.parametrize("fused", [False, True])
def test_float64_params_are_unscaled_and_stepped_in_float64(fused):
    rng = np.random.default_rng(0)
    start, x = rng.normal(size=5), rng.normal(size=5)
    tx = fused_sgd(0.3) if fused else optax.sgd(np.float64(0.3))
    with jax.enable_x64(True):
        state = jamp.initialize(
            {"w": jnp.asarray(start)}, tx, "O0", cast_model_type=False, loss_scale=3.0,
            allow_incoming_model_not_fp32=True, verbosity=0,
        )  # fmt: skip
        loss = lambda p, x: (p["w"] * x).sum()  # noqa: E731
        state = state.apply_gradients(grads=jamp.scaled_grad(loss)(state, x))
        assert state.params["w"].dtype == np.float64
        np.testing.assert_allclose(state.params["w"], start - 0.3 * x, rtol=1e-14)


RATE_ONE = optax.sgd(1.0)
# The start, the slopes of two steps at rate 1, and the master after each.
ROUNDED = [
    # |p| / |new| is beyond 2^13: adding f32(new) - f32(p) to p does not give new.
    (60000.0, (60000.0, -(2.0**-12 + 2.0**-20)), (0.0, 2.0**-12 + 2.0**-20)),
    (1.0, (-1e6, 1e6), (1000001.0, 1.0)),  # the half param is clamped and recovers
]


@pytest.mark.parametrize("start, slopes, masters", ROUNDED)
def test_params_are_the_rounded_masters_where_apply_updates_would_err(
    start, slopes, masters
):
    state = make(tree={"w": jnp.full(1, start)}, tx=RATE_ONE)
    for slope, master in zip(slopes, masters, strict=True):
        state = state.apply_gradients(grads={"w": jnp.full(1, slope)})
        assert jamp.master_params(state)["w"] == np.float32(master)
        assert state.params["w"] == np.float16(min(master, 65504))


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.float8_e5m2])
def test_a_float8_leaf_is_stepped_in_float32_and_clamped(dtype, level):
    values = np.linspace(-3, 3, 301)
    options = {"allow_incoming_model_not_fp32": True, "loss_scale": 1}
    state = make(level, {"f8": jnp.asarray(values, dtype)}, optax.sgd(0.3), **options)
    x = np.float32(np.cos(values))
    grads = jamp.scaled_grad(dot)(state, {"f8": x})
    assert grads["f8"].dtype == jnp.float32
    after = state.apply_gradients(grads=grads).params["f8"]
    # The derivative rounds its result.
    before, grad = (np.float64(v.astype(dtype)) for v in (values, x))
    exact = np.float32(before - np.float32(0.3) * grad).astype(dtype)
    np.testing.assert_array_equal(after, exact)
    after = state.apply_gradients(grads={"f8": jnp.full(301, 1e6)}).params["f8"]
    assert (np.float32(after) == -float(ml_dtypes.finfo(dtype).max)).all()


@jax.jit
def full_step(state, x):
    """Steps with new values of fields."""
    ema = optax.incremental_update(jamp.master_params(state), state.ema, 0.5)
    key = jax.random.split(state.key)[0]
    return step(state, x, stats=state.stats + 1, ema=ema, key=key)


@pytest.fixture(scope="module")
def trained():
    """Returns a state after three steps of an optimizer with all kinds of state."""
    everything = optax.chain(
        optax.clip_by_global_norm(10.0),
        optax.add_noise(1e-3, 0.5, key=3),
        optax.MultiSteps(optax.adam(1e-3), 2).gradient_transformation(),
        optax.scale_by_schedule(optax.linear_schedule(1.0, 0.1, 10)),
        optax.ema(0.9),
    )
    fields = {"stats": jnp.zeros(2), "ema": params(), "key": jax.random.key(0)}
    rule = jamp.DynamicLossScale(init_scale=2.0**10)
    with jax.numpy_dtype_promotion("standard"):
        state = make(tx=everything, loss_scale=rule, **fields)
        for seed in range(3):
            state = full_step(state, random_like(params(), seed))
    return state


CLEAN = random_like(params(), 3)
SPOILT = [("w", at, bad) for at in (0, 1, 2) for bad in (np.inf, np.nan)]
SPOILT += [("w", 1, -np.inf), ("b", 1, np.inf), ("norm", 0, -np.inf)]


@pytest.mark.standard_promotion
def test_one_bad_element_changes_only_scale_and_counters(trained):
    # A clean step must change all fields, or the test of a skip would show nothing.
    after = full_step(full_step(trained, CLEAN), CLEAN)
    pairs = zip(jax.tree.leaves_with_path(trained), jax.tree.leaves(after), strict=True)
    same = {jax.tree_util.keystr(k) for (k, x), y in pairs if bits(x) == bits(y)}
    # MultiSteps returns to the second of two steps.
    held = ("mini_step", "skip_state", "skipped", "consecutive", ".scale", "hysteresis")
    assert all(any(h in path for h in held) for path in same), same
    assert optax.tree.get(after.opt_state, "rng_key") is not None
    assert tuple(trained.loss_scales[0]) == (2.0**10, 3, 1, 0)
    assert (trained.skipped_steps, trained.last_step_skipped) == (0, False)
    for leaf, at, bad in SPOILT:
        spoil = copy(CLEAN)
        jax.tree.leaves(spoil[leaf])[0].flat[at] = bad
        after = full_step(trained, spoil)
        assert_skipped(after, trained)
        assert tuple(after.loss_scales[0]) == (2.0**9, 0, 0, 1)
        assert (after.skipped_steps, after.last_step_skipped) == (1, True)


each_tx = pytest.mark.parametrize("tx", [SGD, fused_sgd(0.5, 0.5)], ids=["", "fused"])


def spoilt():
    grads = like(params(), 0.25)
    return grads | {"b": grads["b"].at[1].set(jnp.nan)}


def test_a_plain_tree_is_checked_too():
    state, grads = make(), like(params(), 0.25)
    after = state.apply_gradients(grads=spoilt())
    assert_skipped(after, state)
    assert (after.loss_scale, after.skipped_steps) == (2.0**15, 1)
    # apply_gradients takes a plain tree as unscaled.
    scaled, plain = step(after, grads), after.apply_gradients(grads=grads)
    for name in ("params", "loss_scales"):
        assert_same_bits(getattr(plain, name), getattr(scaled, name))
    assert (plain.step, plain.loss_scales[0].unskipped) == (1, 1)
    expected = halved(params()["w"] - 0.125, "O2")
    assert bits(plain.params["w"]) == expected.tobytes()


@each_tx
@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_static_scale_skips_only_if_it_checks(level, tx):
    state = make(level, tx=tx, loss_scale=jamp.StaticLossScale(4.0, check=True))
    for after in (step(state, spoilt()), state.apply_gradients(grads=spoilt())):
        assert_skipped(after, state)
        assert (after.loss_scale, after.skipped_steps) == (4.0, 1)
        assert after.last_step_skipped
    # apex_semantics 4.5: the optimizer receives inf and NaN.
    state = make(level, tx=tx, loss_scale=4.0)
    after = step(state, spoilt())
    assert_same_bits(state.apply_gradients(grads=spoilt()).params, after.params)
    assert (after.step, after.skipped_steps, after.loss_scale) == (1, 0, 4.0)
    assert (after.last_step_skipped, after.loss_scales[0].unskipped) == (False, 1)
    assert np.isnan(jamp.master_params(after)["b"]).tolist() == [False, True]
    assert not np.array_equal(after.params["w"], state.params["w"])


@each_tx
@pytest.mark.parametrize("level", ["O4", "O5", "O6"])
def test_a_level_of_bfloat16_checks_by_default_and_an_explicit_number_does_not(
    level, tx
):
    fields = {"state_class": Mine, "batch_stats": OLD}
    state, new = make(level, tx=tx, **fields), stats_of(np.float32([1, 2]))
    assert state.loss_scale_rules == (jamp.StaticLossScale(1.0, check=True),)
    state = step(state, random_like(params(), 0))
    for x in (spoilt(), like(params(), jnp.nan)):
        bad = step(state, x, batch_stats=new)
        assert_skipped(bad, state)
        assert (bad.skipped_steps, bad.loss_scale) == (1, 1) and bad.last_step_skipped
    for number in (1, 1.0, "1", np.float32(1)):
        rules = make(level, tx=tx, loss_scale=number).loss_scale_rules
        assert rules == (jamp.StaticLossScale(1.0),)


class Mine(jamp.AmpState):
    batch_stats: Any
    epoch: Any = None


def stats_of(mean, n=0):
    return {"bn": {"mean": jnp.asarray(mean), "n": jnp.asarray(n, jnp.int32)}}


OLD = stats_of(np.float32([0, 0]))


def test_a_declared_field_moves_with_a_step_and_not_with_a_skip():
    state, new = make(state_class=Mine, batch_stats=OLD), stats_of(np.float16([1, 2]))
    assert type(state) is Mine
    good, bad = like(params(), 2.0**-6), like(params(), jnp.inf)
    after = step(state, good, batch_stats=new)
    # The field keeps its dtype.
    assert_same_bits(after.batch_stats, stats_of(np.float32([1, 2])))
    assert after.epoch is None
    assert_same_bits(step(state, good).batch_stats, OLD)
    assert_same_bits(step(state, bad, batch_stats=new).batch_stats, OLD)


GRADS, ONES = like(params(), 0.25), jnp.ones(3, jnp.float32)
OTHERS = jamp.scaled_grad(dot)(make(tree={"v": ONES}), {"v": ONES})
REFUSED = [
    ({"grads": OTHERS}, r"gradients have no leaf at \['b'\]"),
    ({"grads": {k: GRADS[k] for k in ("w", "norm")}}, r"have no leaf at \['b'\]: pass"),
    ({"grads": GRADS | {"more": ONES}}, r"gradients have an unexp.* \['more'\]"),
    ({"grads": GRADS | {"b": ONES}}, r"\['b'\] has shape \(3,\), expected \(2,\)"),
    ({"grads": GRADS | {"b": None}}, r"gradients have no leaf at \['b'\]"),
    ({"grads": GRADS | {"b": jnp.arange(2)}}, r"gradients have no leaf at \['b'\]"),
    ({"grads": FrozenDict(GRADS)}, "gradients have the structure .* expected"),
    ({"batch_stats": None}, r"batch_stats have no leaf at .*'mean'.*state.replace"),
    ({"batch_stats": stats_of(1.0)}, r"\['mean'\] has shape \(\), expected \(2,\)"),
    ({"extra": jnp.float32(0.5)}, "extra is float32, and .* stores int32"),
    ({"own": {"a": 2}}, r"own\['a'\] is int32, and .* stores bool"),
    ({"batch_statz": OLD}, r"cannot set 'batch_statz'.*fields are \['batch_stats'"),
    ({"step": 1}, "cannot set 'step'"),
]


@pytest.mark.parametrize("given, words", REFUSED, ids=[words for _, words in REFUSED])
def test_other_structures_are_an_error(given, words):
    error = TypeError if "cannot" in words else ValueError
    fields = {"batch_stats": OLD, "extra": jnp.int32(0), "own": {"a": jnp.bool_(True)}}
    with pytest.raises(error, match=words):
        make(**fields).apply_gradients(**{"grads": GRADS} | given)


@pytest.mark.parametrize("grad", [None, np.zeros(3, jax.dtypes.float0), jnp.arange(3)])
def test_the_gradient_of_an_integer_is_ignored(grad):
    state = make(tree={"w": ONES, "n": jnp.arange(3)})
    after = state.apply_gradients(grads={"w": ONES, "n": grad})
    assert after.step == 1
    assert_same_bits(after.params["n"], jnp.arange(3))


def test_gradients_of_another_structure_are_refused_even_without_floats():
    state = make("O0", {"n": jnp.arange(3)}, RATE_ONE)
    with pytest.raises(ValueError, match="gradients have"):
        state.apply_gradients(grads={"m": None})
    state = make(tree={"w": ONES, "n": jnp.arange(3)})
    with pytest.raises(ValueError, match="gradients"):
        state.apply_gradients(grads={"w": ONES, "n": {"w": ONES}})


@jax.tree_util.register_pytree_node_class
class Unhashable:
    """A node with static data that has no hash, which no jit takes."""

    def __init__(self, w, names):
        self.w, self.names = w, names

    def tree_flatten(self):
        return (self.w,), self.names

    @classmethod
    def tree_unflatten(cls, names, children):
        return cls(*children, names)


def test_params_with_unhashable_static_data_are_stepped_outside_of_jit():
    state = make("O0", {"model": Unhashable(ONES, ["a", "list"])}, RATE_ONE)
    grads = jamp.scaled_grad(lambda p: p["model"].w.sum())(state)
    assert not state.apply_gradients(grads=grads).params["model"].w.any()


def test_a_state_without_batch_stats_takes_none():
    state = make().replace(step=0)
    assert "step: 0, skipped: 0" in repr(state)
    assert state.apply_gradients(GRADS, batch_stats=None).step == 1
    with pytest.raises(ValueError, match="no batch_stats: pass `batch_stats=` to jamp"):
        state.apply_gradients(GRADS, batch_stats=OLD)


@pytest.mark.parametrize("tx", [RATE_ONE, fused_sgd(1.0)], ids=["sgd", "fused_sgd"])
def test_losses_with_different_scales_are_summed_in_fp32(tx):
    # apex_semantics 6.5: apex's FusedSGD is wrong if a later loss has a lower scale.
    state = with_scales(make(tx=tx, num_losses=3), 64.0, 0.5, 4.0)
    slopes = (2.0**-9, 8.0, 2.0**-12)  # half cannot hold their sum
    rows = ((i, like(params(), x)) for i, x in enumerate(slopes))
    grads = [jamp.scaled_grad(dot, loss_id=i)(state, x) for i, x in rows]
    after = state.apply_gradients(grads=grads, loss_id=range(3))
    expected = np.asarray(params()["w"]) - np.float32(sum(slopes))
    np.testing.assert_array_equal(jamp.master_params(after)["w"], expected)
    again = state.apply_gradients(grads=tuple(grads), loss_id=(0, 1, 2))
    assert_same_bits(again, after)
    assert [int(s.unskipped) for s in after.loss_scales] == [1, 1, 1]
    # A loss without gradients keeps its scale.
    after = state.apply_gradients(grads=grads[1], loss_id=1)
    assert [int(s.unskipped) for s in after.loss_scales] == [0, 1, 0]


def pair(**kwargs):
    trees = {k: {"w": jnp.full(2, v, jnp.float32)} for k, v in (("d", 1.0), ("g", 2.0))}
    txs = {"d": fused_sgd(1.0, 0.5), "g": optax.sgd(1.0, 0.5)}
    return make(tree=trees, tx=txs, **kwargs)


def grads_of(state, key, slope, loss_id=0):
    loss_fn = lambda p: (wide(p[key]["w"]) * slope).sum()  # noqa: E731
    return {key: jamp.scaled_grad(loss_fn, wrt=key, loss_id=loss_id)(state)}


def test_gradients_of_groups_in_the_wrong_container_are_refused():
    tree = {"w": jnp.ones(2, jnp.float32)}
    of_dict, wrong = pair(), "container of `state.params`, with the keys .* None for .*"
    tx = optax.sgd(1.0)
    of_list = make(tree=[tree, tree], tx=[tx, tx])
    for state, bad, words in (
        (of_dict, [tree, tree], wrong + "got a list of length 2"),
        (of_dict, {"d": tree, "h": tree}, wrong + r"got a dict with .* \['d', 'h'\]"),
        (of_dict, tree, wrong + r"got a dict with the keys \['w'\]"),
        (of_list, [tree], wrong + "got a list of length 1"),
        (of_list, (tree, tree), wrong + "got a tuple of length 2"),
        (of_list, tree, wrong + "got a dict"),
        (of_dict, {"d": None, "g": None}, "all groups are None"),
        (of_list, [None, None], "all groups are None"),
        (of_dict, {"d": tree, "g": {}}, r"gradients of group 'g' have no leaf"),
    ):
        with pytest.raises(ValueError, match=words):
            state.apply_gradients(grads=bad)
    with pytest.raises(TypeError, match="no optimizer: pass one to jamp.initialize"):
        make(tx=None).apply_gradients(grads=GRADS)


# Flax's fp8 overwrites values with their gradients.
@jax.custom_vjp
def measured(scale, x):
    return x * 1.0


measured.defvjp(
    lambda scale, x: (measured(scale, x), None),
    lambda _, g: (jnp.asarray(7.0, jnp.float32), g),
)


def fp8_state(level="O2", pack=dict, **kwargs):
    w, amax = jnp.asarray([1.0, 2.0], jnp.float32), jnp.asarray(3.0, jnp.float32)
    values = {"amax": amax, "n": jnp.asarray([3, 4])}
    tree = {"params": {"w": w}, "_overwrite_with_gradient": values, "other": w}
    return make(level, pack(tree), optax.sgd(1.0, momentum=0.9), **kwargs)


@jax.jit
def fp8_step(state, x):
    def loss_fn(p):
        w = wide(p["params"]["w"])
        return (measured(p["_overwrite_with_gradient"]["amax"], w) * x).sum()

    return state.apply_gradients(grads=jamp.scaled_grad(loss_fn)(state))


@pytest.mark.parametrize(
    "level, pack", [("O0", dict), ("O2", FrozenDict), ("O5", dict)]
)
def test_overwrite_with_gradient_is_honoured(level, pack):
    # Flax's TrainState accepts any mapping.
    state = fp8_state(level, pack, loss_scale=8.0)
    amax = state.params["_overwrite_with_gradient"]["amax"]
    assert (amax.dtype, amax) == (jnp.float32, 3.0)
    assert len(jax.tree.leaves(optax.tree.get(state.opt_state, "trace"))) == 1
    after = fp8_step(state, 2.0**-6)
    # The gradient is written without scaling, unscaling or a step.
    amax = after.params["_overwrite_with_gradient"]["amax"]
    assert (amax.dtype, amax, type(after.params)) == (jnp.float32, 7.0, pack)
    fixed = lambda p: (p["_overwrite_with_gradient"]["n"], p["other"])  # noqa: E731
    assert_same_bits(fixed(after.params), fixed(state.params))
    w = halved(np.float32([1 - 2.0**-6, 2 - 2.0**-6]), level)
    assert bits(after.params["params"]["w"]) == w.tobytes()
    dynamic = fp8_state(level, pack, loss_scale="dynamic")
    assert_skipped(fp8_step(dynamic, jnp.inf), dynamic)


@pytest.mark.parametrize("ids", [(0, 1), (1, 1)])
def test_two_losses_cannot_both_overwrite_a_value(ids):
    state = fp8_state("O0", num_losses=2)
    grads = jax.tree.map(jnp.ones_like, state.params)
    words = f"_overwrite_with_gradient` from loss {ids[0]} and from loss {ids[1]}"
    with pytest.raises(ValueError, match=words):
        state.apply_gradients(grads=(grads, grads), loss_id=ids)


def test_losses_of_two_groups_overwrite_the_values_of_their_group():
    one, tx = fp8_state("O0").params, optax.sgd(1.0)
    state = make("O0", {"a": one, "b": one}, {"a": tx, "b": tx}, num_losses=2)
    grads = [{key: like(one, x)} for key, x in (("a", 3.0), ("b", 5.0))]
    after = state.apply_gradients(grads=grads, loss_id=(0, 1))
    for key, wanted in (("a", 3.0), ("b", 5.0)):
        assert after.params[key]["_overwrite_with_gradient"]["amax"] == wanted
    with pytest.raises(ValueError, match="of group 'b' from loss 0 and from loss 1"):
        state.apply_gradients(grads=(grads[1], grads[1]), loss_id=(0, 1))


ONE = {"w": jnp.ones(2)}


class _Run(jamp.AmpState):
    run: str = flax.struct.field(pytree_node=False)


def test_a_static_field_is_set_by_replace():
    state = make("O0", ONE, RATE_ONE, state_class=_Run, run="a")
    with pytest.raises(TypeError, match=r"run is static.*replace\(run=\.\.\.\)"):
        state.apply_gradients(grads=ONE, run="b")
    sin = jax.tree_util.Partial(jnp.sin)  # a copy would be unequal and recompile
    assert state.replace(run=sin).run is sin


SHARED = {
    "the masters": lambda s, x: {"own": jamp.master_params(s)["w"]},
    "each other": lambda s, x: {"own": x, "extra": x},
    "new params": lambda s, x: {"own": x, "params": {"w": x}, "opt_state": s.opt_state},
    "keys": lambda s, x: {"own": s.key, "extra": s.key},
}


@pytest.mark.parametrize("shares", SHARED.values(), ids=SHARED)
def test_fields_that_share_arrays_can_be_donated(shares):
    fields = {"own": jnp.zeros(2), "extra": jnp.zeros(2), "key": jax.random.key(7)}
    state = make("O2", ONE, RATE_ONE, **fields)
    changes = shares(state, jnp.ones(2))
    expected = {k: bits(changes[k]) for k in ("own", "extra") if k in changes}
    step = jax.jit(lambda s: s.apply_gradients(grads=ONE), donate_argnums=0)
    stepped = step(state.replace(**changes))
    assert {k: bits(getattr(stepped, k)) for k in expected} == expected


NO_MASTERS = {"master_weights": False, "stochastic_rounding": True}


@pytest.mark.parametrize("kept", [{}, {"store_remainder": True}, NO_MASTERS], ids=str)
@pytest.mark.parametrize("sgd", [optax.sgd, fused_sgd])
def test_a_step_differentiates_as_in_float32_for_every_storage(sgd, kept):
    def after(rate, w):
        state = jamp.initialize(w, sgd(rate), "O5", verbosity=0, **kept)
        loss_fn = lambda w: ((w - 2) ** 2).sum()  # noqa: E731
        grads = jamp.scaled_grad(loss_fn)(state)
        return loss_fn(jamp.master_params(state.apply_gradients(grads=grads)))

    # The step moves each of four weights to 2 + (1 - 2 rate)(w - 2).
    of_rate, of_w = jax.jit(jax.grad(after, (0, 1)))(0.1, jnp.ones(4))
    np.testing.assert_allclose(of_rate, 4 * -4 * (1 - 2 * 0.1), rtol=0.01)
    np.testing.assert_allclose(of_w, -2 * (1 - 2 * 0.1) ** 2, rtol=0.01)


@pytest.mark.parametrize("level", ["O2", "O4", "O6"])
def test_replace_accepts_axes_bools_and_none(level):
    init = lambda w: jamp.initialize(w, optax.sgd(1.0), level, verbosity=0)  # noqa: E731
    states = jax.vmap(init)(jnp.ones((3, 2)))
    counters = ("loss_scales", "skipped_steps", "last_step_skipped")
    axes = states.replace(params=0, opt_state=0, step=0, **dict.fromkeys(counters, 0))
    step = jax.vmap(lambda s: s.apply_gradients(grads=jnp.ones(2)), in_axes=(axes,))
    assert step(states).params.tolist() == [[0, 0]] * 3
    kept = jax.tree.map(lambda x: False, states.opt_state)
    assert states.replace(params=True, opt_state=kept).params is True
    assert states.replace(params=None, opt_state=states.opt_state).params is None


def test_another_rule_replaces_the_scale():
    state = make("O2", ONE)
    state = state.replace(loss_scale_rules=(jamp.StaticLossScale(128.0),))
    scaled = jamp.scale_loss(jnp.float32(1), state)
    assert float(state.loss_scale) == 128 == float(scaled)
    of_seeds = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    assert of_seeds.loss_scale.tolist() == [128, 128]
    assert jax.eval_shape(lambda: state).loss_scale.shape == ()


@pytest.mark.parametrize("loss_id", [jnp.int32(1), np.int64(1)])
def test_a_loss_id_is_any_integer(loss_id):
    state = make("O1", ONE, num_losses=np.int64(2))
    grads = jamp.scaled_grad(lambda p: p["w"].sum(), loss_id=loss_id)(state)
    assert state.apply_gradients(grads=grads, loss_id=loss_id).step == 1
    with pytest.raises(TypeError, match="loss_id must be an int"):
        state.apply_gradients(grads=grads, loss_id=np.array([0, 1]))
