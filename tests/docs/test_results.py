"""What a kernel is predicted to cost, and that the pages show what was saved."""

import importlib
import json
import re

import numpy as np
import pytest

from benchmarks import (
    ablations,
    convergence,
    gpu,
    lean,
    predict,
    report,
    runs,
    specs,
)
from benchmarks.hlo import Program
from tests.docs.scripts import needs_extra
from tests.pages import SHOWN

# Two batches of (8, 16) times (16, 4): 2 * 2 * 8 * 16 * 4 = 2048.
HLO = """HloModule made_up, entry_computation_layout={()->()}

ENTRY %main (a: f32[2,8,16], b: f32[2,16,4]) -> f32[2,8,4] {
  %a = f32[2,8,16]{2,1,0} parameter(0)
  %b = f32[2,16,4]{2,1,0} parameter(1)
  ROOT %z = f32[2,8,4]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}
"""  # noqa: E501


def test_flops_and_bytes_of_a_batch():
    (batch,) = predict.kernels_of(Program(HLO))
    assert batch.flops == pytest.approx(2048) and batch.peak == 495e12
    assert batch.bytes == 4 * (2 * 8 * 16 + 2 * 16 * 4 + 2 * 8 * 4)


def test_a_kernel_takes_the_longer_of_bytes_and_flops_and_a_launch():
    moves, multiplies = predict.Kernel(3.35e9), predict.Kernel(1, 989e9, 989e12)
    best, middle, worst = predict.seconds([moves, multiplies], "H100")
    assert best == pytest.approx(1e-3 / 0.92 + 1e-3 / 0.8 + 2 * 1.3e-6)
    assert middle == pytest.approx(1e-3 / 0.85 + 1e-3 / 0.6 + 2 * 2.5e-6)
    assert worst == pytest.approx(1e-3 / 0.65 + 1e-3 / 0.35 + 2 * 5e-6)


def test_predictions_are_of_jobs_of_make_gpu_and_pages_show_them():
    saved, steps = predict.read(), {job.name for job in gpu.jobs()}
    for tree in specs.gpu_specs():
        steps |= {f"optimizer step: {tree.name}: {who}" for who in gpu.CONTESTANTS}
    assert set(saved["steps"]) <= steps
    assert predict.table_of_backends(saved) in SHOWN
    assert predict.table(saved) in SHOWN


def test_the_page_shows_what_a_gpu_took_and_kernels_were_nowhere_slower():
    measured = report.load(report.RESULTS)
    assert {run.conditions["platform"] for run in measured} == {"gpu"}
    for run in measured:
        shown = report.conditions(run), report.table_of_training(run), report.table(run)
        assert all(part in SHOWN for part in shown)
        for tree in run.trees:
            times = {row.contestant: row.seconds for row in tree}
            assert times["jamp fused, mosaic"] <= 1.01 * times["jamp fused, xla"]


