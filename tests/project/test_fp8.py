"""Test fp8 compiled for an H200: matmuls run in cuBLAS, and weights travel in fp8."""

import collections
import functools
import itertools

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import jamp
from benchmarks import h200, lean, lean_cases
from benchmarks.h200 import CHEAP
from benchmarks.hlo import Program
from benchmarks.lean_transformers import GPT2
from tests.support.extent import more
from tests.support.programs import product_runs

pytestmark = [pytest.mark.h200, pytest.mark.standard_promotion]

# XLA would choose between cuBLAS and Triton by time on a GPU.
CUBLAS = CHEAP | {"xla_gpu_enable_triton_gemm": False}
WIDTH, LAYERS, TOKENS, FP8 = 256, 2, (4, 128), jamp.Fp8(smallest=1)
TX = optax.sgd(0.1)


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def transformer():
    """Returns shapes of kernels with up to four axes. XLA would merge q, k and v."""
    layer = {
        "qkv": shape(WIDTH, 3, 4, WIDTH // 4),
        "out": shape(4, WIDTH // 4, WIDTH),
        "up": shape(WIDTH, 4 * WIDTH),
        "down": shape(4 * WIDTH, WIDTH),
    }
    layers = [dict(layer) for _ in range(LAYERS)]
    return {"scale": shape(WIDTH), "layers": layers, "head": shape(WIDTH, WIDTH)}


def normalized(x):
    return x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-6)


def loss_fn(params, x):
    x = x * params["scale"]
    for layer in params["layers"]:
        y = normalized(x)
        q, k, v = jnp.einsum("btd,dchk->cbthk", y, layer["qkv"])
        scores = jax.nn.softmax(jnp.einsum("bqhk,bthk->bhqt", q, k))
        y = jnp.einsum("bhqt,bthk->bqhk", scores, v)
        x = x + jnp.einsum("bqhk,hkd->bqd", y, layer["out"])
        x = x + jax.nn.gelu(normalized(x) @ layer["up"]) @ layer["down"]
    return jax.nn.logsumexp(x @ params["head"], axis=-1).mean()


def step(state, x):
    loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, x)
    return state.apply_gradients(grads=grads), loss


def state_of(level="O6", fp8=FP8, params=None, **options):
    options |= {"opt_level": level, "fp8": fp8, "verbosity": 0}
    begin = functools.partial(jamp.initialize, tx=TX, **options)
    return jax.eval_shape(begin, params or transformer())


def compiled(target=h200.H200, step=step, state=None, rows=TOKENS):
    args = state or state_of(), shape(*rows, WIDTH)
    lowered = h200.lower_step(step, *args, donate=(0,), target=target)
    return Program(lowered.compile(compiler_options=CUBLAS).as_text(), 0)


def calls(program):
    """Counts cuBLAS's matmuls. fp8 ones may take their scale as an operand."""
    found = collections.Counter()
    for i in program.entry.values():
        target = i.attribute(r'custom_call_target="([^"]+)"')
        if target and "matmul" in target:
            of_fp8 = target.endswith("f8")
            scales = i.operands[2:4] if of_fp8 else ()
            found[target, any("constant" not in name for name in scales)] += 1
    return found


@pytest.mark.parametrize("target", ["H200", "B200"])
def test_chosen_matmuls_run_in_cublas(target):
    found = calls(compiled(getattr(h200, target)))
    chosen = 4 * LAYERS  # qkv, out, up and down
    scaled, unscaled = (found["__cublas$lt$matmul$f8", x] for x in (True, False))
    # XLA may leave the scale of a weight's gradient to the step that reads it.
    assert scaled + unscaled == 3 * chosen and scaled >= 2 * chosen


FIVE = ("gpt2", "gpt2-scan", "llama", "vit", "bert")
# Each takes a minute in `make budgets`. CI compiles a small model.
CASES = [("small", "H200")]
CASES += more("BUDGETS", itertools.product(FIVE, ("H200", "B200")))
SMALL = lean_cases.text(GPT2(2, width=384, scan=True), 4, 128)
# XLA would merge matmuls that share an operand.
SINGLE = CUBLAS | {"xla_gpu_dot_merger_threshold_mb": 0}


