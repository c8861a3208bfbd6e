"""Random programs: no less accurate than torch's rules make them."""

import random

import jax.numpy as jnp
import pytest

from tests import random_programs
from tests.autocast_programs import Program, normal
from tests.torch_table import HALVES, expected, measure

# In float64 these are other programs: they name a dtype, or draw by it.
OTHERS = {"bfloat16", "float32", "noise"}
OPS = [op for op in random_programs.ALL if op not in OTHERS]
OPS = [op for op in OPS if op not in random_programs.DERIVATIVES]

pytestmark = pytest.mark.standard_promotion


def check(seed):
    rng = random.Random(f"case {seed}")
    shapes = [(rng.randint(2, 4), rng.randint(2, 4)) for _ in range(2)]
    steps = random_programs.program(seed, OPS, most=4, depth=1)

    def fn(*floats):
        values, _ = random_programs.run(steps, list(floats), [jnp.array([2, 0, 3])])
        return values[len(floats) :]

    program = Program(fn, {f"x{i}": normal(*shape) for i, shape in enumerate(shapes)})
    (row,) = measure("random", program, expected(program, [rng.choice(HALVES)]))
    assert row.verdict() == "OK", f"{row}\n{steps}"


@pytest.mark.parametrize("seed", range(4))
def test_a_few_random_programs(seed):
    check(seed)


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(4, 100))
def test_many_random_programs(seed):
    check(seed)
