"""Trains two language models with fewer bytes per parameter than float32 masters take.

    python -m benchmarks.rounding            # adds what is not there yet
    python -m benchmarks.rounding --table    # Markdown, of what is there

The NNX transformer of the examples and a GPT-2-like one of Linen, on the text of
Python's `help()`, at O5 with fused Adam, from five seeds. Each run is a line of
benchmarks/results/rounding.jsonl: the training loss, mean of the last tenth.
"""

import argparse
import functools
import json
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
from benchmarks import convergence
from jamp import optimizers
from tests import models
from tests.docs.scripts import load

RESULTS = pathlib.Path(__file__).parent / "results" / "rounding.jsonl"
SEEDS, STEPS, BATCH, CONTEXT = range(5), 300, 16, 32
NARROW = {"moment_dtype": "bfloat16"}
NO_MASTERS = {"master_weights": False}
# Bytes per parameter, and options of Adam and of jamp.initialize.
SETTINGS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "float32 masters": (14, {}, {}),
    "remainders, bfloat16 moments": (8, NARROW, {"store_remainder": True}),
    "no masters, stochastic": (6, NARROW, NO_MASTERS | {"stochastic_rounding": True}),
    "no masters, nearest": (10, {}, NO_MASTERS),
}
char_lm = load("char_lm")


def batches(seed: int) -> tuple[int, Callable[[], np.ndarray]]:
    """How many characters there are, and what gives the next batch."""
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

    def loss_fn(params, tokens):
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels
        return losses(logits, tokens[:, 1:]).mean()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state, tokens):
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, tokens)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for _ in range(STEPS):
        state, loss = step(state, batch())
        losses.append(loss)
    return losses


MODELS = {"NNX transformer": of_nnx, "GPT-2-like": of_linen}


read = functools.partial(convergence.read, RESULTS)


def run_missing() -> None:
    done = {(run["model"], run["setting"], run["seed"]) for run in read()}
    for seed in SEEDS:
        for model, train in MODELS.items():
            for setting, (_, of_adam, options) in SETTINGS.items():
                if (model, setting, seed) in done:
                    continue
                losses = train(seed, optimizers.fused_adam(3e-4, **of_adam), options)
                loss = float(jnp.stack(losses[-STEPS // 10 :]).mean())
                run = {"model": model, "setting": setting, "seed": seed, "loss": loss}
                run |= {"steps": STEPS, "jax": jax.__version__, "device": "CPU"}
                with RESULTS.open("a") as file:
                    file.write(json.dumps(run) + "\n")
                print(*run.values(), flush=True)


def table(runs: list[dict[str, Any]]) -> str:
    """The mean loss, and the largest distance from masters' of the same seed."""
    found = {(r["model"], r["setting"], r["seed"]): r["loss"] for r in runs}
    lines = ["| | bytes | " + " | ".join(MODELS) + " |", "|---|---|---|---|"]
    for setting, (size, *_) in SETTINGS.items():
        cells = []
        for model in MODELS:
            losses = [found[model, setting, seed] for seed in SEEDS]
            masters = [found[model, "float32 masters", seed] for seed in SEEDS]
            mean, spread = statistics.mean(losses), statistics.stdev(masters)
            most = max(abs(a - b) for a, b in zip(losses, masters, strict=True))
            is_first = setting == "float32 masters"
            rest = f"± {spread:.4f}" if is_first else f"({most:.4f})"
            cells.append(f"{mean:.4f} {rest}")
        lines.append(f"| {setting} | {size} | {' | '.join(cells)} |")
    return "\n".join(lines)


def command(
    doc: str | None, run_missing: Callable[[], None], table: Callable[[], str]
) -> None:
    """Runs what is missing, but with `--table`, and prints a table."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--table", action="store_true")
    if not parser.parse_args().table:
        run_missing()
    print(table())


if __name__ == "__main__":
    command(__doc__, run_missing, lambda: table(read()))
