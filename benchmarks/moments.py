"""Train three models with moments in 8 bits, and compare with float32 moments.

    python -m benchmarks.moments            # adds missing runs
    python -m benchmarks.moments --table    # prints saved results

The models are a small GPT-2 on the text of Python's `help()`, the CNN of
`benchmarks.fp8` on digits, and the U-Net of `benchmarks.convergence`. They train at O5
from three seeds. Each run appends a line to benchmarks/results/moments.jsonl: the mean
training loss of the last tenth.
"""

import contextlib
import functools
import itertools
import pathlib
import statistics
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import jamp
from benchmarks import convergence, fp8, rounding, runs
from benchmarks.runs import Run
from jamp import optimizers
from jamp.optimizers import _codes
from tests.support import models

RESULTS = pathlib.Path(__file__).parent / "results" / "moments.jsonl"
NAMES = ("model", "optimizer", "moments", "seed")
SEEDS = range(3)


def of_text(seed: int, tx: Any) -> list[jax.Array]:
    characters, batch = rounding.batches(seed)
    model = models.Transformer(characters, 64, 1, 2, rounding.CONTEXT)
    empty = jnp.zeros((1, rounding.CONTEXT), int)
    params = model.init(jax.random.key(seed), empty)["params"]
    state = jamp.initialize(params, tx, "O5", apply_fn=model.apply, verbosity=0)

    def split() -> Any:
        tokens = batch()
        return tokens[:, :-1], tokens[:, 1:]

    return rounding.trained(state, split)


MODELS: dict[str, Callable[[int, Any], list[jax.Array]]] = {
    "text": of_text,
    "digits": lambda seed, tx: fp8.of_digits(seed, tx, {}),
    "diffusion": lambda seed, tx: convergence.diffuse("O5", seed, 300, tx)[0],
}
ADAM = functools.partial(optimizers.fused_adam, 1e-3)
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "Adam": ADAM,
    "Adam, b2=0.95": functools.partial(ADAM, b2=0.95),
    "Adam, b2=0.9999": functools.partial(ADAM, b2=0.9999),
    "SGD, momentum 0.99": functools.partial(optimizers.fused_sgd, 1e-2, 0.99),
}
FORMATS = ("float32", "bfloat16", "8bit", "8bit, m to nearest", "8bit, blocks of m")
EXEMPT = "8bit, embeddings exempt"


def cells() -> Iterator[tuple[str, str, str, int]]:
    """Yields runs, the slowest last."""
    for seed in SEEDS:
        for model, moments in itertools.product(("text", "digits"), FORMATS):
            yield model, "Adam", moments, seed
        yield "text", "Adam", EXEMPT, seed
        for optimizer in [*OPTIMIZERS][1:]:
            for moments in ("float32", "8bit"):
                yield "text", optimizer, moments, seed
        for moments in ("bfloat16", "8bit, m to nearest"):
            yield "text", "SGD, momentum 0.99", moments, seed
    for seed, moments in itertools.product(SEEDS, FORMATS[:3]):
        yield "diffusion", "Adam", moments, seed


read = functools.partial(runs.read, RESULTS)


def run(model: str, optimizer: str, moments: str, seed: int) -> Run:
    make, rounds = OPTIMIZERS[optimizer], contextlib.nullcontext()
    if moments == "8bit, blocks of m":
        # Inside a chain, `eight_bit` stores m relative to the maximum of its block.
        tx = optimizers.eight_bit(optax.adamw(1e-3, weight_decay=0.0))
    elif moments == EXEMPT:
        tx = optimizers.eight_bit(make(), exempt="Embed|embed")
    else:
        tx = make(moment_dtype=moments.removesuffix(", m to nearest"))
    if "nearest" in moments:
        name = "_squares" if "SGD" in optimizer else "_first_codes"
        codes = getattr(_codes, name)
        nearest = lambda x, scale, _: codes(x, scale, _codes._NEAREST)  # noqa: E731
        rounds = mock.patch.object(_codes, name, nearest)
        jax.clear_caches()
    with rounds:
        losses = jnp.stack(MODELS[model](seed, tx))
    if "nearest" in moments:
        jax.clear_caches()
    loss = losses[-len(losses) // 10 :].mean()
    return {"loss": float(loss), "steps": len(losses)}


def run_missing() -> None:
    runs.run_missing(RESULTS, NAMES, cells(), run)


def table(found: list[Run]) -> str:
    """Returns mean losses, and the differences to float32 moments of the same seed."""
    loss = {tuple(r[name] for name in NAMES): r["loss"] for r in found}
    lines = ["| model | optimizer | moments | loss | mean, largest difference |"]
    lines.append("|---|---|---|---|---|")
    for row in dict.fromkeys(cell[:-1] for cell in cells()):
        losses = [loss[*row, seed] for seed in SEEDS if (*row, seed) in loss]
        if not losses:
            continue
        wide = [loss[*row[:2], "float32", seed] for seed in SEEDS[: len(losses)]]
        gaps = [a - b for a, b in zip(losses, wide, strict=True)]
        mean, most = statistics.mean(gaps), max(map(abs, gaps))
        shown = f"{mean:+.4f}, {most:.4f}"
        if row[-1] == "float32":
            shown = f"± {statistics.stdev(wide):.4f}" if len(wide) > 1 else ""
        loss_of = f"{statistics.mean(losses):.4f}"
        lines.append(f"| {' | '.join(row)} | {loss_of} | {shown} |")
    return "\n".join(lines)


if __name__ == "__main__":
    runs.command(__doc__, run_missing, lambda: table(read()))
