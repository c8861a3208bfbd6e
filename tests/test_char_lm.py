"""examples/char_lm.py: what it prints and draws, and that every level learns alike."""

import re
from collections import Counter
from pydoc_data.topics import topics

import jax
import numpy as np
import pytest
from flax import nnx

from tests.scripts import (
    NEEDS_EXTRA,
    load,
    png_size,
    rows,
    run_script,
    standard_promotion,
)

pytestmark = NEEDS_EXTRA

TINY = ["--width", "16", "--heads", "2", "--layers", "1", "--context", "16"]
TINY += ["--lr", "0.03", "--steps", "60", "--sample", "50"]
ALL = "\n\n".join(topics[name] for name in sorted(topics))
COUNTS = np.array(list(Counter(ALL).values()))
ENTROPY = -(COUNTS / COUNTS.sum() * np.log(COUNTS / COUNTS.sum())).sum()  # 3.2 nats


@pytest.fixture(scope="module")
def char_lm():
    return load("char_lm")


def test_a_paragraph_of_the_text_is_there_once(char_lm):
    characters, *parts = char_lm.load_text()
    text, held_out = ("".join(characters[part]) for part in parts)
    paragraphs = (text + held_out).split("\n\n")
    assert len(paragraphs) < len(ALL.split("\n\n"))  # so some were there more than once
    assert Counter(paragraphs) == Counter(set(ALL.split("\n\n")))
    assert len(held_out) == pytest.approx(0.1 * len(text + held_out), abs=1)


@pytest.fixture(scope="module")
def predict():
    return nnx.jit(lambda model, tokens: model(tokens))


@pytest.fixture(scope="module")
def untrained(char_lm):
    with standard_promotion():
        return char_lm.Transformer(9, 6, 4, 2, 1, rngs=nnx.Rngs(1))


def test_a_character_is_predicted_from_those_before_it(untrained, predict):
    before = predict(untrained, np.array([1, 2, 3, 4, 5, 6]))
    after = predict(untrained, np.array([1, 2, 3, 8, 5, 6]))
    np.testing.assert_array_equal(before[:3], after[:3])
    assert (before[3:] != after[3:]).any(-1).all()


def test_near_a_temperature_of_zero_the_most_likely_is_written(
    char_lm, untrained, predict
):
    window = np.arange(6)
    written = char_lm.sample(untrained, window, jax.random.key(0), 1e-6, 8)
    assert len(set(written.tolist())) > 2
    for token in written:
        assert token == np.argmax(predict(untrained, window)[-1])
        window = np.append(window[1:], token)


@pytest.fixture(scope="module")
def comparison(char_lm, tmp_path_factory):
    """Runs at some of the levels, of a model that compiles fast."""
    assert list(char_lm.LEVELS) == ["O0", "O1", "O2", "O4", "O5"]
    levels = {name: char_lm.LEVELS[name] for name in ("O0", "O1", "O2")}
    plot = tmp_path_factory.mktemp("plot") / "levels.png"
    with pytest.MonkeyPatch.context() as patch, standard_promotion():
        patch.setattr(char_lm, "LEVELS", levels)
        runs = char_lm.main([*TINY, "--compare", "--plot", str(plot)])
    assert png_size(plot) == (840, 840)
    return {run["level"]: run for run in runs}


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_char_lm_in_float16_learns_as_at_o0(level, comparison):
    run, baseline = comparison[level], comparison["O0"]
    # One seed: the first loss is that of the same params on the same batch, rounded.
    np.testing.assert_allclose(run["loss"][0], baseline["loss"][0], rtol=1e-4)
    assert run["loss"][0] != baseline["loss"][0]
    np.testing.assert_allclose(run["loss"], baseline["loss"], rtol=0.01)
    np.testing.assert_allclose(run["final_loss"], baseline["final_loss"], rtol=0.01)
    assert (run["scale"] == 2.0**16).all()


def test_char_lm_learns_more_than_frequencies(comparison):
    for run in comparison.values():
        assert 4 < run["loss"][0] < 6  # 104 characters, untrained: log(104) = 4.6
        assert run["final_loss"] == run["loss"][-6:].mean() < 0.9 * ENTROPY
        assert run["validation"][60] < 0.9 * ENTROPY
        assert int(run["optimizer"].skipped_steps[...]) == run["skipped"].sum() == 0
        prompt, written = run["text"]
        assert len(prompt) == 16 and prompt in ALL
        assert len(written) == 50 and set(written) <= set(ALL)
        # A fifth of the text is spaces; before training, 1 of 104 would be.
        assert Counter(written)[" "] >= 5


def test_char_lm_in_bfloat16_from_the_shell_learns_as_at_o0(comparison, tmp_path):
    flags = [*TINY, "--opt-level", "O5", "--loss-scale", "128.0", "--plot", "o5.png"]
    stdout, stderr = run_script("char_lm.py", tmp_path, *flags)
    assert "60/60" in stderr and "Warning" not in stderr
    after = stdout.split("After processing overrides")[1]
    assert re.search(r"^loss_scale *: 128.0$", after, re.MULTILINE)
    prompt, written = after.split("[sample:]")
    assert prompt.endswith(comparison["O0"]["text"][0])
    assert set(written[:50]) <= set(ALL)
    table = rows(stdout)
    assert list(table) == ["O5"]
    loss, difference, validation, skipped, scale, _ = table["O5"]
    for name, value in {"final_loss": loss, "validation": validation}.items():
        baseline = comparison["O0"][name]
        baseline = baseline[60] if name == "validation" else baseline
        assert float(value) == pytest.approx(baseline, rel=0.01)
    assert (difference, skipped, scale) == ("+0.00%", "0", "128")
    assert png_size(tmp_path / "o5.png") == (840, 840)
