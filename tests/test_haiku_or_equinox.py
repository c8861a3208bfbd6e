"""examples/haiku_or_equinox.py: one step for both frameworks, at every level."""

import contextlib
import functools
import inspect
import io
import re

import jax
import numpy as np
import pytest

from tests.programs import products
from tests.scripts import NEEDS_EXTRA, load, run_script, standard_promotion

pytestmark = [*NEEDS_EXTRA, pytest.mark.standard_promotion]

FRAMEWORKS = "haiku", "equinox"
# The dtypes of params and of products, and the loss scale.
LEVELS = {
    "O0": ("float32", "float32", 1.0),
    "O1": ("float32", "float16", 2.0**16),
    "O2": ("float16", "float16", 2.0**16),
    "O3": ("float16", "float16", 1.0),
    "O4": ("float32", "bfloat16", 1.0),
    "O5": ("bfloat16", "bfloat16", 1.0),
}
IN_HLO = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


@pytest.fixture(scope="module")
def example():
    return load("haiku_or_equinox")


def test_equinox_by_the_shell(tmp_path):
    flags = ["--framework", "equinox", "--opt-level", "O2", "--loss-scale", "128.0"]
    flags += ["--steps", "3", "--seed", "1"]
    stdout, stderr = run_script("haiku_or_equinox.py", tmp_path, *flags)
    assert not stderr
    assert re.search(r"^loss_scale *: 128.0$", stdout, re.MULTILINE)
    products, result = stdout.splitlines()[-2:]
    assert products == "Products in" + 5 * " f16"
    assert re.fullmatch(r"Test accuracy \d+\.\d%, loss \d\.\d{3}, scale 128", result)


def test_the_example_is_as_short_as_it_can_be(example):
    assert len(inspect.getsource(example).splitlines()) <= 60


@pytest.fixture(scope="module")
def run(example):
    """Runs the example, long where it is to learn, and returns what came out, too."""

    @functools.cache
    def run(framework, level):
        steps = "300" if level in ("O0", "O2") else "2"
        flags = ["--framework", framework, "--opt-level", level, "--steps", steps]
        printed = io.StringIO()
        with standard_promotion(), contextlib.redirect_stdout(printed):
            state, accuracy = example.main(flags)
        return state, float(accuracy), printed.getvalue()

    return run


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_both_frameworks_train_at_every_level(example, run, framework, level):
    params, computed, scale = LEVELS[level]
    state, _, printed = run(framework, level)
    # Two layers; the first has no gradient of its inputs.
    assert "Products in" + 5 * f" {IN_HLO[computed]}" + "\n" in printed
    images, labels = np.zeros((4, 64), np.float32), np.zeros(4, int)
    found = products(example.train_step, state, images, labels)
    assert [(p.lhs, p.rhs) for p in found] == 5 * [(computed, computed)]
    assert [x.dtype for x in jax.tree.leaves(state.params)] == 4 * [params]
    if level in ("O2", "O5"):
        masters = jax.tree.leaves(state.opt_state.masters)
        assert [x.dtype for x in masters] == 4 * ["float32"]
    assert (state.skipped_steps, state.loss_scale) == (0, scale)
    assert jax.eval_shape(state.apply_fn, state.params, images).dtype == "float32"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_half_learns_as_well_as_float32(run, framework):
    single, single_right, _ = run(framework, "O0")
    half, half_right, _ = run(framework, "O2")
    assert single_right > 0.85  # at chance it is 0.1
    assert abs(half_right - single_right) <= 0.02
    assert half.step == single.step == 300
    # From one seed: they differ by rounding, and by no more.
    trees = half.opt_state.masters, single.params
    for a, b in zip(*map(jax.tree.leaves, trees), strict=True):
        np.testing.assert_allclose(a, b, atol=0.05)
        assert (a != b).any()
