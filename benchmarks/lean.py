"""Compare the cost of training steps with models written in half, without a device.

    python -m benchmarks.lean                  # all models on an H200, both modes
    python -m benchmarks.lean gpt2 vit --modes narrowest,O5
    python -m benchmarks.lean gpt2 --tpu       # on a TPU v5e; needs libtpu
    python -m benchmarks.lean --table          # prints saved results

The script prints traffic, temporary memory and kernels per model and mode, relative to
the model by hand, with Adam. By hand means `dtype=bfloat16` with float32 params for the
two modes of autocast, float16 params with masters for O2, and bfloat16 params with
masters for O5. O6 is compared with O5, and a mode such as "fused O2", which steps with
`jamp.optimizers.fused_adam`, with the same level and `optax.adam`. Copies count as
bytes and not as kernels, because the number of donated params that XLA copies depends
on the modules' names (BERT by hand: 2 or 17). benchmarks/results/lean.json holds the
figures and the last commit that changed autocast. The script reads earlier programs
from it or from a temporary folder.
"""

import argparse
import cProfile
import functools
import hashlib
import importlib.metadata
import json
import os
import pathlib
import pstats
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike

import jamp
from benchmarks import h200, hlo, tpu
from benchmarks.lean_cases import ALL, CASES, Case
from benchmarks.runs import commit_of
from jamp.optimizers import fused_adam
from tests.support import by_hand

TX = optax.adam(1e-3)
LEVELS = ("O1", "O2", "O4", "O5", "O6")
FUSED = tuple(f"fused {level}" for level in LEVELS[:4])
MODES = ("widest", "narrowest", "O2", "O5", "O6", *FUSED)
HALF = {"O2": jnp.float16, "O5": jnp.bfloat16, "O6": jnp.bfloat16}
FOLDER = pathlib.Path(tempfile.gettempdir(), "jamp-lean")
RESULTS = pathlib.Path(__file__).parent / "results" / "lean.json"
TARGETS = {"H200": h200, "v5e": tpu}

type Entry = dict[str, Any]


class Measured(NamedTuple):
    """The traffic, temporary memory and kernels of a program."""

    traffic: float
    temp: float
    kernels: float

    def over(self, other: "Measured") -> "Measured":
        return Measured(*(a / b for a, b in zip(self, other, strict=True)))


# Steps.


def forward(case: Case, model: nn.Module, apply: Callable | None = None) -> Callable:
    """Returns `(params, stats, batch, key) -> loss, stats`."""

    def loss_fn(params, stats, batch, key):
        variables = {"params": params, "batch_stats": stats}
        inputs, targets = batch
        options = {"mutable": ["batch_stats"], "rngs": {"dropout": key}}
        out, new = (apply or model.apply)(variables, inputs, **options)
        return case.loss(out, targets), new.get("batch_stats", {})

    return loss_fn


def float32_step(loss_fn: Callable) -> Callable:
    """Returns a step on float32 params."""

    def step(state, batch, key):
        params, opt_state, stats = state
        grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = grad(params, stats, batch, key)
        updates, opt_state = TX.update(grads, opt_state, params)
        return (optax.apply_updates(params, updates), opt_state, stats), loss

    return step


def masters_step(loss_fn: Callable, dtype: DTypeLike) -> Callable:
    """Returns a step on half params with masters, and a dynamic scale in float16."""
    scaled = dtype == jnp.float16
    update = by_hand.scaled_update if scaled else by_hand.unscaled_update

    def step(state: by_hand.MixedState, batch, key):
        loss_of = lambda params: loss_fn(params, state.batch_stats, batch, key)  # noqa: E731
        return update(state, loss_of, TX, dtype)

    return step


def amp_step(case: Case) -> Callable:
    def step(state: jamp.AmpState, batch, key):
        def loss_fn(params):
            loss_of = forward(case, case.model, state.apply_fn)
            return loss_of(params, state.batch_stats, batch, key)

        grad = jamp.scaled_value_and_grad(loss_fn, has_aux=True)
        (loss, stats), grads = grad(state)
        return state.apply_gradients(grads=grads, batch_stats=stats), loss

    return step


def amp_program(
    case: Case, level: str, tx: Any = TX, loss_scale: float | None = None
) -> tuple[Callable, Any]:
    """Returns the step of an AmpState and its state."""

    def init():
        variables = jax.tree.map(
            lambda x: jnp.ones(x.shape, x.dtype), variables_of(case)
        )
        params, stats = variables["params"], variables.get("batch_stats", {})
        options = {"apply_fn": case.model.apply, "verbosity": 0, "batch_stats": stats}
        return jamp.initialize(params, tx, level, loss_scale=loss_scale, **options)

    return amp_step(case), jax.eval_shape(init)


def variables_of(case: Case) -> Any:
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    return jax.eval_shape(case.model.init, rngs, case.inputs)


def program(case: Case, mode: str, ours: bool) -> tuple[Callable, Any]:
    """Returns a step and its state, by jamp or of the program to compare with."""
    if ours and mode in LEVELS:
        return amp_program(case, mode)
    if mode == "unchecked O5":
        return amp_program(case, "O5", loss_scale=1)
    if mode in FUSED:
        tx = fused_adam(1e-3) if ours else TX
        return amp_program(case, mode.removeprefix("fused "), tx)
    if mode == "O6" and not ours:
        return amp_program(case, "O5")
    model, variables = case.model, variables_of(case)
    params, stats = variables["params"], variables.get("batch_stats", {})
    if mode not in HALF:
        state = (params, jax.eval_shape(TX.init, params), stats)
        if mode == "plain":
            return float32_step(forward(case, model)), state
        if ours:
            loss_fn = jamp.autocast(forward(case, model), "bfloat16", promote=mode)
        else:
            loss_fn = forward(case, model.clone(dtype=jnp.bfloat16))
        return float32_step(loss_fn), state
    init = functools.partial(by_hand.mixed_init, tx=TX, dtype=HALF[mode])
    loss_fn = forward(case, model.clone(dtype=HALF[mode]))
    return masters_step(loss_fn, HALF[mode]), jax.eval_shape(init, variables)


