"""How long steps should take on a GPU, written down before anybody has measured one.

    python -m benchmarks.predict               # compiles, in 3 minutes on one core
    python -m benchmarks.predict --table       # Markdown, of what is there

A roofline for each kernel of the program that XLA compiles for an H200: the longer of
its bytes over the bandwidth and its FLOPs over the peak, and a launch. Kernels follow
one another. The two GPUs have the same chip, so an H100 is taken to run the same
program. Each assumption has a range, and so does each prediction: all at their best,
in the middle, and all at their worst. `make gpu` prints measured over predicted.
"""

import argparse
import datetime
import json
import math
import os
import pathlib
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

FILE = pathlib.Path(__file__).parent / "predicted" / "steps.json"

# NVIDIA's data sheets of the H100 SXM and of the H200; FLOPs are dense.
BANDWIDTH = {"H100": 3.35e12, "H200": 4.8e12}
PEAK = {"f16": 989e12, "bf16": 989e12, "f32": 495e12}  # float32 products run in TF32
PEAK |= {"f8e4m3fn": 1979e12, "f8e5m2": 1979e12}
# Ours, from experience with such GPUs and not from a run of this: at best, in the
# middle, at worst. Of the bandwidth, of the peak, and seconds for each kernel.
REACHED = (0.92, 0.85, 0.65)
SUSTAINED = (0.80, 0.60, 0.35)
LAUNCH = (1.3e-6, 2.5e-6, 5e-6)
ASSUMED = {
    "bandwidth in B/s": BANDWIDTH,
    "peak in FLOP/s": PEAK,
    "part of the bandwidth": REACHED,
    "part of the peak": SUSTAINED,
    "seconds per kernel": LAUNCH,
}


class Kernel(NamedTuple):
    """What a launch costs; `peak` is that of its products' dtype."""

    bytes: float
    flops: float = 0
    peak: float = PEAK["f32"]


def seconds(kernels: list[Kernel], gpu: str) -> list[float]:
    """Predicted: at best, in the middle, at worst."""
    return [
        sum(
            max(k.bytes / (BANDWIDTH[gpu] * reached), k.flops / (k.peak * sustained))
            + launch
            for k in kernels
        )
        for reached, sustained, launch in zip(REACHED, SUSTAINED, LAUNCH, strict=True)
    ]


# ---- what a program consists of


def kernels_of(program: Any) -> list[Kernel]:
    """The launches of an `hlo.Program`; those of a loop count as its average."""
    return list(_kernels(program))


def _kernels(program: Any) -> Iterator[Kernel]:
    for instruction, cost in program.launches():
        count = max(round(cost.kernels), 1)
        products = list(_products(instruction, program.entry, program))
        flops = sum(product for product, _ in products)
        peak = PEAK.get(products[0][1], PEAK["f32"]) if products else PEAK["f32"]
        yield from [Kernel(cost.traffic / count, flops / count, peak)] * count


def _products(instruction: Any, outer: Any, program: Any) -> Iterator[tuple]:
    """FLOPs and dtype of each matmul of an instruction, and of what it calls."""
    from benchmarks import hlo

    if instruction.is_product:
        yield _flops(instruction, outer)
    times = hlo._trips(instruction)
    for name in hlo._called(instruction):
        body = program.computations[name]
        for inner in body.values():
            yield from ((times * f, d) for f, d in _products(inner, body, program))


def _flops(product: Any, outer: Any) -> tuple[float, str]:
    """2 B M N K, the root of the product of the sizes of operands, result and B."""
    lhs, rhs = (_dims(outer[name].shape) for name in product.operands[:2])
    result = _dims(product.shape)
    batch = product.attribute(r'lhs_batch_dim\w*"?[=:][\[{]([^\]}]*)') or ""
    shared = math.prod(lhs[int(n)] for n in re.findall(r"\d+", batch))
    sizes = math.prod(lhs) * math.prod(rhs) * math.prod(result)
    dtype = outer[product.operands[0]].shape.partition("[")[0]
    return 2 * math.sqrt(sizes * shared) / shared, dtype


def _dims(shape: str) -> list[int]:
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(n) for n in found[1].split(",") if n] if found else []


# ---- which steps


def programs() -> Iterator[tuple[str, Callable[[], Any]]]:
    """The names of jobs of `make gpu`, and what compiles their program."""
    from benchmarks import optimizer_steps, specs, training_steps

    for who in (training_steps.BY_HAND, *training_steps.LEVELS):
        yield f"training step: {who}", lambda who=who: _training_step(who)
    contestants = {"optax chain": optimizer_steps.optax_chain}
    for backend in ("xla", "mosaic"):
        contestants[f"jamp fused, {backend}"] = lambda spec, backend=backend: (
            optimizer_steps.jamp_fused(spec, backend)
        )
    for spec in specs.gpu_specs()[:5]:
        for who, contestant in contestants.items():
            yield (
                f"optimizer step: {spec.name}: {who}",
                lambda spec=spec, c=contestant: _optimizer_step(spec, c(spec)),
            )


