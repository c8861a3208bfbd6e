"""Measure the CPU time that jamp takes on the host, with a new process per sample.

    python -m benchmarks.host                # adds missing runs
    python -m benchmarks.host --table        # prints saved results

A run traces, lowers and compiles a step of a model on a CPU. The table shows medians,
relative to float32 without jamp. By hand means half without jamp, as in
`benchmarks.lean`.
"""

import functools
import itertools
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from benchmarks import lean, lean_cases, runs
from benchmarks.lean_images import LSTM
from benchmarks.lean_transformers import GPT2, ViT
from benchmarks.runs import Run

RESULTS = pathlib.Path(__file__).parent / "results" / "host.jsonl"
NAMES = ("model", "step", "sample")
SAMPLES = (0, 1, 2)


class MLP(nn.Module):
    dtype: DTypeLike | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        for width in (128, 128):
            x = nn.relu(nn.Dense(width, dtype=self.dtype)(x))
        return nn.Dense(10, dtype=self.dtype)(x)


ROWS = jax.ShapeDtypeStruct((64, 784), jnp.float32)
MODELS = {
    "MLP": lean_cases.Case(MLP(), ROWS, jax.ShapeDtypeStruct((64,), jnp.int32)),
    "GPT-2": lean_cases.text(GPT2(2), 2, 64),
    "ViT": lean_cases.images(ViT(2), 2, 64),
    "LSTM": lean_cases.text(LSTM(), 2, 16),
}
# Names of steps, with a mode of `lean.program` and whether jamp writes the step.
STEPS = {
    "float32": ("plain", False),
    "bfloat16 by hand": ("widest", False),
    "O1": ("O1", True),
    "O2 by hand": ("O2", False),
    "O2": ("O2", True),
    "O4": ("O4", True),
    "O5 by hand": ("O5", False),
    "O5": ("O5", True),
}


def first_call(model: str, step: str) -> Run:
    """Returns the seconds to trace and lower a step, and those to compile it too."""
    case, (mode, ours) = MODELS[model], STEPS[step]
    fn, state = lean.program(case, mode, ours)
    args = state, (case.inputs, case.targets), jax.eval_shape(jax.random.key, 0)
    # JAX's first program imports modules and starts the backend. `lean.program` has run
    # one for some of the steps.
    jax.jit(lambda x: x + 1)(1.0)
    start = time.process_time()
    lowered = jax.jit(fn, donate_argnums=0).trace(*args).lower()
    written = time.process_time()
    lowered.compile()
    compiled = time.process_time()
    return {"lower": written - start, "first call": compiled - start}


read = functools.partial(runs.read, RESULTS)


def run(model: str, step: str, sample: int) -> Run:
    """Measures in a new process, because JAX caches the traces of its functions."""
    del sample
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.host", model, step]
    return json.loads(subprocess.check_output(command, text=True).splitlines()[-1])


def run_missing() -> None:
    runs.run_missing(RESULTS, NAMES, itertools.product(MODELS, STEPS, SAMPLES), run)


def table(found: list[Run]) -> str:
    """Returns ratios to float32 of one model, or their range over the models."""
    steps = [step for step in STEPS if step != "float32"]
    lines = [f"| relative to float32 | {' | '.join(steps)} |"]
    lines.append("|---" * (len(steps) + 1) + "|")
    rows = {
        "trace and lower, four models": ("lower", MODELS),
        "first call, MLP": ("first call", ("MLP",)),
        "first call, four models": ("first call", MODELS),
    }
    for name, (field, models) in rows.items():
        cells = [_range(found, models, step, field) for step in steps]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _range(found: list[Run], models: Iterable[str], step: str, field: str) -> str:
    def median(model: str, step: str) -> float:
        same = [r[field] for r in found if (r["model"], r["step"]) == (model, step)]
        return statistics.median(same)

    ratios = [median(model, step) / median(model, "float32") for model in models]
    ends = dict.fromkeys(f"{x:.2f}" for x in (min(ratios), max(ratios)))
    return " to ".join(ends)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(first_call(*sys.argv[1:])))
    else:
        runs.command(__doc__, run_missing, lambda: table(read()))
