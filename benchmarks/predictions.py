"""Predict the times of the training steps of `make gpu` without a GPU.

    python -m benchmarks.predictions            # adds the rows that are missing
    python -m benchmarks.predictions --table    # prints saved rows

XLA compiles each step for an H200, on the CPU. The script counts the bytes that the
step moves and its temporary memory, and compiles two and four layers of an unrolled
model: all layers cost the same. No program is faster than its floor, the larger time of

    its bytes at 2.95 TB/s, the bandwidth that `make gpu` measured on an H100, and
    its matmuls at 989 TFLOP/s (1,979 in fp8, 494 in float32, where XLA uses TF32).

The prediction is the sum of both times, times the ratio that the GPT-2 with written-out
attention at O5 had on the H100: 32.4 ms, and a sum of 29.6 ms.
"""

import argparse
import dataclasses
import json
import os
import pathlib
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import jax
from jax._src.cudnn import fused_attention_stablehlo as cudnn

from benchmarks import h200
from benchmarks.gpu import TRAINED
from benchmarks.report import table
from benchmarks.training_steps import SIZES, TORCH, Size, jitted

RESULTS = pathlib.Path(__file__).parent / "results" / "predictions.json"
BANDWIDTH, HALF, FP8, TF32 = 2.95e12, 989e12, 1979e12, 494e12
ABOVE_SUM = 32.4 / 29.6
HEADS = ["size", "step", "GB moved", "floor, ms", "predicted ms", "tokens/s", "MFU"]


def count(who: str, size: Size) -> tuple[float, float]:
    """Returns the bytes that a step moves and its peak memory."""
    init, step = jitted(who, size)
    state = jax.eval_shape(init)
    tokens = jax.ShapeDtypeStruct(size.tokens.shape, "int32")
    program = h200.compile_step(step, state, tokens, donate=(0,))
    held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(state))
    return program.traffic, program.temp + held


def measure(who: str, size: Size) -> tuple[float, ...]:
    """Returns what `count` does for all layers of an unrolled model, from a few."""
    if size.scan:
        return count(who, size)
    few, more = (count(who, dataclasses.replace(size, depth=n)) for n in (2, 4))
    layers = (size.depth - 2) / 2
    return tuple(a + layers * (b - a) for a, b in zip(few, more, strict=True))


def seconds_at_peak(who: str, size: Size) -> float:
    """Returns the time of the matmuls in half and in fp8."""
    half, fp8 = size.flops(who)
    return half / HALF + fp8 / FP8


def predict(name: str, who: str, moved: float, memory: float) -> dict[str, Any]:
    """Returns a row from the bytes that a step moves and its memory."""
    size = SIZES[name]
    ideal = computing = seconds_at_peak(who, size)
    if size.scan:  # remat computes the forward pass of the layers twice
        computing += seconds_at_peak(who, dataclasses.replace(size, vocabulary=0)) / 3
    if who == "O0":
        computing *= HALF / TF32
    return {
        "size": name,
        "contestant": who,
        "tokens": size.batch * size.length,
        "ideal_seconds": ideal,
        "bytes": moved,
        "memory": memory,
        "floor": max(moved / BANDWIDTH, computing),
        "seconds": ABOVE_SUM * (moved / BANDWIDTH + computing),
    }


def read() -> list[dict[str, Any]]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def rows_of(found: list[dict[str, Any]]) -> str:
    """Formats predictions as a table."""
    rows = []
    for row in found:
        seconds = row["seconds"]
        cells = [f"{row['bytes'] / 1e9:.1f}", f"{1e3 * row['floor']:.1f}"]
        cells += [f"{1e3 * seconds:.1f}", f"{row['tokens'] / seconds:,.0f}"]
        cells += [f"{row['ideal_seconds'] / seconds:.0%}", f"{row['memory'] / 1e9:.1f}"]
        rows.append([row["size"], row["contestant"], *cells])
    return table([*HEADS, "memory, GB"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="compile nothing")
    found = read()
    if not parser.parse_args().table:
        # Without a GPU, there is no cuDNN, and JAX must not look for its version.
        cudnn.check_cudnn_version = lambda: 91000
        known = {(row["size"], row["contestant"]) for row in found}
        for name, contestants in TRAINED.items():
            for who in contestants:
                if who not in TORCH and (name, who) not in known:
                    found.append(predict(name, who, *measure(who, SIZES[name])))
                    RESULTS.write_text(json.dumps(found, indent=1) + "\n")
                    print(name, who, f"{found[-1]['seconds']:.4f}", flush=True)
    print(rows_of(found))


if __name__ == "__main__":
    main()
