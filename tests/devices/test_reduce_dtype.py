"""Test that `reduce_dtype="float32"` sums over batch and devices in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jamp
from benchmarks import h200
from tests.devices import test_many_devices_h200 as steps
from tests.devices.eight_devices import AXES, mesh_of
from tests.support.near import distance
from tests.support.programs import FAST, equations
from tests.support.states import SGD, make

pytestmark = pytest.mark.slow

F32, BF16 = jnp.float32, jnp.bfloat16
PARAMS = {"w": np.ones((16, 4), np.float32), "b": np.ones(4, np.float32)}
ROW = P(AXES)


def batch():
    """Returns 8 rows for each of eight devices, whose gradients cancel to a percent."""
    rng = np.random.default_rng(0)
    x = np.tile(rng.integers(1, 9, (8, 16)), (8, 1))
    c = np.tile(rng.integers(32, 120, (8, 4)), (8, 1))
    c *= np.repeat([1, -1] * 4, 8)[:, None]
    c[:8] += rng.integers(3, 8, (8, 4))  # still exact in half
    return np.float32(x), np.float32(c)


def loss_fn(params, x, c):
    return ((x @ params["w"] + params["b"]) * c).sum()


def at_once(state, x, c):
    return jamp.scaled_grad(loss_fn)(state, x, c)


def in_a_scan(state, x, c):
    """Sums four micro-batches. The first two nearly cancel the last two."""
    parts = [a.reshape(4, 2, 8, -1).swapaxes(0, 1).reshape(4, 16, -1) for a in (x, c)]
    where = NamedSharding(mesh_of(), P(None, AXES))
    parts = jax.lax.with_sharding_constraint(parts, where)

    def add(total, part):
        grads = jamp.scaled_grad(loss_fn)(state, *part)
        return jax.tree.map(jnp.add, total, grads), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape), state.params)
    return jax.lax.scan(add, zeros, parts)[0]


def by_axis_name(state, x, c):
    grad = jamp.scaled_grad(loss_fn, axis_name=AXES)
    specs = {"in_specs": (P(), ROW, ROW), "out_specs": P()}
    grads = jax.shard_map(grad, mesh=mesh_of(), **specs)(state, x, c)
    return jax.tree.map(lambda g: 8 * g, grads)


def error(level, how, **options):
    """Returns the largest error relative to the largest gradient."""
    x, c = batch()
    wanted = {"w": np.float64(x).T @ c, "b": np.float64(c).sum(0)}
    state = make(level, PARAMS, SGD, loss_scale=1.0, **options)
    where = NamedSharding(mesh_of(), ROW)
    state = jax.device_put(state, NamedSharding(mesh_of(), P()))
    call = jax.jit(how, compiler_options=FAST)
    grads = call(state, *jax.device_put((x, c), where))
    assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype(F32)}
    return max(
        abs(np.float64(grads[k]) - wanted[k]).max() / abs(wanted[k]).max()
        for k in wanted
    )


@pytest.mark.eight_devices
@pytest.mark.parametrize(
    "level, how",
    [
        ("O1", at_once),
        ("O2", at_once),
        ("O3", at_once),
        ("O5", in_a_scan),
        ("O4", by_axis_name),
    ],
    ids=lambda x: getattr(x, "__name__", x),
)
def test_gradients_that_nearly_cancel_over_devices_are_exact(level, how):
    assert error(level, how, reduce_dtype="float32") < 1e-5
    assert error(level, how) > 1e-4


def constructs(p, x):
    """Uses a loop, a checkpoint, a branch, a table, a convolution and a tied weight."""

    def body(h, _):
        return jnp.tanh(h @ p["w"] + p["b"]), None

    h, _ = jax.lax.scan(body, x @ p["w"], None, length=3)
    h = jax.checkpoint(lambda h, w: jax.nn.relu(h @ w))(h, p["v"])
    h = jax.lax.cond(h.sum() > 1e9, lambda h: h, lambda h: h @ p["w"].T, h)
    image = h.reshape(1, 8, 16, 1)
    numbers = ("NHWC", "HWIO", "NHWC")
    conv = jax.lax.conv_general_dilated
    image = conv(image, p["k"], (1, 1), "SAME", dimension_numbers=numbers)
    table = jax.jit(lambda e: e[jnp.array([0, 1, 1])])(p["e"])
    return (image**2).mean() + (table**2 * x[:3]).sum() + (p["scale"] * h).mean()


@pytest.mark.parametrize("level", ["O2", "O4"])
def test_gradients_are_float32_through_loops_and_calls(level):
    rng = np.random.default_rng(1)
    shapes = {"w": (8, 8), "b": (8,), "v": (8, 8), "e": (4, 8), "k": (3, 3, 1, 2)}
    shapes["scale"] = (1, 8)
    params = {k: np.float32(rng.normal(size=s)) / 2 for k, s in shapes.items()}
    x = np.float32(rng.normal(size=(16, 8)))

    def grads(level, **options):
        state = make(level, params, SGD, loss_scale=1.0, **options)
        call = jax.jit(jamp.scaled_value_and_grad(constructs), compiler_options=FAST)
        return call(state, x)

    loss, plain = grads(level)
    same, wide = grads(level, reduce_dtype="float32")
    assert same == loss
    half = jnp.float16 if level == "O2" else BF16
    rounded = lambda x: np.asarray(x).astype(half).astype(np.float32)  # noqa: E731
    for name in params:
        exact = rounded(wide[name])
        assert (exact != np.asarray(wide[name])).any(), name  # float32 has more digits
        spread = np.abs(exact).max()
        assert np.abs(rounded(plain[name]) - exact).max() < 0.02 * spread, name


def test_aux_values_pass_through():
    state = make("O5", PARAMS, SGD, reduce_dtype="float32")

    def with_aux(params, x, c):
        return loss_fn(params, x, c), {"name": "aux", "x": x, "none": None}

    call = jamp.scaled_value_and_grad(with_aux, has_aux=True)
    (_, aux), grads = call(state, *batch())
    assert aux["name"] == "aux" and aux["none"] is None
    np.testing.assert_array_equal(aux["x"], batch()[0])
    stepped = jax.jit(lambda s, g: s.apply_gradients(grads=g))(state, grads)
    assert stepped.params["w"].dtype == BF16


@pytest.mark.h200
@pytest.mark.standard_promotion
def test_h200s_sum_gradients_in_float32():
    def sent(**options):
        init = functools.partial(steps.start, tx=steps.ADAM(), level="O2", **options)
        state = steps.placed(jax.eval_shape(init, steps.params_on("fsdp")), "fsdp")
        batch = steps.batch_on("fsdp")
        program = h200.compile_placed(steps.train_step, state, *batch, donate=(0,))
        found = {"f16": 0, "f32": 0}
        for (opcode, dtype), size in program.collectives.items():
            if opcode in ("all-reduce", "reduce-scatter"):
                found[dtype] += size
        return found

    half, wide = sent(), sent(reduce_dtype="float32")
    assert half["f16"] >= 2 * (256 * 512 + 512 * 128)
    assert wide == {"f16": 0, "f32": half["f32"] + 2 * half["f16"]}


def test_calls_still_share_their_programs():
    """A copy per call would make JAX lower 14 programs instead of 4."""
    layer = jax.jit(lambda w, x: jnp.tanh(x @ w))

    def stacked(params, x):
        for _ in range(6):
            x = layer(params["w"], x)
        return x.sum()

    def programs(reduce_dtype):
        state = make("O5", {"w": jnp.eye(4)}, SGD, reduce_dtype=reduce_dtype)
        calls = equations(jamp.scaled_grad(stacked), ["jit"], state, jnp.ones((2, 4)))
        return len({id(call.params["jaxpr"]) for call in calls})

    assert programs("float32") == programs(None)


@pytest.mark.parametrize("level", ["O2", "O4", "O5"])
@pytest.mark.parametrize("shape", [(64, 64), (4, 16, 64), (2, 4, 8, 64)])
def test_a_cpu_contracts_several_dimensions(level, shape):
    """XLA's own kernel for CPUs is missing with a transposed result."""
    rng = np.random.default_rng(0)
    x, w = rng.normal(size=shape), rng.normal(size=(64, 128)) / 8
    state = make(level, {"w": np.float32(w)}, reduce_dtype="float32", loss_scale=1.0)
    loss_fn = lambda p, x: jnp.sin(x @ p["w"]).sum()  # noqa: E731
    grad = jax.jit(jamp.scaled_grad(loss_fn))(state, np.float32(x))["w"]
    rows = x.reshape(-1, 64)
    assert distance(grad, rows.T @ np.cos(rows @ w)) < 2.0**-6
