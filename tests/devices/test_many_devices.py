"""Test that eight CPU devices train like one, and average gradients in shard_map."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec as P

import jamp
from jamp import optimizers as jo
from tests.devices.eight_devices import (
    AXES,
    F32,
    LAYOUTS,
    ROWS,
    collectives,
    loss_fn,
    mesh_of,
    misplaced,
    mlp_params,
    placed,
    shardings,
    start,
)
from tests.support.by_hand import with_stats
from tests.support.states import make

pytestmark = [pytest.mark.slow, pytest.mark.standard_promotion]  # for optax.adam

ALL, ROW = P(), P(AXES)


def on_each(check_vma, f, in_specs=(ALL, ROW), out_specs=(ROW, ALL), mesh=None):
    specs = {"in_specs": in_specs, "out_specs": out_specs, "check_vma": check_vma}
    return jax.shard_map(f, mesh=mesh or mesh_of(), **specs)


# One program steps the states of all levels and optimizers, which saves compile time.
# The kernels do not run, because their emulator ends the process on JAX 0.11.
# test_many_devices_h200.py compiles them.

ADAM = optax.adam(1e-2, eps=1e-2)
STATES = {level: (level, ADAM) for level in ("O1", "O2", "O3", "O5")} | {
    "fused adam": ("O2", jo.fused_adam(1e-2, eps=1e-2, max_grad_norm=1.0)),
    "lamb": ("O2", jo.fused_lamb(1e-2, eps=1e-2)),
    "sgd": ("O0", jo.fused_sgd(1e-2, 0.9)),
    "adagrad": ("O5", jo.fused_adagrad(1e-2, eps=1e-2)),  # its masters are split
}
# The states that also run under shard_map, with `check_vma`.
BY_HAND = {"O2": False, "O5": True, "lamb": True}
NAMES = {
    "replicated": ("O3", "O5"),
    "fsdp": ("O2", "fused adam", "sgd", "adagrad"),
    "tensor": ("O1", "O5", "lamb"),
    "shard_map": BY_HAND,
}
# XLA's partitioner changes the order of sums and the places of rounding. At O3, a
# weight that rounds the other way differs by a percent of its change.
TOLERANCES = {"O0": 1e-5, "O3": 0.05, "O5": 2.0**-5}


def batches(sharding=None):
    """Returns four batches. One number on the last device overflows in the second."""
    rng = np.random.default_rng(1)
    xs = np.float32(rng.normal(size=(4, 16, 8)))
    xs[1, -1, 3] = np.inf
    ys = np.float32(rng.normal(size=(4, 16, 4)))
    return [jax.device_put(batch, sharding) for batch in zip(xs, ys, strict=True)]


def begin(name, params):
    level, tx = STATES[name]
    return start(params, tx, level, store_remainder=name == "adagrad")


def step(state, x, y, **options):
    grads = jamp.scaled_grad(loss_fn, **options)(state, state, x, y)
    return state.apply_gradients(grads=grads)


@jax.jit
def step_all(states, x, y):
    return {name: step(state, x, y) for name, state in states.items()}


@jax.jit
def step_all_by_hand(states, x, y):
    """Runs data parallel: each device has an eighth of the batch, and all params."""

    def mapped(check_vma):
        by_hand = functools.partial(step, axis_name=AXES)
        return on_each(check_vma, by_hand, (P(), P(AXES), P(AXES)), P())

    return {name: mapped(BY_HAND[name])(s, x, y) for name, s in states.items()}


def train(step, states, batches):
    """Trains, and checks that one program does all steps and skips the overflow."""
    programs, trail = step._cache_size(), []
    for x, y in batches:
        states = step(states, x, y)
        trail.append([(s.loss_scale, s.skipped_steps) for s in states.values()])
    for k, name in enumerate(states):
        found = [tuple(map(int, counts[k])) for counts in trail]
        assert found == [(256, 0), (128, 1), (128, 1), (256, 1)], name
    assert step._cache_size() == programs + 1
    return states


@functools.cache
def on_one_device():
    states = {name: begin(name, mlp_params()) for name in STATES}
    return train(step_all, states, batches())


def moved(state):
    """Returns the changes of the params and the moments in float64."""
    trees = jamp.master_params(state), mlp_params()
    params = jax.tree.map(lambda a, b: np.float64(a) - np.float64(b), *trees)
    # A remainder may differ in all bits even if the masters nearly agree.
    moments = [x for x in jax.tree.leaves(state.opt_state) if x.dtype != jnp.uint16]
    return jax.tree.leaves(params) + list(map(np.float64, [*moments, state.step]))


@pytest.mark.parametrize("layout", NAMES)
@pytest.mark.eight_devices
def test_a_mesh_trains_like_one_device(layout):
    mesh, specs = mesh_of(), LAYOUTS.get(layout, {})
    params = placed(mlp_params(), mesh, specs)
    states = {name: begin(name, params) for name in NAMES[layout]}
    stepping = step_all_by_hand if layout == "shard_map" else step_all
    rows = NamedSharding(mesh, ROWS.get(layout, P(AXES)))
    states = train(stepping, states, batches(rows))
    for name, state in states.items():
        assert misplaced(state, shardings(state, mesh, specs)) == []
        tolerance = TOLERANCES.get(STATES[name][0], 2.0**-8)
        for a, b in zip(moved(state), moved(on_one_device()[name]), strict=True):
            atol = tolerance * max(np.abs(b).max(), 1e-30)
            np.testing.assert_allclose(a, b, rtol=0, atol=atol, err_msg=name)


@pytest.mark.eight_devices
def test_a_field_may_differ_by_device():
    """The new value differs by device, but the old one does not."""
    state = make("O1", {"w": jnp.ones(3)}, ADAM, stats=jnp.zeros(3))

    def mean_of(state, x):
        grads = jamp.scaled_grad(lambda p: (p["w"] * x).mean())(state)
        state = state.apply_gradients(grads=grads, stats=x.mean(0))
        return state.stats[None], state.skipped_steps

    x = np.arange(48.0, dtype=np.float32).reshape(16, 3)
    means, skipped = jax.jit(on_each(True, mean_of))(state, x)
    np.testing.assert_array_equal(means, x.reshape(8, 2, 3).mean(1))
    assert skipped == 0


# Data parallel under shard_map. The gradient of each device is its row.
SIXTEENTHS = np.float32([[k / 16, (k - 3) * 0.5] for k in range(8)])
ONE_INF = np.where(np.arange(8)[:, None] == 5, np.inf, SIXTEENTHS)
GRADIENTS = {
    "clean": ("O2", SIXTEENTHS),
    "large in half": ("O2", np.full((8, 2), 6e4, np.float32)),
    "one overflows": ("O2", ONE_INF),
}
WAYS = (True, False)  # check_vma


def mean_of_rows(params, x):
    return (params["w"].astype(F32) * x).sum(-1).mean()


def of_two(level="O2"):
    rule = jamp.DynamicLossScale(init_scale=1.0)
    return make(level, {"w": jnp.ones(2, F32)}, optax.sgd(0.125), loss_scale=rule)


def one_step(state, x, **options):
    """Returns the gradient of each device, and the state after a step."""
    grads = jamp.scaled_grad(mean_of_rows, **options)(state, x)
    return grads["w"][None], state.apply_gradients(grads=grads)


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.eight_devices
def test_gradients_are_the_mean_of_all_devices(name):
    level, rows = GRADIENTS[name]

    def run(check_vma, x):
        step = functools.partial(one_step, axis_name=AXES)
        return on_each(check_vma, step)(of_two(level), x)

    results = jax.jit(lambda x: [run(way, x) for way in WAYS])(rows)
    for check_vma, (grads, state) in zip(WAYS, results, strict=True):
        way = f"{check_vma=}"
        finite = name != "one overflows"
        assert state.skipped_steps == (not finite), way
        assert grads.dtype == F32
        if not finite:
            assert np.isnan(grads).all(), way
        else:
            mean = rows.astype(np.float64).mean(0)
            rtol = 0 if name == "clean" else 1e-6
            np.testing.assert_allclose(grads, [mean] * 8, rtol, err_msg=way)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.eight_devices
def test_devices_with_other_shards_skip_as_well(check_vma):
    """One shard of the params overflows on one device."""
    specs = {"parts": P("model"), "whole": P()}
    params = {"parts": np.ones(4, np.float32), "whole": np.ones((), np.float32)}
    rule = jamp.StaticLossScale(8.0, check=True)
    state = make("O2", params, optax.sgd(0.5), loss_scale=rule)
    where = jax.tree.map(lambda _: P(), state).replace(params=specs)
    where = where.replace(opt_state=where.opt_state._replace(masters=specs))

    def loss_fn(params, x):
        return (params["parts"].astype(F32) * x).sum()

    def step(state, x):
        grads = jamp.scaled_grad(loss_fn, axis_name="data")(state, x)
        state = state.apply_gradients(grads=grads)
        return state.params["parts"], jnp.broadcast_to(state.skipped_steps, (1, 1))

    mesh, batch = mesh_of(shape=(2, 4)), P("data", "model")
    run = on_each(check_vma, step, (where, batch), (P("model"), batch), mesh)
    clean = np.float32([[0, 1, 2, 3], [1, 2, 3, 4]])
    broken = np.where(np.arange(8).reshape(2, 4) == 6, np.inf, clean)
    after = [1 - 0.5 * g for g in (0.5, 1.5, 2.5, 3.5)]  # half a step along the mean
    for x, expected, skips in ((clean, after, 0), (broken, [1] * 4, 1)):
        parts, skipped = jax.jit(run)(state, x)
        np.testing.assert_array_equal(parts, expected)
        np.testing.assert_array_equal(skipped, np.full((2, 4), skips))


def traced(state, check_vma, differentiate=jamp.scaled_value_and_grad, **options):
    mesh = AbstractMesh((8,), ("d",), axis_types=(AxisType.Auto,))
    differentiate = differentiate(loss_fn, **options)

    def step(state, x, y):
        return differentiate(state, state, x, y)

    step = on_each(check_vma, step, (P(), P("d"), P("d")), P(), mesh)
    return jax.make_jaxpr(step)(state, np.ones((8, 8), "f"), np.ones((8, 4), "f"))


@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_gradients_are_summed_in_float32(level):
    state = start(mlp_params(), optax.sgd(0.1), level)
    for check_vma in WAYS:
        program = traced(state, check_vma, axis_name="d")
        operands = collectives(program)
        shapes = [x.shape for x in operands]
        for param in mlp_params().values():
            assert shapes.count(param.shape) == 1 + (param.shape == (16,))
        assert {str(x.dtype) for x in operands if x.ndim} == {"float32"}
        assert {str(x.dtype) for x in operands if not x.ndim} <= {"float32", "int32"}


@pytest.mark.parametrize("level", ["O0", "O2", "O5"])
def test_a_sum_in_half_over_replicated_params_warns(level):
    state = start(mlp_params(), optax.sgd(0.1), level)
    words = "float16|bfloat16.*JAX sums their gradients.*axis_name='d'"
    for check_vma in (True, False):
        warns = check_vma and level != "O0"
        expected = pytest.warns(jamp.PrecisionWarning, match=words)
        with expected if warns else contextlib.nullcontext():
            traced(state, check_vma, jamp.scaled_grad)


def test_an_axis_must_be_bound():
    words = "(?s)'nowhere'.*not bound.*'d'.*jax.shard_map.*jit.*leave"
    with pytest.raises(ValueError, match=words):
        traced(of_two(), True, axis_name=("d", "nowhere"))
    with pytest.raises(ValueError, match="axis_name='d' is not bound"):
        one_step(of_two(), SIXTEENTHS, axis_name="d")


AXIS = "batch"
MESH = AbstractMesh((8,), (AXIS,), axis_types=(AxisType.Auto,))
NORM = nn.BatchNorm(False, axis_name=AXIS)
MODEL = nn.Sequential([nn.Dense(8, False), NORM, nn.Dense(2, False)])


def synced_step(state, x):
    labels = jnp.zeros(len(x), int)
    loss_fn = with_stats(state.apply_fn, state.batch_stats, x, labels)
    grad = jamp.scaled_grad(loss_fn, has_aux=True, axis_name=AXIS)
    grads, batch_stats = grad(state)
    return state.apply_gradients(grads=grads, batch_stats=batch_stats)


@pytest.mark.parametrize(
    "level, check_vma", [("O1", True), ("O2", True), ("O2", False)]
)
def test_statistics_cross_devices_in_float32(level, check_vma):
    def run(variables, x):
        fields = {"apply_fn": MODEL.apply, "batch_stats": variables["batch_stats"]}
        params, tx = variables["params"], optax.sgd(0.1)
        return synced_step(jamp.initialize(params, tx, level, verbosity=0, **fields), x)

    x = np.ones((32, 4), np.float32)
    variables = MODEL.init(jax.random.key(0), x)
    mapped = on_each(check_vma, run, (P(), P(AXIS)), P(), MESH)
    operands = collectives(jax.make_jaxpr(mapped)(variables, x))
    assert (2, 8) in [x.shape for x in operands]  # means of x and of its square
    assert {str(x.dtype) for x in operands if x.ndim} == {"float32"}
