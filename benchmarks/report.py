"""Write the pages of benchmarks/results from the files in this folder.

    python -m benchmarks.report                     # rewrites the pages
    python -m benchmarks.report --gpu $OUT/gpu.json # prints the tables of one run

Every ratio compares two figures of one run.
"""

import argparse
import json
import pathlib
from itertools import groupby
from typing import Any

FOLDER = pathlib.Path(__file__).parent / "results"
HEAD = """# Results in full

`python -m benchmarks.report` writes this page from the files in
`benchmarks/results/`. Do not edit it.
[Results](../../docs/results.md) explains the figures.
"""
ON_GPU = """The training steps are of GPT-2; the cells show medians (quartiles). The
optimizer steps are of Adam at O5; the cells show medians (bandwidth). At an asterisk,
the device waited for the host. `python -m benchmarks.predictions` predicts a training
step, calibrated by the measured O5. It predicted the steps with written-out attention
after the runs below.

"""
TRAINED = ["training step", "ms", "tokens/s", "MFU", "GB"]
TRAINED += ["predicted floor, ms", "predicted ms", "predicted GB"]
PREDICTED = """`python -m benchmarks.predictions` predicts the steps of `make gpu` from
programs compiled for an H200. "fused" is cuDNN's attention.

"""
HOST = """Medians of the CPU time (`python -m benchmarks.host`). A first call traces,
lowers and compiles.

"""
MOMENTS = """`python -m benchmarks.moments`. Differences are to float32 moments of the
same seed. "m to nearest" rounds first moments, or SGD's momentum, to nearest. "blocks
of m" is `eight_bit(optax.adamw)`.

"""
ABLATIONS = """# Autocast without each mechanism

`python -m benchmarks.ablations` switches off one mechanism of autocast
and compiles the step for an H200. The figures are the extra bytes and temporary memory,
as shares of those by hand. The last column has the steps whose program does not change,
and those whose figures change by at most 0.2 % and 1 %. A step that is in neither
column was not compiled. `tests/autocast/test_ablations.py` shows the digits that
mechanisms without bytes save. The steps of gpt2, vit, lstm and bert at O5 are from
2026-11-29, and the others from up to three days earlier.

"""
LEAN = """`python -m benchmarks.lean` counts bytes moved and temporary memory of a step,
without a device. [Ablations](ablations.md) shows the steps without each mechanism of
autocast.

"""
TABLES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "H200": (
        "Relative to the same model with `dtype=bfloat16`, and O6 to O5.",
        (),  # the default of `lean.table`
    ),
    "Fused optimizers": (
        "`jamp.optimizers.fused_adam`, relative to `optax.adam` at the same level.",
        ("H200", ("fused O1", "fused O2", "fused O4", "fused O5")),
    ),
    "TPU v5e": (
        "Relative to the same model with `dtype=bfloat16` (`--tpu`), in bytes of the "
        "main memory, without VMEM. At `widest`, embedding tables, ViT's class token "
        "and the LSTM's first carry are float32, so the residual streams are float32, "
        "as by torch's rules. At O5, the model by hand does not check its gradients. "
        "XLA then steps a weight in the kernel of its gradient, which a check does not "
        "allow: Mixer without the check is 0.989, 1.000, and ResNet-50 1.000, 1.000.",
        ("v5e", ("widest", "narrowest", "O5")),
    ),
}


def table(heads: list[str], rows: list[list[str]]) -> str:
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# A run on a GPU.


def gpu_run(saved: dict[str, Any]) -> str:
    """Formats the conditions of a run, its training steps and its optimizer steps."""
    results = [r["extra_info"] | r["stats"] for r in saved["benchmarks"]]
    trained = [r for r in results if "peak_bytes" in r]
    stepped = [r for r in results if "spec" in r]
    parts = [conditions(saved["conditions"])]
    if trained:
        parts.append(table(TRAINED, list(map(_trained, trained))))
    if stepped:
        names = list(dict.fromkeys(r["contestant"] for r in stepped))
        rows = []
        for spec, found in groupby(stepped, lambda r: r["spec"]):
            by_name = {r["contestant"]: r for r in found}
            rows.append([spec, *(_stepped(by_name.get(name)) for name in names)])
        parts.append(table(["optimizer step, ms (GB/s)", *names], rows))
    return "\n\n".join(parts)


