"""Each example is short; and the one of FP16_Optimizer learns."""

import re

import jax
import numpy as np
import pytest

from tests.scripts import (
    EXAMPLES,
    NEEDS_EXTRA,
    load,
    optimized,
    standard_promotion,
)

SCRIPTS = sorted(EXAMPLES.glob("*.py"))

pytestmark = NEEDS_EXTRA


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_an_example_is_read_in_one_sitting(script):
    assert len(script.read_text().splitlines()) <= 200


@pytest.mark.standard_promotion
def test_fp16_optimizer_learns_from_a_scale_far_too_high(capsys):
    main = load("fp16_optimizer").main
    with optimized():
        state, stats, accuracy = main(["--init-scale", str(2.0**24), "--steps", "200"])
    stdout = capsys.readouterr().out
    assert "FP16_Optimizer processing param group 0:" in stdout
    assert stdout.count("FP16_Optimizer received float16") == 4
    assert stdout.count("FP16_Optimizer received float32") == 2  # BatchNorm's
    overflows = int(re.search(r"(\d+) overflows", stdout).group(1))
    assert overflows >= 2
    assert state.loss_scale == 2.0 ** (24 - overflows)
    assert accuracy >= 0.95
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(stats))


def test_fp16_optimizer_at_a_static_scale(capsys):
    with standard_promotion():
        load("fp16_optimizer").main(["--static-loss-scale", "128", "--steps", "2"])
    captured = capsys.readouterr()
    assert "2/2" in captured.err
    assert "loss scale 128, 0 overflows" in captured.out
