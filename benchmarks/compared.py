"""Five models trained by jamp and by its peers, each in its own idiom, in one run.

    python -m benchmarks.compared                    # adds what is not there yet
    python -m benchmarks.compared --table            # Markdown, of what is there

Small models on a CPU, larger ones on a GPU. Rounds of steps are interleaved, and each
is compared with plain JAX's of the same round. Then the larger models are compiled for
an H200. A line of benchmarks/results/compared.jsonl is a model and a contestant. Where
they are not installed, mpx and Keras are left out: `pip install
mixed-precision-for-JAX keras`.
"""

import functools
import importlib.util
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("KERAS_BACKEND", "jax")

import flax.linen as nn
import jax
import jax.numpy as jnp
import jmp
import numpy as np
import optax
from flax.training.dynamic_scale import DynamicScale

import jamp
from benchmarks import h200, lean, runs
from benchmarks.lean_images import UNet
from benchmarks.lean_transformers import GPT2, ViT
from tests.models import CNN, MLP

RESULTS = pathlib.Path(__file__).parent / "results" / "compared.jsonl"
PLAIN = "plain JAX"
LEVELS = ("O0", "O1", "O2", "O4", "O5")
ELSEWHERE = {"mpx": "mpx", "Keras": "keras"}  # modules that not all have
CONTESTANTS = (PLAIN, "dtype=bfloat16", "jmp", "DynamicScale", *ELSEWHERE, *LEVELS)
HALVES = {
    "dtype=bfloat16": jnp.bfloat16,
    "DynamicScale": jnp.float16,
    "Keras": jnp.float16,
}
STEPS, ROUNDS, LEAST = 100, 9, 0.03  # steps trained, rounds timed, seconds of each
POLICY = jmp.get_policy("params=float32,compute=float16,output=float32")
TX = lean.TX


def rows_of_numbers(model: nn.Module, batch: int, width: int) -> lean.Case:
    inputs = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return lean.Case(model, inputs, jax.ShapeDtypeStruct((batch,), jnp.int32))


# By name: small, and as large as a GPU wants it.
CASES = {
    "MLP": (
        rows_of_numbers(MLP((256, 256, 10)), 128, 64),
        rows_of_numbers(MLP((4096, 4096, 4096, 10)), 4096, 1024),
    ),
    "transformer under scan": (
        lean.text(GPT2(2, 96, 64, scan=True), 8, 32),
        lean.CASES["gpt2-scan"],
    ),
    "CNN with BatchNorm": (
        lean.images(CNN((16, 32)), batch=16, side=16),
        lean.CASES["resnet50"],
    ),
    "ViT": (lean.images(ViT(2, 96), batch=8, side=64), lean.CASES["vit"]),
    "U-Net": (lean.diffusion(UNet(32), 4, 16), lean.CASES["unet"]),
}

# ---- the contestants' steps: `(state, batch, key) -> state, loss`


def program(who: str, case: lean.Case) -> tuple[Callable[[], Any], Callable]:
    """What makes a contestant's first state, and its step."""
    model = case.model
    rngs = {"params": jax.random.key(0), "dropout": jax.random.key(1)}

    def variables() -> tuple[Any, Any]:
        made = model.init(rngs, zeros(case.inputs))
        return made["params"], made.get("batch_stats", {})

    if who in LEVELS:

        def init():
            params, stats = variables()
            options = {"apply_fn": model.apply, "verbosity": 0, "batch_stats": stats}
            return jamp.initialize(params, TX, who, **options)

        return init, lean.amp_step(case)

    written = model.clone(dtype=HALVES[who]) if who in HALVES else model
    loss_fn = lean.forward(case, written)
    if who == "Keras":
        return keras_program(variables, loss_fn)
    scaled = {
        "jmp": (lambda: (jnp.float32(2.0**15), jnp.int32(0)), jmp_step),
        "DynamicScale": (DynamicScale, flax_step),
        "mpx": (mpx_rule, mpx_step),
    }
    rule, step_of = scaled.get(who, (None, lean.float32_step))

    def init():
        params, stats = variables()
        state = params, TX.init(params), stats
        return state if rule is None else (*state, rule())

    return init, step_of(loss_fn)