# Costs.


def measure(name: str, mode: str, ours: bool, on_tpu: bool = False) -> Measured:
    """Returns the cost of a step by jamp or by hand."""
    target = "v5e" if on_tpu else "H200"
    return cost_of(name, mode, ours, target)


@functools.lru_cache(maxsize=2)
def lower(name: str, mode: str, ours: bool, target: str) -> Any:
    """Lowers a step by jamp or by hand."""
    case = ALL[name]
    step, state = program(case, mode, ours)
    key = jax.eval_shape(jax.random.key, 0)
    args = (state, (case.inputs, case.targets), key)
    return TARGETS[target].lower_step(step, *args, donate=(0,))


def cost_of(name: str, mode: str, ours: bool, target: str) -> Measured:
    """Compiles a step, or looks up its cost."""
    lowered = lower(name, mode, ours, target)
    file = FOLDER / f"{digest(lowered, target)}.json"
    if not file.exists():
        if target == "v5e":
            step = f"lean.lower({name!r}, {mode!r}, {ours}, {target!r})"
            found = tpu.Compiled(f"from benchmarks import lean; {step}.compile()")
        else:
            found = h200.compile_lowered(lowered)
        FOLDER.mkdir(exist_ok=True)
        kernels = found.kernels - len(found.copies)
        file.write_text(json.dumps([found.traffic, found.temp, kernels]))
    return Measured(*json.loads(file.read_text()))


def digest(lowered: Any, target: str) -> str:
    """Returns equal keys for equal programs with equal compilers and counts."""
    counters = (tpu, hlo) if target == "v5e" else (hlo,)
    counted = [pathlib.Path(counter.__file__).read_text() for counter in counters]
    options = (jax.__version__, str(target == "v5e"), str(h200.CHEAP))
    parts = ("no copies", *options, *counted, lowered.as_text())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def count_calls(fn: Callable[[], Any]) -> int:
    """Counts the Python calls of a call, which are the same in each run."""
    profile = cProfile.Profile()
    profile.runcall(fn)
    return pstats.Stats(profile).total_calls  # pyright: ignore


# Results.


def conditions(target: str) -> Entry:
    """The conditions of the figures; `commit` is the last that changed autocast."""
    commit = commit_of("jamp/_autocast")
    version = importlib.metadata.version("jax")
    return {"jax": version, "target": target, "commit": commit}


def read() -> list[Entry]:
    return json.loads(RESULTS.read_text())


def key_of(entry: Entry) -> tuple[str, str, str]:
    return entry["model"], entry["mode"], entry["target"]


def save(name: str, mode: str, target: str) -> Entry:
    """Measures a step and the step by hand, and saves the ratios.

    Equal programs keep their figures, and get the conditions of today.
    """
    pair = [lower(name, mode, ours, target) for ours in (True, False)]
    programs = " ".join(digest(lowered, target)[:8] for lowered in pair)
    found = {key_of(entry): entry for entry in read()}.get((name, mode, target), {})
    if found.get("programs") != programs:
        ours, hand = (cost_of(name, mode, x, target) for x in (True, False))
        figures = {k: round(x, 4) for k, x in ours.over(hand)._asdict().items()}
        size = {"GB by hand": round(hand.traffic / 1e9, 1), "programs": programs}
        found = {"model": name, "mode": mode} | figures | size
    entry = found | conditions(target)
    entries = {key_of(entry): entry for entry in [*read(), entry]}
    order = [(n, m, t) for n in ALL for t in TARGETS for m in MODES]
    lines = [json.dumps(entries[key]) for key in order if key in entries]
    RESULTS.write_text("[\n" + ",\n".join(lines) + "\n]\n")
    return entry


SHOWN = ("widest", "narrowest", "O5", "O6")


def table(
    entries: list[Entry], target: str = "H200", modes: Sequence[str] = SHOWN
) -> str:
    """Tabulates traffic and temporary memory by model and mode."""
    lines = [f"| {target} | {' | '.join(modes)} |", "|---" * (len(modes) + 1) + "|"]
    by_key = {key_of(entry): entry for entry in entries}
    for name in ALL:
        row = [by_key.get((name, mode, target)) for mode in modes]
        if not any(row):
            continue
        cells = [f"{e['traffic']:.3f}, {e['temp']:.3f}" if e else "" for e in row]
        lines.append(f"| {' | '.join([name, *cells])} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(ALL)}")
    parser.add_argument("--modes", default="widest,narrowest", help=",".join(MODES))
    parser.add_argument("--tpu", action="store_true")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    target = "v5e" if args.tpu else "H200"
    if args.table:
        print(table(read(), target))
        return
    modes = args.modes.split(",")
    cells = [(name, mode, target) for name in args.names or CASES for mode in modes]
    for name, mode, target in cells:
        start = time.monotonic()
        cell = save(name, mode, target)
        figures = " ".join(f"{cell[field]:6.3f}" for field in Measured._fields)
        spent = f"({cell['GB by hand']:5.1f} GB)  {time.monotonic() - start:4.0f} s"
        print(f"{name:14} {target} {mode:10} {figures} {spent}", flush=True)


if __name__ == "__main__":
    main()