def _training_step(who: str) -> Any:
    import jax

    from benchmarks import h200, training_steps

    size = training_steps.FULL
    init, step = training_steps.jitted(who, size)
    tokens = jax.ShapeDtypeStruct((size.batch, size.length), "int32")
    return h200.compile_step(step, jax.eval_shape(init), tokens, donate=(0,))


def _optimizer_step(spec: Any, contestant: Any) -> Any:
    import dataclasses

    import jax
    import jax.numpy as jnp

    from benchmarks import h200
    from benchmarks.optimizer_steps import HALF, names

    shapes = list(zip(names(spec), spec.shapes, strict=True))
    params = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in shapes}
    grads = {
        n: jax.ShapeDtypeStruct(s, jnp.float32 if "fp32" in n else HALF)
        for n, s in shapes
    }
    state = jax.eval_shape(contestant.init, params)
    program = h200.compile_step(contestant.step, state, grads, donate=(0,))
    # A kernel is given the half params to write them, and does not read them.
    return dataclasses.replace(program, unread=lambda shape: "bf16" in shape)


def compile_all(only: str) -> dict[str, Any]:
    """Adds to the file what is not there yet."""
    from benchmarks.runs import commit_of

    saved = read() if FILE.exists() else {"steps": {}}
    for name, compile_step in programs():
        if name in saved["steps"] or not name.startswith(only):
            continue
        start = time.monotonic()
        kernels = kernels_of(compile_step())
        saved["steps"][name] = {
            "commit": commit_of("jamp", "pallas_kernels"),
            "compiled in seconds": round(time.monotonic() - start),
            "kernels": len(kernels),
            "gigabytes": round(sum(k.bytes for k in kernels) / 1e9, 4),
            "teraflops": round(sum(k.flops for k in kernels) / 1e12, 4),
        } | {gpu: [round(s, 9) for s in seconds(kernels, gpu)] for gpu in BANDWIDTH}
        FILE.parent.mkdir(exist_ok=True)
        FILE.write_text(json.dumps(_about() | saved, indent=1) + "\n")
        print(name, saved["steps"][name], flush=True)
    return saved


def _about() -> dict[str, Any]:
    import jax
    import optax

    return {
        "date": datetime.date.today().isoformat(),
        "command": "python -m benchmarks.predict",
        "jax": jax.__version__,
        "optax": optax.__version__,
        "assumed": ASSUMED,
    }


# ---- what was predicted


def read() -> dict[str, Any]:
    """What the file holds."""
    return json.loads(FILE.read_text())


def predicted(device: str, name: str) -> float | None:
    """Seconds in the middle, if this step is predicted for this device."""
    gpu = next((gpu for gpu in BANDWIDTH if gpu in device), None)
    step = read()["steps"].get(name) if FILE.exists() else None
    return None if gpu is None or step is None else step[gpu][1]


def table(saved: dict[str, Any], gpus: tuple[str, ...] = tuple(BANDWIDTH)) -> str:
    """All that is predicted, in Markdown."""
    names = [f"{gpu}, ms" for gpu in gpus]
    lines = [f"| step | kernels | GB | TFLOP | {' | '.join(names)} |"]
    lines.append("|---|---:|---:|---:|" + "---|" * len(gpus))
    for name, step in saved["steps"].items():
        times = [
            f"{m * 1e3:.3g} ({b * 1e3:.3g} to {w * 1e3:.3g})"
            for b, m, w in map(step.get, gpus)
        ]
        counts = (
            f"{step['kernels']:,} | {step['gigabytes']:.3g} | {step['teraflops']:.3g}"
        )
        lines.append(f"| {name} | {counts} | {' | '.join(times)} |")
    return "\n".join(lines)


def table_of_backends(saved: dict[str, Any], gpu: str = "H200") -> str:
    """XLA and Mosaic side by side, as predicted."""
    lines = [
        f"| tree | XLA: kernels | {gpu}, ms | Mosaic: kernels | {gpu}, ms | ratio |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    steps = saved["steps"]
    for name in (n for n in steps if n.endswith("fused, xla")):
        xla, mosaic = steps[name], steps[name.replace("xla", "mosaic")]
        cells = [
            f"{step['kernels']:,} | {step[gpu][1] * 1e3:.3g}" for step in (xla, mosaic)
        ]
        tree, ratio = name.split(": ")[1], xla[gpu][1] / mosaic[gpu][1]
        lines.append(f"| {tree} | {' | '.join(cells)} | {ratio:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="compile nothing")
    parser.add_argument("--only", default="", help="steps whose name begins so")
    options = parser.parse_args()
    if not options.table:
        os.environ.setdefault("JAX_PLATFORMS", "cpu")
        os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
        compile_all(options.only)
    print(table(read()), table_of_backends(read()), sep="\n\n")


if __name__ == "__main__":
    main()