@pytest.mark.parametrize(("name", "target"), CASES)
def test_linen_models_run_the_fp8_matmuls_of_their_jaxpr(name, target):
    case = SMALL if name == "small" else lean.CASES[name]
    key = jax.eval_shape(jax.random.key, 0)
    rngs = {"params": key, "dropout": key}
    params = jax.eval_shape(case.model.init, rngs, case.inputs)["params"]
    options = {"fp8": FP8 if name == "small" else None, "apply_fn": case.model.apply}
    options["batch_stats"] = {}
    args = state_of(params=params, **options), (case.inputs, case.targets), key
    step = lean.amp_step(case)
    written = product_runs(jax.jit(step).trace(*args).jaxpr)
    lowered = h200.lower_step(step, *args, donate=(0,), target=getattr(h200, target))
    run = Program(lowered.compile(compiler_options=SINGLE).as_text(), 0).products
    names = {"bf16": "bfloat16"} | {f"f8{x}": f"float8_{x}" for x in ("e4m3fn", "e5m2")}
    assert written == {tuple(names[x] for x in pair): n for pair, n in run.items()}
    # Each has two gradients. Remat repeats some forward.
    backward = written["float8_e5m2", "float8_e4m3fn"]
    forward = written["float8_e4m3fn", "float8_e4m3fn"]
    assert 0 < forward <= backward <= 2 * forward


def loss_of(params, x):
    y = jnp.tanh((x * params["one"]) @ params["w"])
    return jnp.square(y @ params["v"]).mean()


@pytest.mark.parametrize("wrap, again", [(lambda f: f, 0), (jax.checkpoint, 1)])
def test_a_shared_weight_is_quantized_before_the_loop(wrap, again):
    trips, rows = 3, 512
    params = {"one": shape()} | {name: shape(WIDTH, WIDTH) for name in ("w", "v")}

    def summed(params, batches):
        def add(loss, x):
            return loss + loss_of(params, x), None

        return jax.lax.scan(wrap(add), 0.0, batches)[0]

    def step(state, batches):
        loss, grads = jamp.scaled_value_and_grad(summed)(state, batches)
        return state.apply_gradients(grads=grads), loss

    program = compiled(step=step, state=state_of(params=params), rows=(trips, rows))
    assert program.products["f8e4m3fn", "f8e4m3fn"] == (1 + again) * trips
    assert program.products["f8e5m2", "f8e4m3fn"] == 2 * trips
    loops = {n: i for n, i in program.entry.items() if i.opcode == "while"}
    inside = [i for i, _, _ in program._runs(loops)]
    quantized = [i.shape.partition("{")[0] for i in inside if i.opcode == "convert"]
    assert f"f8e4m3fn[{rows},{WIDTH}]" in quantized
    assert f"f8e4m3fn[{WIDTH},{WIDTH}]" not in quantized


def sent(level, fp8):
    """Returns the bytes of collectives by kind and dtype, with sharded weights."""
    mesh = h200.make_mesh(8)

    def placed(x):
        axis = next((i for i, n in enumerate(x.shape) if n % 64 == 0), None)
        spec = P() if x.ndim < 2 else P(*[None] * axis, "d")
        return x.update(sharding=NamedSharding(mesh, spec))

    state = jax.tree.map(placed, state_of(level, fp8))
    rows = NamedSharding(mesh, P("d"))
    x = jax.ShapeDtypeStruct((8, 128, WIDTH), jnp.float32, sharding=rows)
    places = jax.tree.map(lambda a: a.sharding, state), NamedSharding(mesh, P())
    jitted = jax.jit(step, donate_argnums=0, out_shardings=places)
    program = jitted.lower(state, x).compile(compiler_options=CUBLAS)
    return Program(program.as_text(), 0).collectives


def test_sharded_weights_are_gathered_in_fp8():
    half, fp8 = sent("O5", None), sent("O6", FP8)
    gathered = [
        sum(n for (kind, _), n in found.items() if kind == "all-gather")
        for found in (half, fp8)
    ]
    assert gathered[1] <= 0.55 * gathered[0]
    wide = sum(n for (_, dtype), n in fp8.items() if dtype == "f32")
    assert wide <= sum(n for (_, dtype), n in half.items() if dtype == "f32") + 64
    assert fp8["reduce-scatter", "bf16"] == half["reduce-scatter", "bf16"] > 0
