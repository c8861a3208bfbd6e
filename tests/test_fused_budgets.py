"""What a step of fused Adam costs on an H200: kernels, bytes, memory."""

import dataclasses
import functools
import re
import time

import jax
import jax.numpy as jnp
import pytest

from benchmarks import optimizer_steps, specs
from tests import h200
from tests.hlo import Program

pytestmark = pytest.mark.h200

# The models with fewer of their equal layers, which compile in a fraction of the time;
# in their own size on a GPU's machine.
SHALLOW = (specs.bert_large(layers=2), specs.gpt2_xl(layers=2))
SHALLOW += (specs.llama_8b_shard(layers=2), specs.resnet50(blocks=(2, 1, 1, 1)))
DEEP = (specs.bert_large(), specs.gpt2_xl(), specs.llama_8b_shard())
# Lengths on both sides of the least that a kernel takes. XLA and Mosaic compile a few
# leaves a second where lengths differ, so that 10,000 take too long here.
TINY = specs.tiny_leaves(100, least=126, most=129)
# `test_optimizer_bytes.py` has the same of 300 leaves.
IN_CI = [(spec, False) for spec in (*SHALLOW, specs.single_leaf())]
IN_CI += [(SHALLOW[0], True)]
IN_FULL = [(spec, remainder) for spec in DEEP for remainder in (False, True)]
IN_FULL += [(specs.resnet50(), False)]

every_spec = pytest.mark.parametrize(
    ("spec", "remainder"),
    [
        *(pytest.param(*case, id=f"{case[0].name}, {case[1]}") for case in IN_CI),
        *(
            pytest.param(
                *case, id=f"{case[0].name} in full, {case[1]}", marks=pytest.mark.gpu
            )
            for case in IN_FULL
        ),
    ],
)


@functools.cache
def step(spec: specs.Spec, remainder: bool) -> tuple[Program, int, float]:
    """The compiled step of O5, the bytes of its state, and seconds to compile."""
    adam = optimizer_steps.jamp_fused(spec, "mosaic", remainder)
    names = optimizer_steps.names(spec)
    params = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in zip(names, spec.shapes, strict=True)
    }
    state = jax.eval_shape(adam.init, params)
    start = time.process_time()
    program = h200.compile_step(adam.step, state, state.params, donate=(0,))
    seconds = time.process_time() - start
    # The half copies are the only half arrays written in place, but for remainders.
    program = dataclasses.replace(
        program, unread=lambda shape: not remainder and shape.startswith("bf16")
    )
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return program, held, seconds


@every_spec
def test_kernels(spec, remainder):
    program, _, _ = step(spec, remainder)
    large = sum(2 * n > 2**20 for n in spec.sizes)
    assert program.kernels <= 2 * large + 24


@every_spec
def test_bytes_per_parameter(spec, remainder):
    program, _, _ = step(spec, remainder)
    least = optimizer_steps.least_bytes(spec, remainder)
    assert least <= program.traffic <= least + 0.1 * spec.total


@every_spec
def test_the_state_is_stepped_in_place(spec, remainder):
    program, held, _ = step(spec, remainder)
    # `last_step_skipped` is not read, one byte: JAX leaves that out. Of the counters,
    # of 4 bytes, one may be copied.
    assert held - 8 <= program.aliased_bytes < held
    assert max(program.copies, default=0) <= 4
    # Partial results of the check.
    assert program.temp <= spec.total / 100 + 2**16


@every_spec
def test_few_kernels_are_compiled(spec, remainder, record_property):
    program, _, seconds = step(spec, remainder)
    record_property("seconds", seconds)
    hashes = re.findall(r'kernel_hash = "((?:[^"\\]|\\.)*)"', program.text)
    large = sum(2 * n > 2**20 for n in spec.sizes)
    record_property("kernels", f"{program.kernels}, {len(set(hashes))} of Mosaic")
    # For the check and for the step each: one per size, and what is left over.
    assert len(set(hashes)) <= 2 * len(set(spec.sizes)) + len(spec.sizes) / 16 + 2
    assert len(hashes) <= len(spec.sizes) / 16 + 4 + large
    assert seconds < 60


def test_tiny_leaves_take_less_than_a_kernel_each():
    program, held, _ = step(TINY, False)
    # 20 of 100. So 10,000 leaves stay below 1.01 per leaf and 100.
    assert program.kernels <= len(TINY.shapes) / 3
    assert program.traffic <= 30.1 * TINY.total + 2**16
    assert max(program.copies, default=0) <= 4
    # The copies of leaves that XLA steps are not read: JAX drops them.
    unread = 2 * sum(n for n in TINY.sizes if n < 128)
    assert held - unread - 8 <= program.aliased_bytes < held
