"""Random programs: no less accurate than torch's rules make them."""

import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from tests import random_programs
from tests.autocast_programs import Program, normal
from tests.torch_table import HALVES, expected, measure

# In float64 these are other programs: they name a dtype, or draw by it.
OTHERS = {"bfloat16", "float32", "noise"}
SIMPLE = random_programs.SIMPLE.filter(lambda step: step.op not in OTHERS)
ANY = SIMPLE | random_programs.nested(SIMPLE, 3)
halves = st.sampled_from(HALVES)
shapes = st.tuples(st.integers(2, 4), st.integers(2, 4))


def check(steps, shapes, half):
    def fn(*floats):
        values, _ = random_programs.run(steps, list(floats), [jnp.array([2, 0, 3])])
        return values[len(floats) :]

    program = Program(fn, {f"x{i}": normal(*shape) for i, shape in enumerate(shapes)})
    (row,) = measure("random", program, expected(program, [half]))
    assert row.verdict() == "OK", f"{row}\n{steps}"


def on_programs(count):
    """Runs a test on so many programs."""
    few = settings(max_examples=count, suppress_health_check=list(HealthCheck))
    steps = st.lists(ANY, min_size=2, max_size=4).map(tuple)
    return lambda test: few(given(steps, st.tuples(shapes, shapes), halves)(test))


@pytest.mark.standard_promotion
@on_programs(4)
def test_a_few_random_programs(steps, shapes, half):
    check(steps, shapes, half)


@pytest.mark.sweep
@pytest.mark.standard_promotion
@on_programs(100)
def test_many_random_programs(steps, shapes, half):
    check(steps, shapes, half)
