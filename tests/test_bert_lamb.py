"""examples/bert_lamb.py: text and masks, accumulation, skips, and that it learns."""

from collections import Counter

import jax
import numpy as np
import pytest

import jamp
from tests.bits import assert_same_bits, copy
from tests.programs import products
from tests.scripts import (
    NEEDS_EXTRA,
    load,
    png_size,
    rows,
    run_script,
    standard_promotion,
)

pytestmark = NEEDS_EXTRA


def test_bert_prints_what_it_guesses_and_draws(tmp_path):
    flags = ["--opt-level", "O3", "--loss-scale", "128.0", "--seed", "1"]
    flags += ["--steps", "3", "-b", "2", "--accumulate", "3", "--lr", "1e-3"]
    flags += ["--layers", "0", "--hidden", "16", "--length", "64", "--plot", "bert.png"]
    stdout, stderr = run_script("bert_lamb.py", tmp_path, *flags)
    assert "3/3" in stderr
    assert "arning" not in stderr
    table = rows(stdout)
    loss, right, *_ = table["frequency"]
    assert 4 < float(loss) < np.log(1000)
    assert 0 < float(right.removesuffix("%")) < 15
    loss, right, skipped, scale, _ = table["O3"]
    assert 5 < float(loss) < 9  # untrained: about log(1000) = 6.9
    assert (skipped, scale) == ("0", "128")
    assert sum("[MASK]" in text for text in table) >= 5
    assert png_size(tmp_path / "bert.png") == (840, 960)


# Text and masks


@pytest.fixture(scope="module")
def bert():
    """bert_lamb.py with a vocabulary that compiles fast."""
    bert = load("bert_lamb")
    bert.SIZE = 120
    return bert


def test_no_paragraph_is_in_both_parts_of_the_text(monkeypatch, bert):
    monkeypatch.setattr(bert, "SIZE", 10**6)  # so that no two words are one
    words, text, held_out = bert.load_text()
    assert len(set(words)) == len(words)
    train, test = (
        [tuple(p) for p in np.split(part, np.flatnonzero(part == bert.SEP) + 1)[:-1]]
        for part in (text, held_out)
    )
    assert len(set(train)) == len(train)
    assert not set(train) & set(test)
    assert len(test) == pytest.approx(len(train) / 9, abs=1)
    assert (text != bert.UNK).all()  # only words that are held out may be unknown
    assert bert.MASK not in text and bert.MASK not in held_out


def test_the_vocabulary_is_of_the_most_frequent_words(bert):
    words, text, _ = bert.load_text()
    assert tuple(words[:3]) == bert.SPECIAL
    counts = np.bincount(text, minlength=120)[3:]
    assert len(words) == 120
    assert (np.diff(counts) <= 0).all()
    assert {"the", ",", "(", "a"} <= set(words[:20])


def test_masks_are_80_10_10_of_15_percent_of_each_row(bert):
    random = np.random.default_rng(0)
    tokens = random.integers(0, 120, (3000, 40))
    (masked, positions), targets = bert.mask(random, tokens)
    assert positions.shape == targets.shape == (3000, 6)
    assert all(len(set(row)) == 6 for row in positions)
    np.testing.assert_array_equal(np.take_along_axis(tokens, positions, 1), targets)
    assert targets.min() == 3  # no special token
    shown = np.take_along_axis(masked, positions, 1)
    other = (shown != targets) & (shown != bert.MASK)
    assert 0 < shown[other].min() and set(shown[other]) == set(range(3, 120))
    # Six standard deviations of 18,000 draws are 0.018; one word in 117 is itself.
    assert (shown == bert.MASK).mean() == pytest.approx(0.8, abs=0.02)
    assert other.mean() == pytest.approx(0.1 * 116 / 117, abs=0.015)
    # Everything else is as it was; every place is chosen as often.
    np.put_along_axis(masked, positions, targets, 1)
    np.testing.assert_array_equal(masked, tokens)
    often = np.bincount(positions.ravel(), minlength=40) / 3000
    np.testing.assert_allclose(often, 0.15, atol=0.045)


# One step of several micro-batches


@pytest.fixture(scope="module")
def batches(bert):
    random = np.random.default_rng(0)
    batch = bert.mask(random, random.integers(3, 120, (8, 14)))
    return jax.tree.map(lambda x: x.reshape(4, 2, -1), batch)


def initialize(bert, batches, layers, level):
    model = bert.BERT(layers=layers, hidden=16)
    inputs = jax.tree.map(lambda x: x[0], batches[0])
    params = jax.jit(model.init)(jax.random.key(0), *inputs)["params"]
    tx = jamp.optimizers.fused_lamb(0.01, max_grad_norm=None)
    return jamp.initialize(params, tx, level, apply_fn=model.apply, verbosity=0)


