"""`make gpu` meets a crash, an endless job and its deadline, and goes on."""

import ast
import json
import os
import time

import pytest

from benchmarks import gpu, specs, test_optimizer_step, training_steps
from tests.pages import ROOT
from tests.pallas_kernels import kernels

# A job's script, and how it ends.
JOBS = {
    "alone": ("echo 2 passed", "passed"),
    "red": ("echo 1 failed, 2 passed; exit 1", "failed"),
    "not collected": ("echo no such test; exit 4", "crashed"),
    "aborts": ("echo about to; kill -ABRT $$", "crashed"),
    "endless": ("echo waits; sleep 60", "too long"),
    "without torch": ("echo 1 skipped", "skipped"),
}


def run(tmp_path, jobs, seconds=30.0):
    deadline = time.monotonic() + seconds
    log = tmp_path / "log.txt"
    runner = gpu.Runner(log, deadline, dict(os.environ), ("sh", "-c"))
    shown = []
    rows = gpu.write(runner.rows(jobs), tmp_path, shown.append)
    written = (tmp_path / "gpu.jsonl").read_text().splitlines()
    assert [json.loads(row)["job"] for row in written] == [job.name for job in jobs]
    assert len(shown) == len(jobs)
    return rows, shown


def test_each_job_is_a_row_whatever_becomes_of_it(tmp_path):
    jobs = [
        gpu.Job(name, (script,), 2.5 if name == "endless" else 20, name == "alone")
        for name, (script, _) in JOBS.items()
    ]
    rows, _ = run(tmp_path, jobs)
    assert {row.job: row.outcome for row in rows} == {
        k: v for k, (_, v) in JOBS.items()
    }
    told = {row.job: row.told.strip() for row in rows}
    assert (told["alone"], told["aborts"], told["endless"]) == ("", "about to", "waits")
    assert "==== aborts\nabout to" in (tmp_path / "log.txt").read_text()


def test_after_the_deadline_nothing_begins(tmp_path):
    rows, _ = run(tmp_path, [gpu.Job("late", ("echo 1 passed",))], seconds=1)
    assert [row.outcome for row in rows] == ["not begun"]
    passed, late = gpu.Row("new", "passed"), gpu.Row("late", "not begun")
    gpu.write([(passed, None), (late, None)], tmp_path, print)
    others = [gpu.Job(name, ()) for name in ("late", "new", "device: a GPU")]
    assert gpu.rest_of(others, tmp_path / "gpu.jsonl") == [others[0], others[2]]


def test_the_jobs_are_all_kernels_test_files_and_steps():
    names = [job.name for job in gpu.jobs()]
    assert len(set(names)) == len(names)
    assert {f"kernel: {name}" for name in kernels.CASES} <= set(names)
    paths = ROOT.glob("tests/*/test_*.py")
    files = {f"{path.parent.name}/{path.stem[5:]}" for path in paths}
    tested = {name[7:] for name in names if name.startswith("tests: ")}
    assert files == tested | {*gpu.NOT_TESTED, gpu.ALONE}
    trained = [name[15:] for name in names if name.startswith("training step: ")]
    assert set(trained) == {*training_steps.JITTED, *training_steps.TORCH}
    assert trained[:2] == ["O5", "by hand, bfloat16"]
    known = {*test_optimizer_step.JITTED, test_optimizer_step.TORCH, gpu.CONTESTANTS[2]}
    assert known >= set(gpu.CONTESTANTS)
    for job in gpu.jobs():
        for arg in job.args:
            path, _, test = arg.partition("::")
            source = ast.parse((ROOT / path).read_text())
            functions = {x.name for x in source.body if isinstance(x, ast.FunctionDef)}
            assert not test or test.partition("[")[0] in functions, arg


# The trees that are timed and counted have the sizes of the real models

# Totals as published with the models; leaves as their PyTorch checkpoints have them.
MODELS = {
    "resnet50": (161, 25_557_032),
    "bert_large": (398, 336_226_108),  # transformers' BertForPreTraining
    "gpt2_xl": (580, 1_557_611_200),
    "llama_8b_shard": (291, 8_030_261_248 // 8),
    "many_leaves": (300, 150 * (768 + 768 * 768)),
    "tiny_leaves": (10_000, 1_600_113),
    "single_leaf": (1, 2**29),
}


@pytest.mark.parametrize("model", MODELS)
def test_spec_has_the_size_of_its_model(model):
    spec = getattr(specs, model)()
    assert (len(spec.shapes), spec.total) == MODELS[model]
