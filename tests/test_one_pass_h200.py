"""The budgets of one pass, on steps of AmpState compiled for an H200."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import jamp
from benchmarks.optimizer_steps import fused_step, names
from benchmarks.specs import many_leaves
from jamp import optimizers as jo
from tests import h200
from tests.hlo import Program

pytestmark = [
    pytest.mark.h200,
    pytest.mark.standard_promotion,  # as in the programs that users write
]

# Of 300 leaves `test_optimizer_bytes.py` counts the launches.
SPEC = many_leaves(pairs=20)


class Budget(NamedTuple):
    """A step, and at most how many bytes per parameter it moves."""

    tx: Any
    bytes: float
    options: dict[str, Any] = {}


ADAM = functools.partial(jo.fused_adam, backend="mosaic")
SPLIT = {"opt_level": "O5", "store_remainder": True}
BUDGETS = {
    "adam": Budget(ADAM(), 30.1),
    "bfloat16": Budget(ADAM(weight_decay=0.1), 30.1, {"opt_level": "O5"}),
    "remainder": Budget(ADAM(), 28.1, SPLIT),
    "clipped": Budget(ADAM(max_grad_norm=1.0), 32.1),
    "lamb": Budget(jo.fused_lamb(backend="mosaic"), 46.1),
}
each = pytest.mark.parametrize("name", BUDGETS)


def shapes_of(budget: Budget) -> Any:
    """The state, and gradients of it, as shapes."""
    shapes = zip(names(SPEC), SPEC.shapes, strict=True)
    params = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in shapes}
    options = {"opt_level": "O2", "loss_scale": "dynamic"} | budget.options
    init = functools.partial(jamp.initialize, tx=budget.tx, verbosity=0, **options)
    state = jax.eval_shape(init, params)
    return state, state.params


@functools.cache
def program(name: str) -> Program:
    compiled = h200.compile_step(fused_step, *shapes_of(BUDGETS[name]), donate=(0,))
    # Half params beside float32 masters are written and not read; a half that is a
    # master's upper bits is read.
    halves = () if name == "remainder" else ("f16", "bf16")
    return dataclasses.replace(compiled, unread=lambda shape: shape.startswith(halves))


@each
def test_bytes_per_parameter(name):
    budget = BUDGETS[name]
    moved = program(name).traffic / SPEC.total
    # Every budget is the sum of what must be moved, and a tenth of a byte.
    assert budget.bytes - 0.11 < moved <= budget.bytes


@each
def test_launches(name):
    assert len(SPEC.shapes) == 40
    # 14 for Adam, 17 with a norm, 28 for LAMB, which needs two passes.
    assert program(name).kernels <= 30


@each
def test_the_state_is_updated_in_place(name):
    state, _ = shapes_of(BUDGETS[name])
    # The step does not read `last_step_skipped`, one byte: JAX leaves that out.
    held = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state))
    assert program(name).aliased_bytes == held - 1
    assert max(program(name).copies, default=0) <= 4


@each
def test_no_temporary_beyond_partial_results(name):
    # LAMB has two partial sums per 1024 elements.
    partials = 0.016 * SPEC.total if name == "lamb" else 0
    assert program(name).temp < 100_000 + partials