def jmp_step(loss_fn: Callable) -> Callable:
    """As jmp's README has it, but for its scale: `jit(...).lower` refuses its class."""

    def step(state, batch, key):
        params, opt_state, stats, numbers = state
        rule = jmp.DynamicLossScale(*numbers)

        def scaled(params):
            half, half_batch = POLICY.cast_to_compute((params, batch))
            loss, new = loss_fn(half, stats, half_batch, key)
            return rule.scale(loss), (loss, new)

        grads, (loss, new_stats) = jax.grad(scaled, has_aux=True)(params)
        grads = rule.unscale(POLICY.cast_to_param(grads))
        finite = jmp.all_finite(grads)
        updates, new_opt_state = TX.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state, new_stats
        new = jmp.select_tree(finite, new, (params, opt_state, stats))
        rule = rule.adjust(finite)
        return (*new, (rule.loss_scale, rule.counter)), loss

    return step


def flax_step(loss_fn: Callable) -> Callable:
    """As Flax's ImageNet example has it."""

    def step(state, batch, key):
        params, opt_state, stats, rule = state
        grad = rule.value_and_grad(
            lambda params: loss_fn(params, stats, batch, key), has_aux=True
        )
        rule, finite, (loss, new_stats), grads = grad(params)
        updates, new_opt_state = TX.update(grads, opt_state, params)
        new = optax.apply_updates(params, updates), new_opt_state, new_stats
        old = params, opt_state, stats
        new = jax.tree.map(lambda n, o: jnp.where(finite, n, o), new, old)
        return (*new, rule), loss

    return step


def mpx_rule() -> Any:
    import mpx

    return mpx.DynamicLossScaling(jnp.float32(2.0**15), jnp.float32(1))


def mpx_step(loss_fn: Callable) -> Callable:
    """As mpx's README has it; statistics and the key are not cast."""
    import mpx

    def step(state, batch, key):
        params, opt_state, stats, rule = state
        in_half = lambda params, batch: loss_fn(params, stats, batch, key)  # noqa: E731
        grad = mpx.filter_value_and_grad(in_half, rule, has_aux=True)
        (loss, new_stats), rule, finite, grads = grad(params, batch)
        new = mpx.optimizer_update(params, TX, opt_state, grads, finite)
        return (*new, mpx.select_tree(finite, new_stats, stats), rule), loss

    return step


def keras_program(variables: Callable, loss_fn: Callable) -> tuple[Callable, Callable]:
    """As Keras's own JAX trainer has it, around a Linen model in float16."""
    import keras

    params, _ = jax.eval_shape(variables)
    leaves, structure = jax.tree.flatten(params)
    adam = keras.optimizers.Adam(1e-3, epsilon=1e-8)
    optimizer = keras.optimizers.LossScaleOptimizer(adam)
    optimizer.build([keras.Variable(np.zeros(x.shape, np.float32)) for x in leaves])

    def init():
        params, stats = variables()
        return jax.tree.leaves(params), [v.value for v in optimizer.variables], stats

    def step(state, batch, key):
        params, values, stats = state

        def scaled(params):
            loss, new = loss_fn(structure.unflatten(params), stats, batch, key)
            mapping = list(zip(optimizer.variables, values, strict=True))
            with keras.StatelessScope(state_mapping=mapping):
                return optimizer.scale_loss(loss), (loss, new)

        grads, (loss, stats) = jax.grad(scaled, has_aux=True)(params)
        params, values = optimizer.stateless_apply(values, grads, params)
        return (params, values, stats), loss

    return init, step


