"""Test flash attention in Linen and NNX at each level, compiled for an H200."""

import collections
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax._src.cudnn import fused_attention_stablehlo as cudnn

import jamp
import jamp.nnx
from benchmarks import h200
from jamp._autocast import jax_internals
from tests.support.by_hand import loss_of
from tests.support.by_jamp import amp_init, amp_step

BATCH, LENGTH, HEADS, WIDTH = 4, 128, 2, 128
HEADS_SHAPE = rf"{BATCH},(?:{LENGTH},\d|\d,{LENGTH}),{WIDTH // HEADS}"


@pytest.fixture
def with_cudnn(monkeypatch):
    """Pretends that cuDNN is installed, whose version JAX checks."""
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)


def fused(query, key, value, mask=None, **options):
    """Computes attention for Flax's `attention_fn`, as the docs write it."""
    options = {"mask": mask, "implementation": "cudnn"}
    return jax.nn.dot_product_attention(query, key, value, **options)


@jamp.half_kernel
def dropping(query, key, value, **options):
    """Calls cuDNN, because JAX's public function has no dropout."""
    del options
    return cudnn.dot_product_attention(query, key, value, dropout_rate=0.1)


FNS = {"dropout": dropping}


def mask_of(option, x):
    if option == "mask":
        return nn.make_causal_mask(x[..., 0], dtype=bool)


class Linen(nn.Module):
    option: str

    @nn.compact
    def __call__(self, x):
        options = {"attention_fn": FNS.get(self.option, fused)}
        attention = nn.MultiHeadDotProductAttention(HEADS, **options)
        x, mask = nn.Dense(WIDTH)(x), mask_of(self.option, x)
        return nn.Dense(10)(x + attention(x, mask=mask))


class NNX(nnx.Module):
    def __init__(self, option, rngs):
        self.option, self.first = option, nnx.Linear(32, WIDTH, rngs=rngs)
        options = {"attention_fn": FNS.get(option, fused), "decode": False}
        options["num_kv_heads"] = 1 if option == "gqa" else HEADS
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, rngs=rngs, **options)
        self.last = nnx.Linear(WIDTH, 10, rngs=rngs)

    def __call__(self, x):
        x, mask = self.first(x), mask_of(self.option, x)
        return self.last(x + self.attention(x, mask=mask))


X = jax.ShapeDtypeStruct((BATCH, LENGTH, 32), jnp.float32)
LABELS = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)


def linen_step(level, option):
    model = Linen(option)
    init = jamp.autocast(model.init)  # which also calls the kernel
    variables = jax.eval_shape(init, jax.random.key(0), X)
    begin = functools.partial(amp_init, model, tx=optax.sgd(0.1), level=level)
    return amp_step, jax.eval_shape(begin, variables)


def nnx_step(level, option):
    @nnx.eval_shape
    def begin():
        model = NNX(option, nnx.Rngs(0))
        return jamp.nnx.initialize(model, optax.sgd(0.1), level, verbosity=0)

    graph, state = nnx.split(begin)

    def step(state, x, labels):
        def loss_fn(model):
            return loss_of(model(x), labels)

        model, optimizer = nnx.merge(graph, state)
        loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return step, state


STEPS = {"linen": linen_step, "nnx": nnx_step}
# The names that XLA gives cuDNN's programs.
KINDS = {"mask": "ScaleBiasSoftmax", "dropout": "SoftmaxDropout"}
CASES = (
    *("linen O1 mask", "linen O2 none", "linen O3 dropout"),
    *("linen O4 none", "linen O5 mask", "linen O6 none"),
    *("nnx O1 gqa", "nnx O2 mask", "nnx O3 gqa", "nnx O4 dropout"),
    *("nnx O5 gqa", "nnx O6 none"),
)


def attentions(program):
    """Returns the calls of cuDNN's attention, each with the dtypes of its arrays."""
    found = {}
    for i in program.entry.values():
        if name := i.attribute(r'custom_call_target="__cudnn\$fmha([^"]+)"'):
            shapes = " ".join([i.shape, *(program.entry[n].shape for n in i.operands)])
            found[name] = set(re.findall(rf"(\w+)\[{HEADS_SHAPE}\]", shapes))
    return found


def converted(program):
    """Counts the kernels that only convert, for each value."""
    free = {"parameter", "convert", "bitcast", "copy", "transpose", "tuple"}
    counts = collections.Counter()
    for i in program.entry.values():
        if body := i.attribute(r"calls=%?([\w.\-]+)"):
            opcodes = {inner.opcode for inner in program.computations[body].values()}
            if "convert" in opcodes and opcodes <= free:
                counts.update(i.operands)
    return counts


@pytest.mark.h200
@pytest.mark.standard_promotion
@pytest.mark.parametrize("case", CASES)
def test_a_step_calls_cudnn_in_half_and_converts_nothing_twice(case, with_cudnn):
    library, level, option = case.split()
    program = h200.compile_step(*STEPS[library](level, option), X, LABELS)
    half = {"f16"} if level in ("O1", "O2", "O3") else {"bf16"}
    kind = KINDS.get(option, "Softmax")
    assert attentions(program) == {kind: half, f"{kind}Backward": half}
    shapes = " ".join(i.shape for i in program.entry.values())
    assert not re.search(rf"f32\[{HEADS_SHAPE}\]", shapes)
    assert f"[{BATCH},{HEADS},{LENGTH},{LENGTH}]" not in shapes  # no scores
    # XLA converts the inputs and the kernels of float32 params.
    counts = converted(program)
    assert counts and set(counts.values()) == {1}


def attend(np, q, k, v, bias):
    scores = np.einsum("btnh,bsnh->bnts", q, k) / 2.0 + bias
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights = weights / weights.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", weights, v)


@pytest.mark.parametrize("half", (jnp.float16, jnp.bfloat16), ids=str)
def test_a_fully_masked_row_stays_finite(half, monkeypatch):
    def fake_cudnn(*operands, **options):
        assert {x.dtype for x in operands[:4]} == {jnp.dtype(half)}
        wide = [x.astype(jnp.float32) for x in operands[:4]]
        return attend(jnp, *wide).astype(half)

    module, name = jax_internals.cudnn_attention()
    monkeypatch.setattr(module, name, fake_cudnn)
    from jax.nn import dot_product_attention  # a name that jamp cannot replace

    x = jnp.arange(24.0).reshape(1, 3, 2, 4) / 24
    bias = jnp.where(jnp.arange(3)[:, None] > jnp.arange(3), 0.0, -3.4e38)[None, None]

    def fn(x, bias):
        return dot_product_attention(x, x, x, bias, implementation="cudnn")

    got = jamp.autocast(fn, half)(x, bias)
    x64, bias64 = np.asarray(x, np.float64), np.asarray(bias, np.float64)
    expected = attend(np, x64, x64, x64, bias64)[:, 1:]
    np.testing.assert_allclose(got[:, 1:], expected, atol=2 * jnp.finfo(half).eps)
    # The first row is fully masked, so any weights are right.
    assert (got[:, 0] >= x.min(1)).all() and (got[:, 0] <= x.max(1)).all()
    assert getattr(module, name) is fake_cudnn
