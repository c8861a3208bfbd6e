"""BatchNorm whose batch is spread over devices: Flax's, with axis_name or under jit.

Inputs and weights have few bits: half holds them exactly.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec as P

import jamp
import jamp.nnx
from tests.eight_devices import LEVELS, collectives, misplaced
from tests.subprocesses import on_eight_devices

# Flax's layers compute in the promotion of what they are given.
pytestmark = pytest.mark.standard_promotion

AXIS = "batch"
MOMENTUM, EPS, RATE = 0.75, 1e-3, 0.125
NORM = {"axis_name": AXIS, "momentum": MOMENTUM, "epsilon": EPS}
OPTIONS = {"loss_scale": jamp.DynamicLossScale(init_scale=2.0**8), "verbosity": 0}
TX = optax.sgd(RATE, 0.9)


def numbers():
    """Weights, inputs and targets. Each device's rows have a mean of their own."""
    rng = np.random.default_rng(0)
    first, last = (rng.integers(-4, 5, size) / 4 for size in ((4, 8), (8, 2)))
    x = rng.integers(-2, 3, (32, 4)) / 2 + np.repeat(np.arange(8) / 2 - 2, 4)[:, None]
    y = rng.integers(-4, 5, (32, 2)) / 4
    return {k: np.float32(v) for k, v in dict(first=first, last=last, x=x, y=y).items()}


def oracle(first, last, x, y):
    """Batch mean and variance of all rows, and the gradients, in float64."""
    first, last, x, y = (np.float64(a) for a in (first, last, x, y))
    hidden = x @ first
    mean, var = hidden.mean(0), hidden.var(0)
    normal = (hidden - mean) / np.sqrt(var + EPS)  # its scale is 1, its bias 0
    d_out = 2 * (normal @ last - y) / y.size
    d_normal = d_out @ last.T
    centred = d_normal - d_normal.mean(0) - normal * (d_normal * normal).mean(0)
    grads = {
        "first": {"kernel": x.T @ (centred / np.sqrt(var + EPS))},
        "norm": {"scale": (d_normal * normal).sum(0), "bias": d_normal.sum(0)},
        "last": {"kernel": normal.T @ d_out},
    }
    return {"mean": mean, "var": var}, grads


def begun():
    norm = {"scale": np.ones(8, np.float32), "bias": np.zeros(8, np.float32)}
    first, last = ({"kernel": numbers()[name]} for name in ("first", "last"))
    return {"first": first, "norm": norm, "last": last}


def mean_square(out, y):
    return ((out.astype(jnp.float32) - y) ** 2).mean()


def untouched(tree):
    return tree


class Linen:
    """A state, its step, and what to look at: params, masters, moments, statistics."""

    class Model(nn.Module):
        axis_name: str | None

        @nn.compact
        def __call__(self, x):
            x = nn.Dense(8, use_bias=False, name="first")(x)
            norm = NORM | {"axis_name": self.axis_name, "use_running_average": False}
            x = nn.BatchNorm(**norm, name="norm")(x)
            return nn.Dense(2, use_bias=False, name="last")(x)

    jit, shard_map = staticmethod(jax.jit), staticmethod(jax.shard_map)

    @staticmethod
    def start(level, axis_name, place=untouched):
        stats = {"norm": {"mean": jnp.zeros(8), "var": jnp.ones(8)}}
        model = Linen.Model(axis_name)
        fields = {"apply_fn": model.apply, "batch_stats": stats}
        return jamp.initialize(place(begun()), TX, level, **fields, **OPTIONS)

    @staticmethod
    def step(state, x, y, axis_name):
        def loss_fn(params, x, y):
            variables = {"params": params, "batch_stats": state.batch_stats}
            out, new = state.apply_fn(variables, x, mutable=["batch_stats"])
            return mean_square(out, y), new["batch_stats"]

        grad = jamp.scaled_grad(loss_fn, has_aux=True, axis_name=axis_name)
        grads, batch_stats = grad(state, x, y)
        return state.apply_gradients(grads=grads, batch_stats=batch_stats)

    @staticmethod
    def look(state):
        trees = state.params, jamp.master_params(state), state.opt_state
        counts = int(state.skipped_steps), float(state.loss_scale)
        return trees, state.batch_stats["norm"], counts


class Nnx:
    """The same of a model and its optimizer, which a step changes."""

    class Model(nnx.Module):
        def __init__(self, axis_name, rngs):
            norm = NORM | {"axis_name": axis_name}
            self.first = nnx.Linear(4, 8, use_bias=False, rngs=rngs)
            self.norm = nnx.BatchNorm(8, **norm, rngs=rngs)
            self.last = nnx.Linear(8, 2, use_bias=False, rngs=rngs)

        def __call__(self, x):
            return self.last(self.norm(self.first(x)))

    jit, shard_map = staticmethod(nnx.jit), staticmethod(nnx.shard_map)

    @staticmethod
    def start(level, axis_name, place=untouched):
        model = Nnx.Model(axis_name, nnx.Rngs(0))
        nnx.update(model, place(jax.tree.map(jnp.asarray, begun())))
        return jamp.nnx.initialize(model, TX, level, **OPTIONS)

    @staticmethod
    def step(state, x, y, axis_name):
        model, optimizer = state
        grad = jamp.nnx.scaled_grad(
            lambda model, x, y: mean_square(model(x), y), axis_name=axis_name
        )
        optimizer.update(model, grad(model, optimizer, x, y))
        return state

    @staticmethod
    def look(state):
        model, optimizer = state
        params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
        trees = params, optimizer.master_params(model), nnx.as_pure(optimizer.opt_state)
        stats = nnx.to_pure_dict(nnx.state(model, nnx.BatchStat))["norm"]
        counts = optimizer.skipped_steps.get_value(), optimizer.loss_scale
        return trees, stats, tuple(map(float, counts))


