"""Train two language models with fewer bytes per parameter than float32 masters need.

    python -m benchmarks.rounding            # adds missing runs
    python -m benchmarks.rounding --table    # prints saved results

The models are the NNX transformer of the examples and a small GPT-2 in Linen. They
train on the text of Python's `help()` at O5 with fused Adam, from five seeds. Each run
appends a line to benchmarks/results/rounding.jsonl: the mean training loss of the last
tenth.
"""

import functools
import itertools
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from numpy.lib.stride_tricks import sliding_window_view

import jamp
import jamp.nnx
from benchmarks import runs
from benchmarks.runs import Run
from jamp import optimizers
from tests.docs.scripts import load
from tests.support import models

RESULTS = pathlib.Path(__file__).parent / "results" / "rounding.jsonl"
NAMES = ("model", "setting", "seed")
SEEDS, STEPS, BATCH, CONTEXT = range(5), 300, 16, 32
NARROW = {"moment_dtype": "bfloat16"}
NO_MASTERS = {"master_weights": False}
# Bytes per parameter, and options of Adam and jamp.initialize.
SETTINGS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "float32 masters": (14, {}, {}),
    "remainders, bfloat16 moments": (8, NARROW, {"store_remainder": True}),
    "no masters, stochastic": (6, NARROW, NO_MASTERS | {"stochastic_rounding": True}),
    "no masters, nearest": (10, {}, NO_MASTERS),
}
char_lm = load("char_lm")


def batches(seed: int) -> tuple[int, Callable[[], np.ndarray]]:
    """Returns the number of characters and a function for the next batch."""
    characters, text, _ = char_lm.load_text()
    windows, rng = sliding_window_view(text, CONTEXT + 1), np.random.default_rng(seed)
    return len(characters), lambda: rng.choice(windows, BATCH)


def of_nnx(seed: int, tx: Any, options: dict[str, Any]) -> list[jax.Array]:
    characters, batch = batches(seed)
    model = char_lm.Transformer(characters, CONTEXT, 48, 4, 2, rngs=nnx.Rngs(seed))
    model, optimizer = jamp.nnx.initialize(model, tx, "O5", verbosity=0, **options)
    step = char_lm.train_step
    return [step(model, optimizer, batch())["loss"] for _ in range(STEPS)]


def of_linen(seed: int, tx: Any, options: dict[str, Any]) -> list[jax.Array]:
    characters, batch = batches(seed)
    model = models.Transformer(characters, 48, 4, 2, CONTEXT)
    params = model.init(jax.random.key(seed), jnp.zeros((1, CONTEXT), int))["params"]
    options = options | {"apply_fn": model.apply, "verbosity": 0}
    state = jamp.initialize(params, tx, "O5", **options)

    def split() -> tuple[np.ndarray, np.ndarray]:
        tokens = batch()
        return tokens[:, :-1], tokens[:, 1:]

    return trained(state, split)


def trained(
    state: jamp.AmpState, batch: Callable[[], tuple[np.ndarray, np.ndarray]]
) -> list[jax.Array]:
    """Returns the loss of each step of a classifier."""

    def loss_fn(params, inputs, labels):
        logits = state.apply_fn({"params": params}, inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits, labels).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, *batch):
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, *batch)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(STEPS):
        state, loss = step(state, *batch())
        losses.append(loss)
    return losses


MODELS = {"NNX transformer": of_nnx, "GPT-2-like": of_linen}


read = functools.partial(runs.read, RESULTS)


def run(model: str, setting: str, seed: int) -> Run:
    _, of_adam, options = SETTINGS[setting]
    losses = MODELS[model](seed, optimizers.fused_adam(3e-4, **of_adam), options)
    loss = float(jnp.stack(losses[-STEPS // 10 :]).mean())
    return {"loss": loss, "steps": STEPS}


def run_missing() -> None:
    cells = itertools.product(SEEDS, MODELS, SETTINGS)
    by_seed = ((model, setting, seed) for seed, model, setting in cells)
    runs.run_missing(RESULTS, NAMES, by_seed, run)


def table(found: list[Run]) -> str:
    """Returns the mean loss and the largest distance from masters of the same seed."""
    loss = {(r["model"], r["setting"], r["seed"]): r["loss"] for r in found}
    lines = ["| | bytes | " + " | ".join(MODELS) + " |", "|---|---|---|---|"]
    for setting, (size, *_) in SETTINGS.items():
        cells = []
        for model in MODELS:
            losses = [loss[model, setting, seed] for seed in SEEDS]
            masters = [loss[model, "float32 masters", seed] for seed in SEEDS]
            mean, spread = statistics.mean(losses), statistics.stdev(masters)
            most = max(abs(a - b) for a, b in zip(losses, masters, strict=True))
            is_first = setting == "float32 masters"
            rest = f"± {spread:.4f}" if is_first else f"({most:.4f})"
            cells.append(f"{mean:.4f} {rest}")
        lines.append(f"| {setting} | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    runs.command(__doc__, run_missing, lambda: table(read()))
