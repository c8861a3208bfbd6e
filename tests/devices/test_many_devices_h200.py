"""Test that a step on eight H200s sends the bytes of plain JAX and a few scalars."""

import collections
import functools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jamp
from benchmarks import h200
from benchmarks.optimizer_steps import fused_step
from jamp import optimizers as jo
from pallas_kernels import BackendError
from tests.devices import eight_devices
from tests.devices.eight_devices import (
    F32,
    LAYOUTS,
    LEAVES,
    ROWS,
    SPECS,
    loss_fn,
    start,
)

# optax.adam promotes half params.
pytestmark = [pytest.mark.h200, pytest.mark.standard_promotion]

SIZES = {"in": (256, 512), "bias": (512,), "norm": (512,), "out": (512, 128)}
LAMB = functools.partial(jo.fused_lamb, 1e-3)  # clips by the global norm
ADAM = functools.partial(optax.adam, 1e-3)
FUSED = functools.partial(jo.fused_adam, 1e-3)
NARROW = functools.partial(FUSED, moment_dtype="bfloat16")
EIGHT = FUSED(moment_dtype="8bit")
CLIPPED = functools.partial(jo.fused_adam, 1e-3, max_grad_norm=1.0)


@functools.cache
def mesh_of(kind="Auto"):
    return eight_devices.mesh_of(kind, devices=h200.make_mesh(8).devices)


def shape(size, spec):
    return jax.ShapeDtypeStruct(size, F32, sharding=NamedSharding(mesh_of(), spec))


def placed(tree, layout):
    return eight_devices.shapes(tree, mesh_of(), LAYOUTS[layout])


def params_on(layout):
    return placed({k: jax.ShapeDtypeStruct(s, F32) for k, s in SIZES.items()}, layout)


def state_on(layout, tx, level):
    init = functools.partial(start, tx=tx, level=level)
    return placed(jax.eval_shape(init, params_on(layout)), layout)


def batch_on(layout):
    return shape((64, 256), ROWS[layout]), shape((64, 128), ROWS[layout])


def optimizer_step(state, grads):
    return state.apply_gradients(grads=grads)


def train_step(state, x, y):
    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, state, x, y)
    return state.apply_gradients(grads=grads), loss


def model_by_hand(params, x, half):
    """Computes `mlp` with explicit casts: half matmuls and a float32 bias."""
    cast = {k: p if k == "norm" else p.astype(half) for k, p in params.items()}
    hidden = (x.astype(half) @ cast["in"]).astype(F32)
    hidden = jax.nn.relu(hidden + params["bias"].astype(F32))
    spread = jnp.sqrt(hidden.var(-1, keepdims=True) + 1e-3)
    scaled = (hidden - hidden.mean(-1, keepdims=True)) / spread * cast["norm"]
    return (scaled.astype(half) @ cast["out"]).astype(F32)


def step_by_hand(masters, params, opt_state, scale, x, y, *, half):
    """Steps optax.adam under a loss scale."""

    def loss(params):
        return ((model_by_hand(params, x, half) - y) ** 2).mean() * scale

    value, grads = jax.value_and_grad(loss)(params)
    grads = jax.tree.map(lambda g: g.astype(F32) / scale, grads)
    updates, stepped = ADAM().update(grads, opt_state, masters)
    new = optax.apply_updates(masters, updates)
    half_params = jax.tree.map(lambda m, p: m.astype(p.dtype), new, params)
    return new, stepped, half_params, value


@pytest.mark.parametrize(
    ("level", "layout", "half"),
    [("O1", "tensor", jnp.float16), ("O5", "fsdp", jnp.bfloat16)],
)
def test_a_step_sends_the_bytes_of_plain_jax_and_a_flag(level, layout, half):
    state, batch = state_on(layout, ADAM(), level), batch_on(layout)
    program = h200.compile_placed(train_step, state, *batch, donate=(0,))

    masters = params = params_on(layout)
    if level == "O5":
        kept = {"norm": params["norm"]}
        params = {k: p.update(dtype=half) for k, p in params.items()} | kept
    opt_state = placed(jax.eval_shape(ADAM().init, masters), layout)
    args = (masters, params, opt_state, shape((), P()), *batch)
    plain = h200.compile_placed(functools.partial(step_by_hand, half=half), *args)

    sent, allowed = by_kind(program.collectives), by_kind(plain.collectives)
    allowed["all-reduce"] += 4  # the flag
    assert sum(allowed.values()) > 1000
    assert not sent - allowed  # O5 sends some gradients in half


def by_kind(collectives):
    """Returns the bytes of each kind of collective, in any dtype."""
    total = collections.Counter()
    for (kind, _), count in collectives.items():
        total[kind] += count
    return total


EVERYWHERE = dict.fromkeys(SPECS, P())


def fused_program(kind, tx, level="O2", grads_specs=SPECS, **options):
    """Returns the compiled step, and the bytes of the state on each device."""
    shapes = functools.partial(eight_devices.shapes, mesh=mesh_of(kind))
    params = {k: jax.ShapeDtypeStruct(s, F32) for k, (s, _) in LEAVES.items()}
    init = functools.partial(start, tx=tx, level=level, **options)
    state = shapes(jax.eval_shape(init, params), specs=SPECS)
    grads = shapes(state.params, specs=grads_specs)
    # `fused_step` needs gradients with the sharding of the params.
    step = fused_step if grads_specs is SPECS else optimizer_step
    program = h200.compile_placed(step, state, grads, donate=(0,))
    held = sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(state)
    )
    return program, held