each_framework = pytest.mark.parametrize("framework", [Linen, Nnx])


def mapped(framework, mesh, check_vma):
    """The step of several states where each device has its rows."""

    def step(states, x, y):
        return {k: framework.step(state, x, y, AXIS) for k, state in states.items()}

    specs = {"in_specs": (P(), P(AXIS), P(AXIS)), "out_specs": P()}
    return framework.shard_map(step, mesh=mesh, check_vma=check_vma, **specs)


# A step, and one in which one device's batch overflows


@each_framework
@pytest.mark.parametrize("way", ["replicated", "FSDP", "shard_map", "unchecked"])
@on_eight_devices
def test_eight_devices_take_the_step_of_the_whole_batch(way, framework):
    mesh = Mesh(jax.devices(), (AXIS,), axis_types=(AxisType.Auto,))
    by_hand = way in ("shard_map", "unchecked")

    def split(x):
        spec = P(*(AXIS if size == 8 else None for size in x.shape))
        return NamedSharding(mesh, spec if way == "FSDP" else P())

    def place(params):
        return jax.device_put(params, jax.tree.map(split, params))

    step = mapped(framework, mesh, check_vma=way == "shard_map")
    if not by_hand:
        step = lambda states, x, y: {  # noqa: E731
            level: framework.step(state, x, y, None) for level, state in states.items()
        }
    step = framework.jit(step)
    axis_name = AXIS if by_hand else None
    levels = ("O0", "O1", "O2", "O5") if way in ("FSDP", "shard_map") else ("O2",)
    states = {level: framework.start(level, axis_name, place) for level in levels}
    given = numbers()
    batch = jax.device_put((given["x"], given["y"]), NamedSharding(mesh, P(AXIS)))
    bad = jax.device_put(batch[0].at[13, 2].set(jnp.inf), batch[0].sharding)
    clean = step(states, *batch)
    looks = {level: framework.look(state) for level, state in clean.items()}
    after_bad = step(clean, bad, batch[1])
    if framework is Linen and way != "FSDP":  # where statistics come back in parts
        assert step._cache_size() == 1

    wanted, grads = oracle(**given)
    running = {"mean": 0, "var": MOMENTUM}
    for level, (trees, stats, counts) in looks.items():
        assert counts == (0, 2.0**8)
        # The hidden layer is exact in half; its sums are in float32.
        for name, x in wanted.items():
            expected = running[name] + (1 - MOMENTUM) * x
            np.testing.assert_allclose(stats[name], expected, rtol=1e-5, err_msg=level)
            assert stats[name].dtype == trees[0]["norm"]["scale"].dtype == jnp.float32
        eps = {"O0": 2.0**-20, "O5": 2.0**-7}.get(level, 2.0**-10)
        stepped = jax.tree.map(
            lambda a, b: (np.float64(a) - np.float64(b)) / RATE, begun(), dict(trees[1])
        )
        for a, b in zip(*map(jax.tree.leaves, (stepped, grads)), strict=True):
            limit = 4 * eps * np.abs(b).max()
            np.testing.assert_allclose(a, b, rtol=0, atol=limit, err_msg=level)
        assert misplaced(trees, jax.tree.map(split, trees)) == []

        *left, counts = framework.look(after_bad[level])
        assert counts == (1, 2.0**7)
        for a, b in zip(*map(jax.tree.leaves, (left, (trees, stats))), strict=True):
            np.testing.assert_array_equal(a, b, err_msg=level)
            assert a.dtype == b.dtype


# What crosses devices, traced for eight that need not be there

MESH = AbstractMesh((8,), (AXIS,), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize(
    ("framework", "level", "check_vma"),
    [(Linen, level, True) for level in LEVELS]
    + [(Linen, "O2", False), (Nnx, "O1", False), (Nnx, "O2", True)],
)
def test_statistics_cross_devices_in_float32(framework, level, check_vma):
    graphdef, arrays = nnx.split(framework.start(level, AXIS))

    def step(arrays, x, y):
        new = framework.step(nnx.merge(graphdef, arrays), x, y, AXIS)
        return nnx.split(new)[1]

    specs = {"in_specs": (P(), P(AXIS), P(AXIS)), "out_specs": P()}
    step = jax.shard_map(step, mesh=MESH, check_vma=check_vma, **specs)
    program = jax.make_jaxpr(step)(arrays, numbers()["x"], numbers()["y"])
    operands = collectives(program)
    assert (2, 8) in [x.shape for x in operands]  # means of x and of its square
    assert {str(x.dtype) for x in operands if x.ndim} == {"float32"}