def test_the_page_shows_what_was_trained():
    runs = convergence.read()
    for table in convergence.table(runs).split("\n\n"):
        assert table in SHOWN
    for task in {run["task"] for run in runs}:
        levels = [r["level"] for r in runs if r["task"] == task]
        assert levels == [*convergence.LEVELS] * (len(levels) // 6)  # of each seed, all


@needs_extra
def test_fewer_bytes_cost_less_than_the_spread_of_the_seeds():
    rounding = importlib.import_module("benchmarks.rounding")
    runs = rounding.read()
    assert rounding.table(runs) in SHOWN
    for model in rounding.MODELS:
        losses = {
            setting: np.array([r["loss"] for r in runs if key(r) == (model, setting)])
            for setting in rounding.SETTINGS
        }
        masters, *narrow, nearest = losses.values()
        spread = masters.std(ddof=1)
        assert all(abs(x - masters).max() < spread / 5 for x in narrow)
        assert (nearest - masters).min() > 5 * spread


@needs_extra
def test_products_in_fp8_cost_less_than_the_spread_of_the_seeds():
    fp8 = importlib.import_module("benchmarks.fp8")
    lines = fp8.table(fp8.read()).splitlines()
    assert "\n".join(lines) in SHOWN and fp8.table_of_products() in SHOWN
    for line in lines[2:]:
        *_, spread, _, most = re.findall(r"\d+\.\d+", line)
        assert float(most) < float(spread) / 3


def test_the_page_shows_what_steps_cost_beside_those_by_hand():
    entries = lean.read()
    assert lean.table(entries) in SHOWN
    assert {lean.key_of(e)[:2] for e in entries} <= {
        (name, mode) for name in lean.CASES for mode in lean.MODES
    }


def test_the_page_shows_what_each_mechanism_is_worth_and_all_are_of_one_autocast():
    entries = ablations.read()
    assert ablations.table(entries) in SHOWN
    assert len({(entry["jax"], entry["commit"]) for entry in entries}) == 1


def test_a_run_that_gives_other_digits_is_run_anew_and_others_are_of_this_commit(
    tmp_path,
):
    names, path = ("model", "seed"), tmp_path / "runs.jsonl"
    cells = [("MLP", 0), ("CNN", 0), ("MLP", 1), ("CNN", 1)]
    for cell in cells:
        loss = {"loss": 10 * cell[1] + len(cell[0])}
        runs.add(path, dict(zip(names, cell, strict=True)) | loss | {"commit": "old"})
    changed = lambda model, seed: {"loss": 10 * seed + 3 + (model == "CNN")}  # noqa: E731
    runs.drop_changed(path, names, changed)
    runs.run_missing(path, names, cells, changed)
    losses = [(r["model"], r["seed"], r["loss"]) for r in runs.read(path)]
    assert losses == [("MLP", 0, 3), ("MLP", 1, 13), ("CNN", 0, 4), ("CNN", 1, 14)]
    commits = {run["commit"] for run in runs.read(path)}
    assert commits == {runs.commit_of("jamp", "pallas_kernels")}


def key(run):
    return run["model"], run["setting"]


def test_the_page_shows_what_the_peers_did():
    pytest.importorskip("jmp")  # which a lent machine may not have
    compared = importlib.import_module("benchmarks.compared")
    rows = compared.read()
    for table in compared.table(rows).split("\n\n"):
        assert table in SHOWN
    for name in {row["model"] for row in rows}:
        who = [row["who"] for row in rows if row["model"] == name]
        assert who == list(compared.CONTESTANTS)


# ---- the report on optimizer steps: the figures are made up, and stay here


def result(seconds, size=30_000, **info):
    info |= {"spec": "a tree", "leaves": 2, "parameters": 1000}
    extra = info | {"bytes": size, "host_share": 0.1, "steps": 10}
    return {"extra_info": extra, "stats": spread(seconds)}


def spread(seconds):
    return {"q1": 0.99 * seconds, "median": seconds, "q3": 1.01 * seconds}


def test_what_is_said_of_a_run(tmp_path):
    results = [
        result(1e-6, 100_000, contestant="copy"),  # 100 GB/s
        result(1e-6, contestant="optax chain"),
        result(0.5e-6, contestant="jamp fused, xla"),
        result(2e-6, contestant="torch fused AdamW"),
        {"extra_info": {"contestant": "O5", "peak_bytes": 3e9}, "stats": spread(0.02)},
    ]
    packages = {"jax": "3.4", "optax": "5.6", "torch": None}
    conditions = {"date": "2000-01-01", "command": "made up", "device": "Made-up GPU"}
    conditions |= {"platform": "gpu", "driver": "1.2", "packages": packages}
    saved = {"benchmarks": results, "conditions": conditions}
    (tmp_path / "gpu_made_up.json").write_text(json.dumps(saved))
    (run,) = report.load(tmp_path)
    _, _, *rows = (
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in report.table(run).splitlines()
    )
    assert rows == [
        ["a tree", "2", "1,000", "optax chain", "0.00100", "1.00", "–", "30"],
        ["", "", "", "jamp fused, xla", "0.000500", "0.50", "–", "60"],
        ["", "", "", "torch fused AdamW", "0.00200", "2.00", "–", "15"],
    ]
    *_, trained = report.table_of_training(run).splitlines()
    assert trained == "| O5 | 20.0 | 19.8 to 20.2 | – | 3.0 |"
    assert report.conditions(run) == (
        "Made-up GPU, driver 1.2, JAX 3.4, Optax 5.6, `made up`, 2000-01-01; "
        "a copy moves 100 GB/s."
    )
    assert report.notes(run).endswith("than the chain: torch fused AdamW (a tree).")
