"""What a step sends between 8 H200s: what plain JAX sends, and a few scalars.

Not the product of all levels, layouts and optimizers: each level, each layout and each
optimizer with each layout. What O1 and O4 step is what O0 steps. Fused optimizers run
on XLA here; test_fused_sharding.py and test_kernels_sharding.py have their kernels.
"""

import collections
import functools
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import jamp
from jamp import optimizers as jo
from tests import h200
from tests.eight_levels import AXES, LAYOUTS, ROWS, loss_fn, mlp, start
from tests.hlo import Program, shape_bytes

# optax.adam promotes half params as it likes.
pytestmark = [pytest.mark.h200, pytest.mark.standard_promotion]

F32 = jnp.float32
SIZES = {"in": (256, 512), "bias": (512,), "norm": (512,), "out": (512, 128)}
HALF = {"O1": jnp.float16, "O2": jnp.float16, "O4": jnp.bfloat16, "O5": jnp.bfloat16}
LAMB = functools.partial(jo.fused_lamb, 1e-3)  # clips by the global norm
ADAM = functools.partial(optax.adam, 1e-3)
FUSED = functools.partial(jo.fused_adam, 1e-3)
CLIPPED = functools.partial(jo.fused_adam, 1e-3, max_grad_norm=1.0)


@functools.cache
def mesh():
    devices = h200.make_mesh(8).devices.reshape(4, 2)
    return Mesh(devices, AXES, axis_types=(AxisType.Auto,) * 2)


def shape(sizes, spec, dtype=F32):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh(), spec))


def placed(tree, layout):
    """Shapes of a tree; its leaves lie as the params that they belong to."""
    specs = LAYOUTS[layout]

    def leaf(path, x):
        names = [getattr(key, "key", None) for key in path]
        spec = next((specs[n] for n in names if n in specs), P())
        return shape(x.shape, spec if x.ndim else P(), x.dtype)

    return jax.tree.map_with_path(leaf, tree)


def params_on(layout):
    return placed({k: jax.ShapeDtypeStruct(s, F32) for k, s in SIZES.items()}, layout)


def state_on(layout, tx, level):
    init = functools.partial(start, tx=tx, level=level)
    return placed(jax.eval_shape(init, params_on(layout)), layout)


def batch_on(layout):
    return shape((64, 256), ROWS[layout]), shape((64, 128), ROWS[layout])


def crossings(program: Program) -> list[tuple[str, str]]:
    """Kind and shape of each array that crosses devices."""
    return [
        (i.opcode.removesuffix("-start"), computation[name].shape)
        for computation in program.computations.values()
        for i in computation.values()
        if re.match(r"(all-|collective-|reduce-sc|ragged-)(?!.*-done)", i.opcode)
        for name in i.operands
    ]


def sent(program: Program) -> collections.Counter[tuple[str, str]]:
    """Bytes by kind of collective and dtype: XLA joins arrays as it likes."""
    total: collections.Counter[tuple[str, str]] = collections.Counter()
    for opcode, printed in crossings(program):
        total[opcode, printed.partition("[")[0]] += round(shape_bytes(printed))
    return total


# The optimizer alone


def differentiate(state, x, y, **options):
    return jamp.scaled_grad(loss_fn, **options)(state, state, x, y)


def optimizer_step(state, grads):
    return state.apply_gradients(grads=grads)


STEPS = [
    ("O0", "replicated", "lamb", LAMB),
    ("O1", "replicated", "fused adam", FUSED),
    ("O2", "fsdp", "adam", ADAM),
    ("O2", "tensor", "clipped adam", CLIPPED),
    ("O3", "replicated", "adam", ADAM),
    ("O3", "tensor", "lamb", LAMB),
    ("O4", "fsdp", "lamb", LAMB),
    ("O5", "fsdp", "clipped adam", CLIPPED),
    ("O5", "tensor", "adam", ADAM),
]


