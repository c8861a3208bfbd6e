"""Train three models with matmuls in fp8, and compare with bfloat16.

    python -m benchmarks.fp8            # adds missing runs
    python -m benchmarks.fp8 --table    # prints saved results

The models are a CNN with dense layers on digits, and the two language models of
`benchmarks.rounding`. They train at O5 with `fp8=Fp8(smallest=16)` and without, from
five seeds. Each run appends a line to benchmarks/results/fp8.jsonl: the mean training
loss of each tenth. The language models without fp8 come from `rounding`, except for the
one seed that the picture needs.
"""

import functools
import itertools
import pathlib
import statistics
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

import jamp
from benchmarks import rounding, runs
from benchmarks.rounding import NAMES, SEEDS, STEPS, of_linen, of_nnx, trained
from benchmarks.runs import Run
from jamp import optimizers

RESULTS = pathlib.Path(__file__).parent / "results" / "fp8.jsonl"
SETTINGS = {"O5": {}, "fp8": {"fp8": jamp.Fp8(smallest=16)}}


class CNN(nn.Module):
    """Two convolutions and three dense layers; all but the last run in fp8."""

    @nn.compact
    def __call__(self, images: jax.Array) -> jax.Array:
        x = images
        for features in (16, 32):
            x = nn.relu(nn.Conv(features, (3, 3), strides=2)(x))
        x = x.reshape(len(x), -1)
        for _ in range(2):
            x = nn.relu(nn.Dense(64)(x))
        return nn.Dense(10)(x)


def of_digits(seed: int, tx: Any, options: dict[str, Any]) -> list[jax.Array]:
    images, labels = _digits()
    model, rng = CNN(), np.random.default_rng(seed)
    params = model.init(jax.random.key(seed), images[:1])["params"]
    options = options | {"apply_fn": model.apply, "verbosity": 0}
    state = jamp.initialize(params, tx, "O5", **options)

    def batch() -> tuple[np.ndarray, np.ndarray]:
        chosen = rng.choice(len(images), 64)
        return images[chosen], labels[chosen]

    return trained(state, batch)


@functools.cache
def _digits() -> tuple[np.ndarray, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    return (images / 16).astype(np.float32).reshape(-1, 8, 8, 1), labels


MODELS = {
    "digits CNN": of_digits,
    "NNX transformer": of_nnx,
    "GPT-2-like": of_linen,
}


read = functools.partial(runs.read, RESULTS)


def run(model: str, setting: str, seed: int) -> Run:
    options = SETTINGS[setting]
    losses = MODELS[model](seed, optimizers.fused_adam(3e-4), options)
    curve = jnp.stack(losses).reshape(10, -1).mean(1)
    rounded = [round(float(x), 5) for x in curve]
    return {"steps": STEPS, "losses": rounded}


def run_missing() -> None:
    # `rounding` has the runs of the other seeds.
    known = {(model, "O5", seed) for model in rounding.MODELS for seed in SEEDS[1:]}
    cells = itertools.product(SEEDS, MODELS, SETTINGS)
    by_seed = ((model, setting, seed) for seed, model, setting in cells)
    missing = (cell for cell in by_seed if cell not in known)
    runs.run_missing(RESULTS, NAMES, missing, run)


def table(found: list[Run]) -> str:
    """Returns the mean loss of the last tenth and the largest deviation of a seed."""
    last = {(r["model"], r["setting"], r["seed"]): r["losses"][-1] for r in found}
    for run in rounding.read():
        if run["setting"] == "float32 masters":
            last.setdefault((run["model"], "O5", run["seed"]), run["loss"])
    lines = [
        "| | O5 ± between seeds | fp8 | of one seed at most |",
        "|---|---|---|---|",
    ]
    for model in MODELS:
        half, fp8 = ([last[model, s, seed] for seed in SEEDS] for s in SETTINGS)
        spread = f"{statistics.mean(half):.4f} ± {statistics.stdev(half):.4f}"
        most = max(abs(a - b) for a, b in zip(half, fp8, strict=True))
        lines.append(
            f"| {model} | {spread} | {statistics.mean(fp8):.4f} | {most:.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    runs.command(__doc__, run_missing, lambda: table(read()))
