"""What tracing and lowering take under autocast: calls of Python, which are no luck.

Autocast traces a function twice, as the float32 program and as the new one. What steps
cost that it makes is in `test_lean`.
"""

import cProfile
import pstats

import jax
import pytest

from tests import lean

pytestmark = pytest.mark.standard_promotion


def calls(name: str, mode: str) -> int:
    """How many it takes to trace and lower a step."""

    def lower():
        step, state = lean.program(name, mode, ours=True)
        args = state, (case.inputs, case.targets), key
        profile = cProfile.Profile()
        profile.runcall(lambda: jax.jit(step).trace(*args).lower())
        return pstats.Stats(profile).total_calls  # pyright: ignore

    case, key = lean.CASES[name], jax.eval_shape(jax.random.key, 0)
    lower()  # JAX keeps what it has traced of its own functions
    return lower()


LONG = pytest.param("resnet50", marks=pytest.mark.budgets)


@pytest.mark.parametrize("name", ["gpt2", "gpt2-scan", LONG])
def test_tracing_and_lowering_take_little_more_than_half_as_long_again(name):
    ratio = calls(name, "widest") / calls(name, "plain")
    assert ratio <= 1.65, ratio