@pytest.mark.parametrize(
    ("level", "layout", "name", "make"), STEPS, ids=lambda x: "" if callable(x) else x
)
def test_an_optimizer_step_sends_scalars(level, layout, name, make):
    state = state_on(layout, make(), level)
    grads = jax.eval_shape(differentiate, state, *batch_on(layout))
    grads = placed(grads, layout)
    program = h200.compile_placed(optimizer_step, state, grads, donate=(0,))
    if layout == "replicated" or name in ("adam", "fused adam"):
        assert crossings(program) == []
        return
    # A sum of squares per leaf for clipping; for LAMB of params and updates as well.
    norms = len(SIZES) * (3 if name == "lamb" else 1)
    assert sent(program).keys() == {("all-reduce", "f32")}
    assert 0 < sent(program)["all-reduce", "f32"] <= 4 * norms


# A whole step, and the same by hand


def train_step(state, x, y):
    return state.apply_gradients(grads=differentiate(state, x, y))


def model_by_hand(params, x, half, sums):
    """`mlp`, with its casts written: products in `half`, the bias added in `sums`."""
    if half is None:
        return mlp(params, x)
    cast = {k: p if k == "norm" else p.astype(half) for k, p in params.items()}
    hidden = (x.astype(half) @ cast["in"]).astype(sums)
    hidden = jax.nn.relu(hidden + params["bias"].astype(sums)).astype(F32)
    spread = jnp.sqrt(hidden.var(-1, keepdims=True) + 1e-3)
    scaled = (hidden - hidden.mean(-1, keepdims=True)) / spread * cast["norm"]
    return (scaled.astype(half) @ cast["out"]).astype(F32)


def step_by_hand(masters, params, opt_state, scale, x, y, *, half, sums, skips):
    """optax.adam under a loss scale; with `skips`, not where gradients overflowed."""

    def loss(params):
        return ((model_by_hand(params, x, half, sums) - y) ** 2).mean() * scale

    grads = jax.grad(loss)(params)
    finite = jnp.stack([jnp.isfinite(g).all() for g in grads.values()]).all()
    grads = jax.tree.map(lambda g: g.astype(F32) / scale, grads)
    updates, stepped = ADAM().update(grads, opt_state, masters)
    new = optax.apply_updates(masters, updates), stepped
    if skips:
        old = masters, opt_state
        new = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    return new, jax.tree.map(lambda m, p: m.astype(p.dtype), new[0], params)


def compiled_by_hand(level, layout, skips):
    params, half = params_on(layout), HALF.get(level)
    masters, sums = params, F32
    if level in ("O2", "O5"):
        sums, kept = half, {"norm": params["norm"]}
        params = {k: p.update(dtype=half) for k, p in params.items()} | kept
    opt_state = placed(jax.eval_shape(ADAM().init, masters), layout)
    step = functools.partial(step_by_hand, half=half, sums=sums, skips=skips)
    args = (masters, params, opt_state, shape((), P()), *batch_on(layout))
    return h200.compile_placed(step, *args)


@pytest.mark.parametrize(
    ("level", "layout"),
    [
        ("O0", "fsdp"),
        ("O1", "tensor"),
        ("O2", "fsdp"),
        ("O4", "replicated"),
        ("O5", "tensor"),
    ],
)
def test_a_step_sends_what_plain_jax_sends_and_a_flag(level, layout):
    state = state_on(layout, ADAM(), level)
    program = h200.compile_placed(train_step, state, *batch_on(layout), donate=(0,))
    # A vector's gradient is scattered only where nothing but the update reads it. So
    # with FSDP a check changes what is sent, whoever writes it.
    checked = layout == "fsdp"
    by_hand = sent(compiled_by_hand(level, layout, skips=checked))
    flag = {("all-reduce", "pred"): 1} if layout != "replicated" else {}
    assert sum(by_hand.values()) > 1000
    assert sent(program) == (
        by_hand if checked else by_hand + collections.Counter(flag)
    )
    assert sent(program)["all-reduce", "pred"] == len(flag)


def test_gradients_of_shard_map_are_summed_in_float32():
    def step(state, x, y):
        grads = differentiate(state, x, y, axis_name=AXES, predivide=8.0)
        return state.apply_gradients(grads=grads)

    mapped = jax.shard_map(
        step, mesh=mesh(), in_specs=(P(), P(AXES), P(AXES)), out_specs=P()
    )
    state = state_on("replicated", FUSED(), "O2")
    args = (state, *batch_on("replicated"))
    program = h200.compile_placed(mapped, *args, donate=(0,))
    gradients = 4 * sum(p.size for p in params_on("replicated").values())
    assert sent(program) == {("all-reduce", "f32"): gradients}
