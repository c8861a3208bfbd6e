"""Train two examples and a small diffusion model at every level from three seeds.

    python -m benchmarks.convergence                # adds missing runs
    python -m benchmarks.convergence --table        # prints saved results

Each run appends a line to benchmarks/results/convergence.jsonl: the mean training loss
of the last tenth or epoch, and a figure on held-out data.
"""

import contextlib
import functools
import io
import os
import pathlib
import statistics
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jamp
from benchmarks import runs
from benchmarks.lean_images import UNet
from benchmarks.runs import Run
from tests.docs.scripts import load

RESULTS = pathlib.Path(__file__).parent / "results" / "convergence.jsonl"
NAMES = ("task", "level", "seed")
LEVELS = ("O0", "O1", "O2", "O3", "O4", "O5")
SEEDS = (0, 1, 2)
STEPS = {"digits": 440, "diffusion": 300, "char_lm": 300}


def digits(level: str, seed: int, steps: int) -> Run:
    """Trains the demo's CNN with BatchNorm on handwritten digits."""
    script = load("digits")
    options = script.parse(["--compare", "--seed", f"{seed}", "--steps", f"{steps}"])
    run = script.train(level, options)
    held_out = 100 * run["accuracy"]
    return _run(run["final_loss"], held_out, run["state"])


def char_lm(level: str, seed: int, steps: int) -> Run:
    """Trains the NNX transformer on the text of Python's `help()`."""
    script = load("char_lm")
    flags = ["--seed", f"{seed}", "--steps", f"{steps}", "--sample", "1"]
    run = script.train(level, script.parse(["--compare", *flags]))
    optimizer = run["optimizer"]
    return {
        "loss": float(run["final_loss"]),
        "held_out": run["validation"][steps],
        "skipped": int(optimizer.skipped_steps[...]),
        "scale": float(optimizer.loss_scale),
    }


def diffusion(level: str, seed: int, steps: int) -> Run:
    """Trains a U-Net to predict the noise in digits: Ho et al., arXiv:2006.11239."""
    losses, held_out, state = diffuse(level, seed, steps, optax.adam(1e-3))
    last = np.mean(np.array(losses)[-max(1, steps // 10) :])
    return _run(last, held_out, state)


def diffuse(
    level: str, seed: int, steps: int, tx: Any
) -> tuple[list[Array], Any, jamp.AmpState]:
    """Returns the loss of each step, the loss on held-out digits, and the state."""
    train, test = _images()
    model = UNet(width=32)
    init = jax.jit(model.init)
    params = init(jax.random.key(seed), (train[:1], jnp.zeros(1)))["params"]
    state = jamp.initialize(params, tx, level, apply_fn=model.apply, verbosity=0)

    def loss_fn(params: Any, images: Array, key: Array) -> Array:
        key_of_times, key_of_noise = jax.random.split(key)
        times = jax.random.uniform(key_of_times, (len(images),))
        noise = jax.random.normal(key_of_noise, images.shape)
        signal = jnp.cos(times * jnp.pi / 2)[:, None, None, None]
        mixed = signal * images + jnp.sqrt(1 - signal**2) * noise
        found = state.apply_fn({"params": params}, (mixed, 1000 * times))
        return jnp.square(found - noise).mean()

    @jax.jit
    def step(state: jamp.AmpState, key: Array) -> tuple[jamp.AmpState, Array]:
        key_of_batch, key = jax.random.split(key)
        batch = train[jax.random.randint(key_of_batch, (32,), 0, len(train))]
        loss, grads = jamp.scaled_value_and_grad(loss_fn)(state, batch, key)
        return state.apply_gradients(grads=grads), loss

    losses = []
    for key in jax.random.split(jax.random.key(seed), steps):
        state, loss = step(state, key)
        losses.append(loss)
    test_loss = jax.jit(lambda key: loss_fn(state.params, test, key))
    tested = [test_loss(key) for key in jax.random.split(jax.random.key(0), 4)]
    return losses, np.mean(tested), state


def _run(loss: Any, held_out: Any, state: jamp.AmpState) -> Run:
    counted = {"skipped": int(state.skipped_steps), "scale": float(state.loss_scale)}
    return {"loss": float(loss), "held_out": float(held_out), **counted}


@functools.cache
def _images() -> tuple[Array, Array]:
    from sklearn.datasets import load_digits

    images = load_digits().images[..., None] / 8 - 1
    images = np.random.default_rng(0).permutation(images).astype(np.float32)
    # The U-Net takes three channels: repeat the one.
    train, test = np.split(np.repeat(images, 3, axis=-1), [-360])
    return jnp.asarray(train), jnp.asarray(test)


TASKS: dict[str, Callable[[str, int, int], Run]] = {
    "digits": digits,
    "diffusion": diffusion,
    "char_lm": char_lm,
}
read = functools.partial(runs.read, RESULTS)


def run(task: str, level: str, seed: int) -> Run:
    steps = STEPS[task]
    with contextlib.redirect_stderr(io.StringIO()):  # hides the progress bars
        return {"steps": steps} | TASKS[task](level, seed, steps)


def run_missing() -> None:
    cells = [(t, lv, s) for t in TASKS for s in SEEDS for lv in LEVELS]
    runs.run_missing(RESULTS, NAMES, cells, run)


def table(found: list[Run]) -> str:
    """Returns the mean and deviation of each task's loss and held-out figure."""
    tasks = list(dict.fromkeys(run["task"] for run in found))
    lines = [f"| training, held out | {' | '.join(tasks)} |"]
    lines.append("|---" * (len(tasks) + 1) + "|")
    for level in LEVELS:
        cells = []
        for task in tasks:
            same = [r for r in found if (r["task"], r["level"]) == (task, level)]
            cells.append(
                ", ".join(_spread(same, name) for name in ("loss", "held_out"))
            )
        lines.append(f"| {level} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _spread(runs: list[Run], name: str) -> str:
    values = [run[name] for run in runs]
    digits = 2 if values[0] > 10 else 4
    mean = f"{statistics.mean(values):.{digits}f}"
    return f"{mean}±{statistics.stdev(values):.{digits}f}"


if __name__ == "__main__":
    runs.command(__doc__, run_missing, lambda: table(read()))
