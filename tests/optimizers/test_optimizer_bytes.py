"""Test the tables of bytes and launches on an H200 in docs/optimizers.md."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import pytest

import jamp
from benchmarks import h200, optimizer_steps as timed, specs
from benchmarks.hlo import Program
from jamp import optimizers as jo
from tests.support.extent import more
from tests.support.pages import SHOWN

pytestmark = pytest.mark.standard_promotion  # optax promotes


def params_of(spec: specs.Spec) -> dict[str, Any]:
    shapes = zip(timed.names(spec), spec.shapes, strict=True)
    return {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes}


def compiled(spec: specs.Spec, init: Any, step: Any = timed.fused_step) -> Program:
    """Compiles a step of the state that `init` makes."""
    state = jax.eval_shape(init, params_of(spec))
    is_amp = isinstance(state, jamp.AmpState)
    grads = state.params if is_amp else state.masters | state.half
    return h200.compile_step(step, state, grads, donate=(0,))


def initialize(tx: Any, **options: Any) -> Callable[..., Any]:
    options = {"opt_level": "O5", "loss_scale": jamp.DynamicLossScale()} | options
    return functools.partial(jamp.initialize, tx=tx, verbosity=0, **options)


class Row(NamedTuple):
    """An optimizer, options of `initialize`, and bytes per parameter by backend."""

    make: Callable[..., Any]
    options: dict[str, Any]
    xla: int
    mosaic: int


ADAM = functools.partial(jo.fused_adam, weight_decay=1e-2)
CLIPPED = functools.partial(ADAM, max_grad_norm=1.0)
NARROW = functools.partial(ADAM, moment_dtype="bfloat16")
EIGHT = functools.partial(ADAM, moment_dtype="8bit")
SGD = functools.partial(jo.fused_sgd, 0.1)
SPLIT = {"store_remainder": True}
BARE = {"master_weights": False, "stochastic_rounding": True}
ROWS = {
    "`fused_adam`": Row(ADAM, {}, 30, 30),
    "`fused_adam`, static scale": Row(ADAM, {"loss_scale": 1.0}, 28, 28),
    "`fused_adam`, `store_remainder=True`": Row(ADAM, SPLIT, 28, 28),
    "the same, moments in bfloat16": Row(NARROW, SPLIT, 20, 20),
    "no masters, moments in bfloat16": Row(NARROW, BARE, 16, 16),
    "`fused_adam`, `max_grad_norm=1`": Row(CLIPPED, {}, 30, 32),
    "`fused_sgd`": Row(SGD, {}, 14, 14),
    "`fused_sgd`, momentum": Row(functools.partial(SGD, momentum=0.9), {}, 22, 22),
    "`fused_adagrad`": Row(jo.fused_adagrad, {}, 22, 22),
    "`fused_novograd`": Row(jo.fused_novograd, {}, 22, 24),
    "`fused_lamb`": Row(jo.fused_lamb, {}, 42, 46),
}


@pytest.mark.h200
@pytest.mark.parametrize("backend", ["xla", "mosaic"])
@pytest.mark.parametrize("name", ROWS)
def test_bytes_per_parameter(name, backend):
    row, spec = ROWS[name], specs.single_leaf(2**22)
    assert f"| {name} | {row.xla} | {row.mosaic} |\n" in SHOWN
    tx = row.make(backend=backend)
    program = compiled(spec, initialize(tx, **row.options))
    # A kernel only writes the half params, unless they are the upper bits of masters.
    reads_halves = backend == "xla" or row.options in (SPLIT, BARE)
    moved = program.traffic / spec.total - (0 if reads_halves else 2)
    assert moved == pytest.approx(getattr(row, backend), rel=1e-3)
    assert all(size <= 4 for size in program.copies)  # scalars
    keeps_update = name == "`fused_lamb`" and backend == "xla"
    assert program.temp < (0.01 + 4 * keeps_update) * spec.total


# XLA reads no moment and no gradient twice, except for the check of gradients.
EIGHT_BIT = {
    "the same, moments in 8 bits": (SPLIT, 16.1, 6.02),
    "no masters, moments in 8 bits": (BARE, 12.1, 4.02),
}


@pytest.mark.h200
@pytest.mark.parametrize("name", EIGHT_BIT)
def test_bytes_per_parameter_with_moments_in_8_bits(name):
    options, moved, _ = EIGHT_BIT[name]
    assert f"| {name} | {moved} | none |\n" in SHOWN
    spec = specs.Spec("two matrices", ((2048, 1024), (1024, 2048)))
    program = compiled(spec, initialize(EIGHT(), **options))
    found = program.traffic / spec.total
    assert round(found, 1) == moved and found <= moved + 0.1
    assert program.temp < 0.05 * spec.total
    # A block's scale is read in two kernels, so the new one is not in the old place.
    assert all(size <= spec.total / 64 for size in program.copies)


OTHERS = {
    "`fused_sgd` moves 17.1 bytes": functools.partial(SGD, 0.9, moment_dtype="8bit"),
    "`eight_bit(optax.adamw)` moves\n  20.2 bytes": lambda: jo.eight_bit(
        optax.adamw(1e-3)
    ),
}


@pytest.mark.h200
@pytest.mark.parametrize("words", OTHERS)
def test_others_read_moments_again_for_the_maxima_of_blocks(words):
    assert words in SHOWN
    spec = specs.Spec("one matrix", ((1024, 2048),))
    program = compiled(spec, initialize(OTHERS[words](), **SPLIT))
    assert f"{program.traffic / spec.total:.1f} bytes" in words


@pytest.mark.parametrize("name", EIGHT_BIT)
def test_bytes_held_with_moments_in_8_bits(name):
    options, _, most = EIGHT_BIT[name]
    parts = (2, 2 * (options is SPLIT), "2.02", most)
    assert f"| {name} | {' | '.join(map(str, parts))} |" in SHOWN
    spec = specs.llama_8b_shard(devices=1)
    state = jax.eval_shape(initialize(EIGHT(), **options), params_of(spec))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert round(held / spec.total, 2) == most


MANY = specs.many_leaves()
LAUNCHES = {
    "optax's Adam, compiled": (timed.optax_chain, 763),
    "`fused_adam`, XLA": (functools.partial(timed.jamp_fused, backend="xla"), 353),
    "`fused_adam`, Mosaic": (functools.partial(timed.jamp_fused, backend="mosaic"), 29),
}


IN_XLA = "`fused_adam`, XLA"  # the default on GPUs
REST = more("BUDGETS", (x for x in LAUNCHES if x != IN_XLA))


@pytest.mark.h200
@pytest.mark.parametrize("name", [IN_XLA, *REST])
def test_launches_on_300_leaves(name):
    make, launches = LAUNCHES[name]
    assert f"| {name} | {launches} |\n" in SHOWN
    it = make(MANY)
    program = compiled(MANY, it.init, it.step)
    assert program.kernels == pytest.approx(launches, rel=0.015)
    if name == IN_XLA:
        assert program.traffic <= 1.001 * timed.least_bytes(MANY)


# Bytes per parameter of params, masters and moments. COUNTERS are scale and counts.
COUNTERS = 29
HELD = {
    "float32 masters": (ADAM, {}, 2, 4, 8),
    "`store_remainder=True`": (ADAM, SPLIT, 2, 2, 8),
    "the same, moments in bfloat16": (NARROW, SPLIT, 2, 2, 4),
    "no masters, moments in bfloat16": (NARROW, BARE, 2, 0, 4),
}


@pytest.mark.parametrize("name", HELD)
def test_bytes_held_per_parameter(name):
    tx, options, *parts = HELD[name]
    assert f"| {name} | {' | '.join(map(str, parts))} | {sum(parts)} |" in SHOWN
    for spec in (specs.single_leaf(2**24), specs.many_leaves(pairs=20)):
        state = jax.eval_shape(initialize(tx(), **options), params_of(spec))
        held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
        assert held == sum(parts) * spec.total + COUNTERS


@pytest.mark.h200
def test_chain_moves_no_more_than_it_must():
    spec = specs.many_leaves(3)
    it = timed.optax_chain(spec)
    program = compiled(spec, it.init, it.step)
    assert it.bytes_moved <= program.traffic <= 1.001 * it.bytes_moved
    assert all(size <= 4 for size in program.copies)  # scalars


MUON = optax.contrib.muon(optax.cosine_decay_schedule(0.02, 300))
IN_BFLOAT16 = optax.GradientTransformation(
    MUON.init, jamp.autocast(MUON.update, "bfloat16")
)


@pytest.mark.h200
@pytest.mark.standard_promotion
def test_matmuls_in_bfloat16_move_fewer_bytes():
    params = {"kernel": jax.ShapeDtypeStruct((1024, 4096), jnp.float32)}

    def compiled(tx):
        def step(params, state, grads):
            updates, state = tx.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        state = jax.eval_shape(tx.init, params)
        return h200.compile_step(step, params, state, params, donate=(0, 1))

    half, wide = compiled(IN_BFLOAT16), compiled(MUON)
    assert half.products == {("bf16", "bf16"): 15}
    assert half.traffic < 0.78 * wide.traffic