def conditions(about: dict[str, Any]) -> str:
    names = {"jax": "JAX", "optax": "Optax", "torch": "PyTorch"}
    packages = about["packages"]
    versions = [f"{label} {packages[k]}" for k, label in names.items() if packages[k]]
    driver = [f"driver {about['driver']}"] if about["driver"] else []
    said = [f"{about[name]}" for name in ("commit", "about") if name in about]
    return f"{', '.join([about['device'], *driver, *versions, about['date'], *said])}."


def _trained(row: dict[str, Any]) -> list[str]:
    memory, size = row["peak_bytes"], row["size"]
    first, middle, last = (f"{1e3 * row[k]:.1f}" for k in ("q1", "median", "q3"))
    times, seconds = f"{middle} ({first}–{last})", row["median"]
    # MFU counts matmuls in half at 989 TFLOP/s, and in fp8 at 1,979.
    ideal = row["half_flops"] / 989e12 + row["fp8_flops"] / 1979e12
    cells = [f"{size}: {row['contestant']}", times, f"{row['tokens'] / seconds:,.0f}"]
    cells += [f"{ideal / seconds:.0%}", f"{memory / 1e9:.1f}" if memory else "–"]
    found = json.loads((FOLDER / "predictions.json").read_text())
    key = size, row["contestant"]
    said = [p for p in found if (p["size"], p["contestant"]) == key]
    if not said:
        return [*cells, "–", "–", "–"]
    expected = said[0]
    expected = expected["floor"] * 1e3, expected["seconds"] * 1e3, expected["memory"]
    return [*cells, *(f"{x:.1f}" for x in (*expected[:2], expected[2] / 1e9))]


def _stepped(row: dict[str, Any] | None) -> str:
    if row is None:
        return "–"
    late = "*" if row["host_share"] > 0.9 else ""
    bandwidth = row["bytes"] / row["median"] / 1e9
    return f"{1e3 * row['median']:#.3g}{late} ({bandwidth:,.0f})"


def page() -> str:
    from benchmarks import convergence, fp8, host, moments, predictions, rounding

    runs = [json.loads(p.read_text()) for p in sorted(FOLDER.glob("gpu_*.json"))]
    sections = {
        "On an H100": ON_GPU + "\n\n".join(map(gpu_run, runs)),
        "Predictions for an H100": PREDICTED + predictions.rows_of(predictions.read()),
        "Training steps of 15 models": LEAN + lean_tables(),
        "Cost on the host": HOST + host.table(host.read()),
        "Training": "`python -m benchmarks.convergence`\n\n"
        + convergence.table(convergence.read()),
        "With fewer bytes per parameter": "`python -m benchmarks.rounding`\n\n"
        + rounding.table(rounding.read()),
        "With moments in 8 bits": MOMENTS + moments.table(moments.read()),
        "With matmuls in fp8": "`python -m benchmarks.fp8`\n\n" + fp8.table(fp8.read()),
    }
    parts = [f"## {title}\n\n{text}\n" for title, text in sections.items()]
    return "\n".join([HEAD, *parts])


def lean_tables() -> str:
    from benchmarks import lean

    entries = lean.read()
    parts = [
        f"### {title}\n\n{text}\n\n{lean.table(entries, *shown)}"
        for title, (text, shown) in TABLES.items()
    ]
    return "\n\n".join(parts)


def ablations_page() -> str:
    from benchmarks import ablations

    return ABLATIONS + ablations.table(ablations.read()) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpu", type=pathlib.Path, help="print the tables of this run")
    file = parser.parse_args().gpu
    if file:
        print(gpu_run(json.loads(file.read_text())))
    else:
        (FOLDER / "README.md").write_text(page())
        (FOLDER / "ablations.md").write_text(ablations_page())


if __name__ == "__main__":
    main()
