"""What a kernel is predicted to cost, and that the pages show what was saved."""

import importlib
import pathlib

import pytest

from benchmarks import convergence, gpu, predict
from tests.hlo import Program

DOCS = pathlib.Path(__file__).parents[1] / "docs"
RESULTS = (DOCS / "results.md").read_text()
# Two batches of (8, 16) times (16, 4), and a loop that multiplies (8, 16) by (16, 4)
# three times: 2 * 2 * 8 * 16 * 4 = 2048, and 3 * 2 * 8 * 16 * 4 = 3072.
HLO = """HloModule made_up, entry_computation_layout={()->()}

%body (p: (bf16[8,16], bf16[16,4])) -> (bf16[8,16], bf16[16,4]) {
  %p = (bf16[8,16]{1,0}, bf16[16,4]{1,0}) parameter(0)
  %x = bf16[8,16]{1,0} get-tuple-element(%p), index=0
  %w = bf16[16,4]{1,0} get-tuple-element(%p), index=1
  %y = bf16[8,4]{1,0} dot(%x, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}
  ROOT %t = (bf16[8,16]{1,0}, bf16[16,4]{1,0}) tuple(%x, %w)
}

%condition (q: (bf16[8,16], bf16[16,4])) -> pred[] {
  %q = (bf16[8,16]{1,0}, bf16[16,4]{1,0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (a: f32[2,8,16], b: f32[2,16,4], s: (bf16[8,16], bf16[16,4])) -> f32[2,8,4] {
  %a = f32[2,8,16]{2,1,0} parameter(0)
  %b = f32[2,16,4]{2,1,0} parameter(1)
  %s = (bf16[8,16]{1,0}, bf16[16,4]{1,0}) parameter(2)
  %loop = (bf16[8,16]{1,0}, bf16[16,4]{1,0}) while(%s), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  ROOT %z = f32[2,8,4]{2,1,0} dot(%a, %b), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}, rhs_contracting_dims={1}
}
"""  # noqa: E501


def test_flops_of_a_batch_and_of_a_loop():
    *loop, batch = predict.kernels_of(Program(HLO))
    assert sum(kernel.flops for kernel in loop) == pytest.approx(3072)
    assert batch.flops == pytest.approx(2048)
    assert {kernel.peak for kernel in loop} == {989e12}
    assert batch.peak == 495e12
    assert batch.bytes == 4 * (2 * 8 * 16 + 2 * 16 * 4 + 2 * 8 * 4)


def test_a_kernel_takes_the_longer_of_bytes_and_flops_and_a_launch():
    moves, multiplies = predict.Kernel(3.35e9), predict.Kernel(1, 989e9, 989e12)
    best, middle, worst = predict.seconds([moves, multiplies], "H100")
    assert best == pytest.approx(1e-3 / 0.92 + 1e-3 / 0.8 + 2 * 1.3e-6)
    assert middle == pytest.approx(1e-3 / 0.85 + 1e-3 / 0.6 + 2 * 2.5e-6)
    assert worst == pytest.approx(1e-3 / 0.65 + 1e-3 / 0.35 + 2 * 5e-6)


def test_predictions_are_of_jobs_of_make_gpu_and_pages_show_them():
    saved = predict.read()
    assert set(saved["steps"]) <= {job.name for job in gpu.jobs()}
    assert predict.table_of_backends(saved) in (DOCS / "optimizers.md").read_text()
    assert predict.table(saved) in RESULTS


def test_the_page_shows_what_was_trained():
    runs = convergence.read()
    for table in convergence.table(runs).split("\n\n"):
        assert table in RESULTS
    for task in {run["task"] for run in runs}:
        levels = [r["level"] for r in runs if r["task"] == task]
        assert levels == [*convergence.LEVELS] * (len(levels) // 6)  # of each seed, all


def test_the_page_shows_what_the_peers_did():
    pytest.importorskip("jmp")  # which a lent machine may not have
    compared = importlib.import_module("benchmarks.compared")
    rows = convergence.read(compared.RESULTS)
    for table in compared.table(rows).split("\n\n"):
        assert table in RESULTS
    for name in {row["model"] for row in rows}:
        who = [row["who"] for row in rows if row["model"] == name]
        assert who == list(compared.CONTESTANTS)