@pytest.mark.filterwarnings("ignore:.* are float16")
@pytest.mark.parametrize(
    ("make", "options"),
    [
        (CLIPPED, {"grads_specs": EVERYWHERE}),
        (NARROW, {"level": "O5", "store_remainder": True}),
        (LAMB, {}),
    ],
    ids=["gradients are cut", "with remainders", "LAMB"],
)
def test_kernels_send_only_numbers(make, options):
    program, held = fused_program("Explicit", make(backend="mosaic"), **options)
    launches = [instruction for instruction, _ in program.launches()]
    opcodes = {i.opcode.removesuffix("-start").removesuffix("-done") for i in launches}
    assert "mosaic_gpu" in program.text
    assert opcodes <= {"custom-call", "fusion", "copy", "all-reduce"}
    # Each sharded leaf sends a few norms and flags, a replicated one nothing.
    assert ("all-reduce" in opcodes) == ("grads_specs" not in options)
    assert sum(program.collectives.values()) <= 4 * 8 * len(LEAVES)
    # The step updates in place all that it reads. JAX leaves out the unread byte
    # `last_step_skipped` and counter `hysteresis`. If the gradients are replicated, it
    # also leaves out the half params of `few`.
    assert max(program.copies, default=0) <= 4
    left_out = 5 + (2 * LEAVES["few"][0][0] // 2 if "grads_specs" in options else 0)
    assert program.aliased_bytes == held - left_out


def test_xla_steps_sharded_params_without_gathering_them():
    # XLA steps a state that was made under jit on Auto axes.
    program, _ = fused_program("Auto", LAMB())
    assert "mosaic_gpu" not in program.text
    assert {opcode for opcode, _ in program.collectives} == {"all-reduce"}
    assert sum(program.collectives.values()) <= 4 * 8 * len(LEAVES)


@pytest.mark.parametrize("tx", [EIGHT, jo.eight_bit(optax.lion(1e-3))])
def test_moments_in_8_bits_send_nothing_but_the_flag(tx):
    specs = {
        "rows": P("data"),
        "both": P("data", "model"),
        "flat": P(("data", "model")),
    }
    sizes = {"rows": (64, 512), "both": (256, 512), "flat": (2**14,)}
    place = functools.partial(eight_devices.shapes, mesh=mesh_of(), specs=specs)
    params = place({k: jax.ShapeDtypeStruct(s, F32) for k, s in sizes.items()})
    init = functools.partial(start, tx=tx, level="O5", store_remainder=True)
    state = place(jax.eval_shape(init, params))
    program = h200.compile_placed(fused_step, state, place(state.params), donate=(0,))
    assert {opcode for opcode, _ in program.collectives} == {"all-reduce"}
    assert sum(program.collectives.values()) <= 4 * 8 * len(sizes)


def test_mosaic_in_a_shard_map_refuses_gradients_that_vary():
    mesh, tx = h200.make_mesh(8), jo.fused_adam(backend="mosaic")
    init = functools.partial(start, tx=tx, level="O2")
    state = jax.eval_shape(init, {"w": jnp.ones(256)})

    def step(state, x, axis_name):
        loss_fn = lambda p, x: p["w"].sum(dtype=F32) * x.sum()  # noqa: E731
        grads = {"w": jnp.ones(256, F32) * x}
        if axis_name:
            grads = jamp.scaled_grad(loss_fn, axis_name=axis_name)(state, x)
        return state.apply_gradients(grads=grads)

    def lowered(axis_name, check_vma):
        specs = {"in_specs": (P(), P("d")), "out_specs": P(), "check_vma": check_vma}
        one = functools.partial(step, axis_name=axis_name)
        mapped = jax.jit(jax.shard_map(one, mesh=mesh, **specs))
        return mapped.lower(state, jax.ShapeDtypeStruct((8,), F32)).as_text()

    for how in (("d", True), ("d", False), (None, False)):
        assert "mosaic_gpu" in lowered(*how)
    refused = "'mosaic' cannot.*check_vma=False.*'xla'"
    with pytest.raises(BackendError, match=refused):
        lowered(None, check_vma=True)


def test_sharded_logits_are_not_gathered():
    tokens, width, words = 512, 256, 8192
    loss = optax.softmax_cross_entropy_with_integer_labels

    def step(w, x, labels):
        fn = lambda w: loss(x @ w, labels).mean()  # noqa: E731
        return jax.grad(jamp.autocast(fn, "bfloat16"))(w)

    labels = shape((tokens,), P()).update(dtype=jnp.int32)
    weight = shape((width, words), P(None, ("data", "model")))
    program = h200.compile_placed(step, weight, shape((tokens, width), P()), labels)
    # Devices send the maximum, the sum and the label's logit of each token.
    found = program.collectives
    assert {opcode for opcode, _ in found} == {"all-reduce"}
    assert sum(found.values()) <= 4 * 4 * tokens
