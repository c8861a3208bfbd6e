"""Test the cost of jamp's steps on an H200, relative to steps without jamp."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn, nnx

import jamp
import jamp.nnx
from benchmarks import h200
from benchmarks.hlo import Program
from tests.support import by_hand
from tests.support.by_jamp import amp_init, amp_step

# optax and models with `dtype=` promote, as in users' programs.
pytestmark = [pytest.mark.standard_promotion, pytest.mark.h200]

TX = optax.adam(1e-3)


WIDE = 1024  # large, so that scalars do not count
MODEL = nn.Sequential([nn.Dense(WIDE), nn.BatchNorm(False), nn.relu, nn.Dense(WIDE)])
INPUTS = jax.ShapeDtypeStruct((256, WIDE), jnp.float32)
LABELS = jax.ShapeDtypeStruct((256,), jnp.int32)


def begin(init: Any, **kwargs: Any) -> Any:
    variables = jax.eval_shape(MODEL.init, jax.random.key(0), INPUTS)
    return jax.eval_shape(functools.partial(init, tx=TX, **kwargs), variables)


def compiled(step: Any, state: Any) -> Program:
    return h200.compile_step(step, state, INPUTS, LABELS, donate=(0,))


def amp_state(level: str) -> Any:
    return begin(functools.partial(amp_init, MODEL), level=level)


@functools.cache
def amp_program(level: str) -> Program:
    return compiled(amp_step, amp_state(level))


def factors(program: Program) -> set[str]:
    return {dtype for product in program.products for dtype in product}


def test_o0_adds_no_traffic_and_two_scalar_kernels():
    state = begin(functools.partial(by_hand.plain_init, MODEL))
    amp, plain = amp_program("O0"), compiled(by_hand.plain_step, state)
    assert amp.kernels <= plain.kernels + 2
    # A scalar kernel reads and writes 4 bytes: `unskipped + 1` and a constant flag.
    assert amp.traffic <= plain.traffic + 16
    assert amp.temp <= 1.02 * plain.temp


def test_o2_costs_the_same_as_by_hand():
    half = [x if x is nn.relu else x.clone(dtype=jnp.float16) for x in MODEL.layers]
    step = by_hand.mixed_step(nn.Sequential(half), TX, jnp.float16)
    mixed = compiled(step, begin(by_hand.mixed_init, dtype=jnp.float16))
    amp = amp_program("O2")
    assert amp.traffic <= 1.01 * mixed.traffic
    # The head of a small model keeps 0.5 MB of float32 logits. Without this rule, a
    # head of 50,257 words would need 1.6 times the memory.
    assert amp.temp <= 1.08 * mixed.temp
    assert amp.kernels <= mixed.kernels
    assert factors(amp) == factors(mixed) == {"f16"}


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_a_donated_state_is_updated_in_place(level):
    amp = amp_program(level)
    leaves = jax.tree.leaves(amp_state(level))
    held = sum(x.size * x.dtype.itemsize for x in leaves)
    # The step does not read the byte `last_step_skipped`, so JAX drops it. Under a
    # dynamic scale, it does not read `hysteresis` either.
    assert amp.aliased_bytes == held - {"O0": 1, "O2": 5}[level]
    assert max(amp.copies, default=0) < 2**16


def loss_fn(model, x, y):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
    return losses.mean()


def test_an_nnx_step_costs_the_same_as_a_linen_step():
    rngs = nnx.Rngs(0)
    first, last = (nnx.Linear(WIDE, WIDE, rngs=rngs) for _ in range(2))
    model = nnx.Sequential(first, nnx.BatchNorm(WIDE, rngs=rngs), nnx.relu, last)
    model, optimizer = jamp.nnx.initialize(model, TX, "O2", verbosity=0)
    graphdef, state = nnx.split((model, optimizer))

    def step(state, x, y):
        model, optimizer = nnx.merge(graphdef, state)
        loss, grads = jamp.nnx.scaled_value_and_grad(loss_fn)(model, optimizer, x, y)
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    nnx_step, linen_step = compiled(step, state), amp_program("O2")
    assert nnx_step.traffic <= 1.01 * linen_step.traffic
    assert nnx_step.temp <= 1.01 * linen_step.temp
    assert nnx_step.kernels <= linen_step.kernels + 4
    assert factors(nnx_step) == factors(linen_step)
