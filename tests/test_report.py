"""The report on optimizer steps. The figures here are made up, and stay here."""

import json

import pytest

from benchmarks import report

CONDITIONS = {
    "date": "2000-01-01",
    "command": "made up",
    "device": "Made-up GPU",
    "platform": "gpu",
    "driver": "1.2",
    "packages": {"jax": "3.4", "optax": "5.6", "torch": None},
}


def result(seconds, size, host_share=0.1, **info):
    spread = {"q1": 0.99 * seconds, "median": seconds, "q3": 1.01 * seconds}
    extra = info | {"bytes": size, "host_share": host_share, "steps": 10}
    return {"extra_info": extra, "stats": spread}


def step(contestant, seconds, size=30_000, spec="a tree", host_share=0.1):
    named = {"contestant": contestant, "spec": spec, "leaves": 2, "parameters": 1000}
    return result(seconds, size, host_share, **named)


COPY = result(1e-6, 100_000, contestant="copy")  # 100 GB/s
RESULTS = [
    COPY,
    step("optax chain", 1e-6),
    step("jamp fused, xla", 0.5e-6),
    step("torch fused AdamW", 2e-6),
    step("optax chain", 1e-6, spec="another"),
    step("jamp fused, xla", 1.01e-6, spec="another"),
]


@pytest.fixture
def run_of(tmp_path):
    def save(results, **conditions):
        saved = {"benchmarks": results, "conditions": CONDITIONS | conditions}
        (tmp_path / "made_up.json").write_text(json.dumps(saved))
        (run,) = report.load(tmp_path)
        return run

    return save


def cells(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_what_is_said_of_a_run(run_of):
    run, alone = run_of(RESULTS), run_of(RESULTS[2:3])
    _, rule, *rows = map(cells, report.table(run).splitlines())
    assert all(len(row) == len(rule) for row in rows)
    assert rows[:4] == [
        ["a tree", "2", "1,000", "optax chain", "0.00100", "1.00", "30", "30%"],
        ["", "", "", "jamp fused, xla", "0.000500", "0.50", "60", "60%"],
        ["", "", "", "torch fused AdamW", "0.00200", "2.00", "15", "15%"],
        ["another", "2", "1,000", "optax chain", "0.00100", "1.00", "30", "30%"],
    ]
    # No ratio without the chain or the copy.
    *_, row = map(cells, report.table(alone).splitlines())
    assert row[4:] == ["0.000500", "–", "60", "–"]
    assert report.conditions(run) == (
        "Made-up GPU, driver 1.2, JAX 3.4, Optax 5.6, `made up`, 2000-01-01; "
        "a copy moves 100 GB/s."
    )
    # Who is slower, beyond the spread.
    notes = report.notes(run)
    assert notes.endswith("Slower than the chain: torch fused AdamW (a tree).")
    assert report.notes(run_of(RESULTS[:3])).endswith("Slower than the chain: none.")


@pytest.mark.parametrize("platform, marked", [("gpu", True), ("cpu", False)])
def test_steps_that_wait_for_the_host_are_marked(run_of, platform, marked):
    run = run_of([COPY, step("optax chain", 1e-6, host_share=0.95)], platform=platform)
    assert ("0.00100*" in report.table(run)) == marked
    assert ("waited for the host" in report.notes(run)) == marked


def test_main_prints_a_table_and_draws_a_plot(run_of, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    run = run_of(RESULTS)
    report.main(["--results", str(tmp_path)])
    assert report.table(run) in capsys.readouterr().out
    png = (tmp_path / "optimizer_step.png").read_bytes()
    assert png.startswith(b"\x89PNG")


def test_main_says_where_there_are_no_results(tmp_path, capsys):
    other = {"extra_info": {}, "stats": {"median": 1.0}}  # a training step's
    saved = {"benchmarks": [other], "conditions": CONDITIONS}
    (tmp_path / "made_up.json").write_text(json.dumps(saved))
    with pytest.raises(SystemExit, match="No optimizer step is among the results"):
        report.main(["--results", str(tmp_path)])
    assert not capsys.readouterr().out
    assert not list(tmp_path.glob("*.png"))