def zeros(shapes: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def some_batch(case: lean.Case) -> Any:
    """Normal numbers, and targets among ten classes."""
    rng = np.random.default_rng(0)

    def draw(x):
        if x.dtype == jnp.int32:
            return jnp.asarray(rng.integers(10, size=x.shape, dtype=np.int32))
        return jnp.asarray(rng.standard_normal(x.shape, np.float32))

    return jax.tree.map(draw, (case.inputs, case.targets))


# ---- what is measured


class Running:
    """A contestant that trains."""

    def __init__(self, who: str, case: lean.Case) -> None:
        init, self.function = program(who, case)
        self.state, self.key = jax.jit(init)(), jax.random.key(2)
        self.batch = some_batch(case)
        self.seconds_to_compile: list[float] = []

    def compile(self) -> None:
        """Traces and compiles, and notes how long it took."""
        jax.clear_caches()
        start = time.perf_counter()
        jitted = jax.jit(self.function, donate_argnums=0)
        self.step = jitted.lower(self.state, self.batch, self.key).compile()
        self.seconds_to_compile.append(time.perf_counter() - start)

    def run(self, steps: int) -> float:
        """Seconds of some steps."""
        start = time.perf_counter()
        for _ in range(steps):
            self.state, loss = self.step(self.state, self.batch, self.key)
        self.loss = float(loss)
        return time.perf_counter() - start


def measure(
    case: lean.Case, contestants: list[str], compiled: int
) -> dict[str, dict[str, Any]]:
    """By contestant, ratios to plain JAX with quartiles, and the loss."""
    running = {who: Running(who, case) for who in dict.fromkeys([PLAIN, *contestants])}
    for _ in range(compiled):
        for it in running.values():
            it.compile()
    for it in running.values():
        it.run(STEPS)
        it.trained = it.loss
    one = {who: it.run(3) / 3 for who, it in running.items()}
    rounds: dict[str, list[float]] = {who: [] for who in running}
    for _ in range(ROUNDS):
        for who, it in running.items():
            steps = max(round(LEAST / one[who]), 1)
            rounds[who].append(it.run(steps) / steps)
    return {
        who: {
            "seconds": statistics.median(rounds[who]),
            "step": quartiles(rounds[who], rounds[PLAIN]),
            "compile": quartiles(
                it.seconds_to_compile, running[PLAIN].seconds_to_compile
            ),
            "loss": it.trained,
        }
        for who, it in running.items()
    }


def quartiles(times: list[float], plain: list[float]) -> list[float]:
    ratios = [t / p for t, p in zip(times, plain, strict=True)]
    return [float(q) for q in np.percentile(ratios, [25, 50, 75])]


def count(who: str, case: lean.Case) -> dict[str, float]:
    """What a step takes as compiled for an H200; kernels without copies."""
    init, step = program(who, case)
    key = jax.eval_shape(jax.random.key, 0)
    args = (jax.eval_shape(init), (case.inputs, case.targets), key)
    return lean.cost_of(h200.lower_step(step, *args, donate=(0,)), "H200")._asdict()


def table(rows: list[dict[str, Any]]) -> str:
    """A table for each model, in Markdown."""
    lines = []
    for name in dict.fromkeys(row["model"] for row in rows):
        of_model = {row["who"]: row for row in rows if row["model"] == name}
        plain = of_model[PLAIN]
        lines += [
            "",
            f"| {name} | step | compile | loss | H200: traffic | temp | kernels |",
            "|---|---|---|---|---|---|---|",
        ]
        for who in (who for who in CONTESTANTS if who in of_model):
            row = of_model[who]
            low, middle, high = row["step"]
            ratios = [f"{row[k] / plain[k]:.2f}" for k in ("traffic", "temp")]
            cells = (
                who,
                f"{middle:.2f} ({low:.2f} to {high:.2f})",
                f"{row['compile'][1]:.2f}",
                f"{row['loss']:.3g}",
                *ratios,
                f"{row['kernels']:,}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines[1:])


read = functools.partial(runs.read, RESULTS)


def run_missing() -> None:
    done = {(row["model"], row["who"]) for row in read()}
    on_gpu = jax.default_backend() == "gpu"
    for name, cases in CASES.items():
        missing = [
            who
            for who in CONTESTANTS
            if (name, who) not in done
            and (who not in ELSEWHERE or importlib.util.find_spec(ELSEWHERE[who]))
        ]
        if not missing:
            continue
        found = measure(cases[on_gpu], missing, compiled=2 if name == "MLP" else 1)
        for who in missing:
            about = {"model": name, "who": who} | runs.conditions()
            runs.add(RESULTS, about | found[who] | count(who, cases[True]))


if __name__ == "__main__":
    runs.command(__doc__, run_missing, lambda: table(read()))