def test_accumulated_gradients_are_those_of_one_large_batch(bert, batches):
    (tokens, positions), targets = jax.tree.map(lambda x: x.reshape(8, -1), batches)

    @jax.jit
    @jax.value_and_grad
    def by_hand(params):
        logits = bert.BERT(0, 16).apply({"params": params}, tokens, positions)
        wanted = jax.nn.one_hot(targets, 120)
        return -(jax.nn.log_softmax(logits) * wanted).sum() / targets.size

    with standard_promotion():
        state = initialize(bert, batches, 0, "O0")
        loss, grads = by_hand(state.params)
        after, metrics = bert.train_step(state, batches)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-6)
    trees = after.opt_state.mu, after.opt_state.nu, grads
    for mu, nu, g in zip(*map(jax.tree.leaves, trees), strict=True):
        # LAMB's moments after one step, without clipping.
        np.testing.assert_allclose(mu, 0.1 * g, rtol=1e-4, atol=1e-7)
        np.testing.assert_allclose(nu, 0.001 * g**2, rtol=1e-3, atol=1e-10)
    assert after.step == 1


@pytest.mark.standard_promotion
@pytest.mark.parametrize("level", ["O1", "O2", "O5"])
def test_every_product_runs_in_the_precision_of_the_level(bert, batches, level):
    state = jax.eval_shape(lambda: initialize(bert, batches, 1, level))
    found = products(bert.train_step, state, batches)
    dtype = "bfloat16" if level == "O5" else "float16"
    # Query, key, value, scores, mixture, output; feed-forward; head, and decoder. Each
    # has two more backwards.
    assert len(found) == 3 * (6 + 2 + 2)
    assert {(product.lhs, product.rhs) for product in found} == {(dtype, dtype)}


# A run, at O2


@pytest.fixture(scope="module")
def run(bert, tmp_path_factory):
    flags = ["--hidden", "32", "--layers", "1", "--length", "20", "--lr", "0.01"]
    flags += ["--steps", "200", "--init-scale", str(2.0**24)]
    with standard_promotion():
        return bert.main(
            [*flags, "--plot", str(tmp_path_factory.mktemp("bert") / "bert.png")]
        )


def test_bert_learns_more_than_the_frequencies_of_words(bert, run):
    # What these are worth, counted otherwise.
    _, text, held_out = bert.load_text()
    train, test = (Counter(part[part >= 3].tolist()) for part in (text, held_out))
    likely = {word: n / train.total() for word, n in train.items()}
    loss = -sum(n * np.log(likely[word]) for word, n in test.items()) / test.total()
    right = test[max(likely, key=likely.get)] / test.total()
    # The test masks about 15 % of the words.
    assert run["baseline"][0] == pytest.approx(loss, rel=0.03)
    assert run["baseline"][1] == pytest.approx(right, abs=0.02)
    last, test_loss, test_right = run["tests"][-1]
    assert last == 200
    assert test_loss < run["baseline"][0] - 0.1
    assert test_right > run["baseline"][1] + 0.02
    assert run["loss"][-50:].mean() < run["baseline"][0] - 0.1


def test_skipped_steps_lower_the_scale_and_do_not_warm_up(run):
    skips = run["skipped"].sum()
    assert 3 <= skips <= 12
    assert run["skipped"][:3].all()
    halvings = np.cumsum(run["skipped"]) - run["skipped"]
    np.testing.assert_array_equal(run["scale"], 2.0 ** (24 - halvings))
    assert run["state"].loss_scale == 2.0 ** (24 - skips)
    assert (run["state"].step, run["state"].skipped_steps) == (200 - skips, skips)
    # A rise of 20 steps from 1 / 20, then a fall; the step after is the first at 0.
    taken = np.arange(200) - halvings
    rate = 0.01 * np.minimum((0.05 + taken * 0.95 / 20), (200 - taken) / 180)
    np.testing.assert_allclose(run["lr"], rate, rtol=1e-4)


@pytest.mark.standard_promotion
def test_an_overflow_in_one_micro_batch_skips_the_whole_step(bert, run):
    random = np.random.default_rng(0)
    batch = bert.mask(random, random.integers(3, 120, (32, 20)))
    batches = jax.tree.map(lambda x: x.reshape(4, 8, -1), batch)
    before = copy(run["state"])
    for place in (0, 2, 3):
        (tokens, positions), targets = jax.tree.map(np.copy, batches)
        tokens[place, 1, 5] = bert.SIZE  # no such word, so that its embedding is NaN
        with standard_promotion():
            after, metrics = bert.train_step(
                copy(run["state"]), ((tokens, positions), targets)
            )
        assert metrics["skipped"]
        for name in ("params", "opt_state", "step"):
            assert_same_bits(copy(getattr(after, name)), getattr(before, name))
        assert after.last_step_skipped
        assert after.skipped_steps == before.skipped_steps + 1
        assert after.loss_scale == before.loss_scale / 2
    with standard_promotion():
        after, metrics = bert.train_step(copy(run["state"]), batches)
    assert not metrics["skipped"]
    assert after.step == before.step + 1
