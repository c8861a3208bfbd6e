"""What jamp costs the host, beside Flax alone: `python -m benchmarks.overheads`.

Ratios of processor seconds, each of runs one after the other: medians, and the least
and the most. To trace and lower is counted in calls of Python, which are the same
in each run. Prints Markdown.
"""

import functools
import gc
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")

import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jamp
from benchmarks import lean
from benchmarks.compared import CASES, zeros
from benchmarks.runs import conditions

LEAVES, ROUNDS, FIRST_CALLS, LEVELS = 1000, 25, 5, ("O1", "O2", "O4", "O5")
TX = optax.adam(1e-3)


def seconds(fn: Callable[[], Any]) -> float:
    gc.collect()  # or it falls on one of the two
    start = time.process_time()
    jax.block_until_ready(jax.tree.leaves(fn()))
    return time.process_time() - start


def ratios(ours: Callable[[], Any], plain: Callable[[], Any], rounds: int) -> str:
    ours(), plain()
    return spread([seconds(ours) / seconds(plain) for _ in range(rounds)])


def spread(found: list[float]) -> str:
    return f"{statistics.median(found):.2f} ({min(found):.2f}–{max(found):.2f})"


def states(level: str) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """What makes jamp's state, and Flax's."""
    layer = lambda: {"kernel": jnp.ones((8, 8)), "bias": jnp.ones(8)}  # noqa: E731
    params = {f"Dense_{i}": layer() for i in range(LEAVES // 2)}
    options = {"params": params, "tx": TX, "apply_fn": None}
    ours = functools.partial(jamp.initialize, opt_level=level, verbosity=0, **options)
    return ours, functools.partial(TrainState.create, **options)


def dispatch(make: Callable[[], Any]) -> Callable[[], Any]:
    """A call of a jitted function of a state."""
    count = jax.jit(lambda s: s.replace(step=s.step + 1), donate_argnums=0)
    state = count(jax.tree.map(jnp.copy, make()))

    def run() -> Any:
        nonlocal state
        state = count(state)
        return state

    return run


def step(case: lean.Case, level: str | None) -> Callable[[bool], float]:
    """Counts the calls to trace and lower a training step, or times its first call."""
    variables = jax.jit(case.model.init)(jax.random.key(0), zeros(case.inputs))
    params, stats = variables["params"], variables.get("batch_stats", {})
    batch, key = (zeros(case.inputs), zeros(case.targets)), jax.random.key(1)

    def run(timed: bool) -> float:
        jax.clear_caches()
        if level is None:
            fn = lean.float32_step(lean.forward(case, case.model))
            state: Any = (params, lean.TX.init(params), stats)
        else:
            fn, options = lean.amp_step(case), {"verbosity": 0, "batch_stats": stats}
            apply = case.model.apply
            state = jamp.initialize(params, lean.TX, level, apply_fn=apply, **options)
        jitted = jax.jit(fn)
        if not timed:
            return lean.count_calls(lambda: jitted.lower(state, batch, key))
        return seconds(lambda: jitted(state, batch, key))

    return run


def main() -> None:
    print("| to Flax alone |", " | ".join(LEVELS), "|")
    print("|---|" + "---|" * len(LEVELS))
    pairs = [states(level) for level in LEVELS]
    cells = [ratios(*pair, ROUNDS) for pair in pairs]
    print(f"| `initialize`, {LEAVES:,} leaves |", " | ".join(cells), "|", flush=True)
    cells = []
    for ours, plain in pairs:
        arrays = len(jax.tree.leaves(ours())) / len(jax.tree.leaves(plain()))
        a, b = dispatch(ours), dispatch(plain)
        found = [seconds(a) / seconds(b) / arrays for _ in range(4 * ROUNDS)]
        cells.append(spread(found))
    print("| dispatch, per array |", " | ".join(cells), "|", flush=True)
    for name, (case, _) in CASES.items():
        plain = step(case, None)
        plain(False)  # JAX keeps what it has traced of its own functions
        fewest, ours = plain(False), [step(case, level) for level in LEVELS]
        cells = []
        for fn in ours:
            fn(False)
            cells.append(f"{fn(False) / fewest:.2f}")
        print(f"| trace and lower, {name} |", " | ".join(cells), "|", flush=True)
        rounds = []
        for _ in range(FIRST_CALLS):
            alone = plain(True)
            rounds.append([fn(True) / alone for fn in ours])
        cells = [spread(list(found)) for found in zip(*rounds, strict=True)]
        print(f"| first call, {name} |", " | ".join(cells), "|", flush=True)
    about = conditions()
    print(f"\n{', '.join(f'{k} {v}' for k, v in about.items())}")


if __name__ == "__main__":
    main()
