"""Tables and a plot of steps on a GPU, from the JSON of pytest-benchmark.

    python -m benchmarks.report

prints tables for each file in benchmarks/results, and draws optimizer_step.png there.
Each figure comes out of one run: ratios are never taken between two.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from benchmarks.predict import predicted

RESULTS = pathlib.Path(__file__).parent / "results"
CHAIN = "optax chain"


@dataclasses.dataclass(frozen=True)
class Row:
    """One optimizer on one tree.

    Attributes:
        spec: the tree's name.
        leaves, parameters: its size.
        contestant: who steps it.
        quartiles: seconds of a step: lower quartile, median, upper quartile.
        bytes: what a step must read and write at the least.
        host_share: the host's part of the time, the rest being waiting for the device.
    """

    spec: str
    leaves: int
    parameters: int
    contestant: str
    quartiles: tuple[float, float, float]
    bytes: int
    host_share: float

    @property
    def seconds(self) -> float:
        """The median."""
        return self.quartiles[1]

    @property
    def bandwidth(self) -> float:
        """Bytes a second."""
        return self.bytes / self.seconds


@dataclasses.dataclass(frozen=True)
class Trained:
    """A training step: seconds by quartile, and the most memory, in bytes."""

    contestant: str
    quartiles: tuple[float, float, float]
    peak_bytes: int | None


@dataclasses.dataclass(frozen=True)
class Run:
    """What one file holds.

    Attributes:
        conditions: what the figures depend on, of `benchmarks/conftest.py`.
        copy: bandwidth of a device copy, in bytes a second; None if not measured.
        rows: the optimizer steps, in the order in which they ran.
        trained: the training steps, too.
    """

    conditions: dict[str, Any]
    copy: float | None
    rows: list[Row]
    trained: list[Trained]

    @property
    def trees(self) -> Iterator[list[Row]]:
        """The rows of one tree after another."""
        for _, rows in groupby(self.rows, lambda row: row.spec):
            yield list(rows)


def load(folder: pathlib.Path) -> list[Run]:
    """The runs in a folder that hold an optimizer step, by file name."""
    runs = [_run(json.loads(p.read_text())) for p in sorted(folder.glob("gpu*.json"))]
    return [run for run in runs if run.rows]


def _run(saved: dict[str, Any]) -> Run:
    copy, rows, trained = None, [], []
    for result in saved["benchmarks"]:
        info, stats = result["extra_info"], result["stats"]
        quartiles = (stats["q1"], stats["median"], stats["q3"])
        if info.get("contestant") == "copy":
            copy = info["bytes"] / stats["median"]
        elif "peak_bytes" in info:
            trained.append(Trained(info["contestant"], quartiles, info["peak_bytes"]))
        elif "spec" in info:
            named = {f.name: info.get(f.name) for f in dataclasses.fields(Row)}
            rows.append(Row(**named | {"quartiles": quartiles}))
    return Run(saved["conditions"], copy, rows, trained)


def conditions(run: Run) -> str:
    """What the figures depend on, in a sentence."""
    about, packages = run.conditions, run.conditions["packages"]
    names = {"jax": "JAX", "optax": "Optax", "torch": "PyTorch"}
    versions = [f"{label} {packages[k]}" for k, label in names.items() if packages[k]]
    driver = [f"driver {about['driver']}"] if about["driver"] else []
    copy = f"; a copy moves {_gigabytes(run.copy)} GB/s" if run.copy else ""
    parts = [about["device"], *driver, *versions, f"`{about['command']}`"]
    return f"{', '.join(parts)}, {about['date']}{copy}."


def table(run: Run) -> str:
    """A row for each tree and optimizer, in Markdown."""
    lines = [
        "| tree | leaves | parameters | step | ms | to chain | to predicted | GB/s |",
        "|---|---:|---:|---|---:|---:|---:|---:|",
    ]
    for rows in run.trees:
        chain = _chain(rows)
        for row in rows:
            ratio = f"{row.seconds / chain.seconds:.2f}" if chain else "–"
            name = f"optimizer step: {row.spec}: {row.contestant}"
            late = "*" if _is_late(run, row) else ""
            cells = [
                *_tree_cells(row, is_first=row is rows[0]),
                row.contestant,
                f"{row.seconds * 1e3:#.3g}{late}",
                ratio,
                over_predicted(run.conditions["device"], name, row.seconds),
                _gigabytes(row.bandwidth),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def table_of_training(run: Run) -> str:
    """A row for each training step, in Markdown."""
    lines = [
        "| training step | ms | middle half | to predicted | memory at most, GB |",
        "|---|---:|---:|---:|---:|",
    ]
    for step in run.trained:
        first, median, third = (1e3 * seconds for seconds in step.quartiles)
        name = f"training step: {step.contestant}"
        cells = [
            step.contestant,
            f"{median:.1f}",
            f"{first:.1f} to {third:.1f}",
            over_predicted(run.conditions["device"], name, median / 1e3),
            f"{step.peak_bytes / 1e9:.1f}" if step.peak_bytes else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def over_predicted(device: str, name: str, measured: float) -> str:
    """Measured seconds over predicted, where something was predicted."""
    expected = predicted(device, name)
    return f"{measured / expected:.2f}" if expected else "–"


def _tree_cells(row: Row, is_first: bool) -> tuple[str, str, str]:
    if not is_first:
        return "", "", ""
    return row.spec, f"{row.leaves:,}", f"{row.parameters:,}"


def _chain(rows: list[Row]) -> Row | None:
    return next((row for row in rows if row.contestant == CHAIN), None)


def _is_late(run: Run, row: Row) -> bool:
    """Whether the device waited for the host, which issued steps to the very end."""
    return run.conditions["platform"] == "gpu" and row.host_share > 0.9


def _gigabytes(bandwidth: float) -> str:
    return f"{bandwidth / 1e9:,.3g}" if bandwidth < 1e11 else f"{bandwidth / 1e9:,.0f}"


def notes(run: Run) -> str:
    """What the columns mean, and who was slower than the chain."""
    text = (
        "Medians. GB/s counts what a step must move at the least: 30 bytes per half "
        "parameter, 28 with a 16-bit remainder for a master, 32 per float32 parameter."
    )
    if any(_is_late(run, row) for row in run.rows):
        text += " *: the device waited for the host."
    slower: dict[str, list[str]] = {}
    for rows in run.trees:
        chain = _chain(rows)
        for row in rows:
            # Not by noise: the middle halves of the rounds do not overlap.
            if chain and row.quartiles[0] > chain.quartiles[2]:
                slower.setdefault(row.contestant, []).append(row.spec)
    named = [f"{who} ({'; '.join(trees)})" for who, trees in slower.items()]
    return f"{text} Slower than the chain: {', '.join(named) or 'none'}."


def draw(runs: list[Run], path: pathlib.Path) -> None:
    """Bars: each step's bandwidth as a fraction of a copy's, a panel for each run."""
    from matplotlib.figure import Figure

    heights = [0.22 * len(run.rows) + 0.3 * len(list(run.trees)) + 1 for run in runs]
    figure = Figure(figsize=(8, sum(heights)), layout="constrained")
    panels = figure.subplots(len(runs), squeeze=False, height_ratios=heights)[:, 0]
    for axes, run in zip(panels, runs, strict=True):
        _draw_run(axes, run)
    figure.savefig(path, dpi=150)


_COLORS = {"optax": "#8c8c8c", "torch": "#d97706"}  # by the first word
_OURS = ("#1d4ed8", "#93c5fd", "#0f766e", "#5eead4")


def _draw_run(axes: Any, run: Run) -> None:
    names = list(dict.fromkeys(row.contestant for row in run.rows))
    ours = [name for name in names if name.startswith("jamp")]
    colors = {name: _COLORS.get(name.split()[0]) for name in names}
    colors |= dict(zip(ours, _OURS, strict=False))
    unit = run.copy or 1e9  # GB/s where there is no copy to compare with
    place = 0.0
    for rows in run.trees:
        axes.text(0, place - 0.6, rows[0].spec, va="bottom", fontsize=9)
        for row in rows:
            axes.barh(place, row.bandwidth / unit, 0.9, color=colors[row.contestant])
            place += 1
        place += 1.2
    for name in names:
        axes.barh(0, 0, color=colors[name], label=name)
    if run.copy:
        axes.axvline(1, color="black", linewidth=0.8)
    axes.set(yticks=[], ylim=(place - 1, -1.8))
    axes.set_xlabel(
        "bandwidth, as a fraction of a device copy's" if run.copy else "GB/s"
    )
    axes.set_title(conditions(run), fontsize=7, loc="left", wrap=True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def main(argv: list[str] | None = None) -> None:
    """Prints the tables, and draws the plot."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    parser.add_argument("--plot", type=pathlib.Path, help="a PNG; else beside the JSON")
    options = parser.parse_args(argv)
    runs = load(options.results)
    if not runs:
        sys.exit(f"No optimizer step is among the results in {options.results}.")
    for run in runs:
        parts = conditions(run), table_of_training(run), table(run), notes(run)
        print(*parts, sep="\n\n", end="\n\n")
    draw(runs, options.plot or options.results / "optimizer_step.png")


if __name__ == "__main__":
    main()
