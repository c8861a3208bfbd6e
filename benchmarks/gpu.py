"""All that a GPU is wanted for, in the time that one is lent: `make gpu`.

    python -m benchmarks.gpu                          # on a GPU, in under 8 minutes
    python -m benchmarks.gpu --rehearse               # the same on a CPU, and small
    python -m benchmarks.gpu --only "training step"   # jobs whose name begins so
    python -m benchmarks.gpu --rest gpu.jsonl         # those that it says did not begin

Each kernel, tree, training step and test file is a job, in a process of its own, with a
limit in seconds. A crash, or a job that does not end, is a row like any other, and the
next job begins. The most telling come first. Files, in --results:

- gpu.jsonl: a row per job, written when it ends: outcome, seconds, figures, and what
  was printed last if it did not pass.
- gpu.json: the figures as pytest-benchmark saves them, for `benchmarks.report`.
- gpu_log.txt: all that was printed.
"""

import argparse
import itertools
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from benchmarks import specs
from benchmarks.report import over_predicted
from tests.pallas_kernels import kernels

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = pathlib.Path(__file__).parent / "results"
SIDE_BY_SIDE = max((os.cpu_count() or 2) - 2, 1)  # jobs that time nothing
# Tests expect every rounding to half. Where one kernel widens what it has just rounded,
# XLA leaves both out.
ALL_ROUNDINGS = "--xla_allow_excess_precision=false"
NOTHING_TIMED = "-Wignore::pytest_benchmark.logger.PytestBenchmarkWarning"
TOLD = 2000  # characters of what a job printed last

STEP = "benchmarks/test_optimizer_step.py::test_"
TRAINING = "benchmarks/test_train_step.py::test_train_step"
ON_GPU = "tests/pallas_kernels/test_gpu.py::test_"
CONTESTANTS = (
    "optax chain",
    "jamp fused, xla",
    "jamp fused, mosaic",
    "torch fused AdamW",
)
FIRST_TRAINED = "O5", "by hand, bfloat16", "O0", "O6", "O4", "torch bfloat16, compiled"
THEN_TRAINED = (
    *("O2", "O1", "torch float16, compiled", "torch bfloat16", "torch float16"),
    "flax",
)
# XLA compiles the chain on more of them for longer than all the rest.
MOST_LEAVES_OF_CHAIN = 400
# What these test is compiled otherwise on a GPU; the rest follows by name.
FIRST_TESTED = (
    *("optimizers/one_pass", "optimizers/fused_optimizers", "pallas_kernels/launch"),
    *("optimizers/norms", "optimizers/optimizer_bytes", "state/amp_state"),
    *("scaling/scaled_grad", "policy/forward_programs"),
    *("autocast/kernels", "autocast/loops"),
)
# Compiled for an H200, as on any machine; or a matter of hosts and of no device.
NOT_TESTED = (
    *("project/budgets", "project/lean", "pallas_kernels/kernels_h200"),
    *("devices/many_devices_h200", "devices/many_hosts"),
)
ALONE = "pallas_kernels/gpu"  # of which each test is a job


class Job(NamedTuple):
    """What runs in a process of its own.

    Attributes:
        name: of its row.
        args: what pytest is given, or another command.
        seconds: when it is stopped.
        alone: whether it times something, so that nothing may run beside it.
    """

    name: str
    args: tuple[str, ...]
    seconds: float = 60
    alone: bool = False

    @property
    def is_timed(self) -> bool:
        """Whether pytest-benchmark has something to save."""
        return self.args[-1].startswith(STEP[:10])


class Row(NamedTuple):
    """How a job ended.

    Attributes:
        job: its name.
        outcome: "passed", "failed", "skipped", "crashed", "too long", "not begun".
        seconds: how long it took.
        summary: the last line that pytest printed.
        figures: by what was timed, seconds: lower quartile, median, upper quartile.
        told: what it printed last, if it did not pass.
    """

    job: str
    outcome: str
    seconds: float = 0
    summary: str = ""
    figures: dict[str, list[float]] = {}
    told: str = ""


# ---- which jobs


def jobs(rehearse: bool = False) -> list[Job]:
    """All jobs, in the order in which they begin; of a kind, a rehearsal has few."""
    few = 2 if rehearse else None
    trees = specs.rehearsal_specs() if rehearse else specs.gpu_specs()
    trees_by_two = list(itertools.batched(trees, 2))
    of_kernels = map(_kernel, list(kernels.CASES)[:few])
    paths = sorted(ROOT.glob("tests/*/test_*.py"))
    files = {f"{path.parent.name}/{path.stem[5:]}": path for path in paths}
    first = {name: files[name] for name in FIRST_TESTED}
    later = {k: v for k, v in files.items() if k not in (*first, *NOT_TESTED, ALONE)}
    return [
        Job("device: a GPU", (f"{ON_GPU}gpu_run_is_on_a_gpu",), alone=True),
        Job("copy", (f"{STEP}copy",), alone=True),
        *of_kernels,
        *map(_optimizers, trees_by_two[:1]),
        *map(_training, FIRST_TRAINED),
        *map(_optimizers, trees_by_two[1:]),
        *map(_training, THEN_TRAINED),
        *itertools.starmap(_file, list(first.items())[:few]),
        *itertools.starmap(_file, list(later.items())[:few]),
    ]


def rest_of(all_jobs: list[Job], earlier: pathlib.Path | None) -> list[Job]:
    """The jobs that did not begin in an earlier run, and that which looks for a GPU."""
    if earlier is None:
        return all_jobs
    rows = map(json.loads, earlier.read_text().splitlines())
    begun = {row["job"] for row in rows if row["outcome"] != "not begun"}
    return [j for j in all_jobs if j.name not in begun or j.name.startswith("device")]


def _kernel(name: str) -> Job:
    skips = (f"{ON_GPU}a_skip_changes_no_bit[{name}]",) * (", copied, " in name)
    return Job(
        f"kernel: {name}", (f"{ON_GPU}kernel_computes_what_xla_does[{name}]", *skips)
    )


def _training(who: str) -> Job:
    limit = 100 if "compiled" in who else 60
    return Job(f"training step: {who}", (f"{TRAINING}[{who}]",), limit, alone=True)


def _optimizers(trees: tuple[specs.Spec, ...]) -> Job:
    """All contestants on some trees, whose programs are compiled side by side."""
    args = tuple(
        f"{STEP}optimizer_step[{tree.name}-{who}]"
        for tree in trees
        for who in CONTESTANTS[len(tree.shapes) > MOST_LEAVES_OF_CHAIN :]
    )
    names = " and ".join(tree.name for tree in trees)
    return Job(f"optimizer steps: {names}", args, 150, alone=True)


def _file(name: str, path: pathlib.Path) -> Job:
    return Job(f"tests: {name}", (str(path.relative_to(ROOT)),), 150)


# ---- running them


class Runner(NamedTuple):
    """Runs jobs, one after another or side by side, until a deadline.

    Attributes:
        log: where to add what they print.
        deadline: by `time.monotonic`.
        env: their environment.
        command: what runs a job's args.
    """

    log: pathlib.Path
    deadline: float
    env: dict[str, str]
    command: tuple[str, ...] = (sys.executable, "-m", "pytest")

    def rows(self, all_jobs: Iterable[Job]) -> Iterable[tuple[Row, Any]]:
        """A row for each job, when it ends, and what it saved."""
        for alone, some in itertools.groupby(all_jobs, lambda job: job.alone):
            with ThreadPoolExecutor(1 if alone else SIDE_BY_SIDE) as pool:
                yield from pool.map(self.run, some)

    def run(self, job: Job) -> tuple[Row, Any]:
        """Runs a job, and reads what it saved for pytest-benchmark."""
        limit = min(job.seconds, self.deadline - time.monotonic())
        if limit < 2:
            return Row(job.name, "not begun"), None
        start = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            saved = pathlib.Path(folder, "saved.json")
            save = [f"--benchmark-json={saved}", NOTHING_TIMED] * job.is_timed
            flags = f"{self.env.get('XLA_FLAGS', '')} {ALL_ROUNDINGS * (not job.alone)}"
            env = self.env | {"XLA_FLAGS": flags.strip()}
            printed, code = _run([*self.command, *job.args, *save], env, limit)
            text = saved.read_text() if saved.exists() else ""
            found = json.loads(text) if text else None  # empty where none was timed
        seconds = round(time.monotonic() - start, 1)
        with self.log.open("a") as log:
            print(f"==== {job.name}\n{printed}", file=log)
        outcome = _outcome(code, printed)
        told = "" if outcome == "passed" else printed[-TOLD:]
        last = printed.rstrip().rpartition("\n")[2].strip("= ")
        figures = _figures(job.name, found)
        return Row(job.name, outcome, seconds, last, figures, told), found


def _run(command: list[str], env: dict[str, str], limit: float) -> tuple[str, int]:
    """What a command prints, and its exit code; of one that was stopped, 124."""
    with tempfile.TemporaryFile("w+", errors="replace") as out:
        streams = {"stdout": out, "stderr": subprocess.STDOUT, "cwd": ROOT, "env": env}
        process = subprocess.Popen(command, **streams, start_new_session=True)
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = 124
        # What it started of its own ends with it.
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()
        out.seek(0)
        return out.read(), code


def _outcome(code: int, printed: str) -> str:
    if code == 124:
        return "too long"
    if code == 0:
        return "passed" if " passed" in printed[-200:] else "skipped"
    return (
        "failed"
        if code == 1 and re.search(r"\d (failed|error)", printed)
        else "crashed"
    )


def _figures(job: str, saved: Any) -> dict[str, list[float]]:
    """By the job, or by tree and contestant of several."""
    figures = {}
    for result in saved["benchmarks"] if saved else []:
        about = result["extra_info"]
        name = "optimizer step: {spec}: {contestant}" if "spec" in about else job
        stats = [result["stats"][k] for k in ("q1", "median", "q3")]
        figures[name.format(**about)] = stats
    return figures


# ---- what is written


def line(row: Row, device: str) -> str:
    """A row, and what it timed, to be read."""
    figures = (
        f"\n{'':18}{name:70} {seconds * 1e3:.4g} ms, "
        f"{over_predicted(device, name, seconds)} x predicted"
        for name, (_, seconds, _) in row.figures.items()
    )
    head = f"{row.outcome:9} {row.seconds:5.1f} s  {row.job:55} {row.summary}"
    return "".join([head, *figures])


def write(
    rows: Iterable[tuple[Row, Any]], folder: pathlib.Path, show: Callable
) -> list[Row]:
    """Writes rows as they come, and returns them. Ends where there is no GPU."""
    done, saved = [], None
    for row, found in rows:
        done.append(row)
        with (folder / "gpu.jsonl").open("a") as file:
            print(json.dumps(row._asdict()), file=file)
        if found:
            earlier = saved["benchmarks"] if saved else []
            saved = found | {"benchmarks": earlier + found["benchmarks"]}
            saved["conditions"]["command"] = "python -m benchmarks.gpu"
            (folder / "gpu.json").write_text(json.dumps(saved, indent=1))
        device = saved["conditions"]["device"] if saved else ""
        show(line(row, device))
        if row.job.startswith("device") and row.outcome != "passed":
            show(row.told)
            break
    return done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, and small")
    parser.add_argument("--seconds", type=float, default=460, help="for all jobs")
    parser.add_argument("--only", default="", metavar="NAME", help="how they begin")
    parser.add_argument("--rest", type=pathlib.Path, help="of an earlier gpu.jsonl")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    options.results.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"JAMP_GPU": "rehearse" if options.rehearse else "1"}
    # Side by side they share the GPU's memory.
    env |= {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "PYTHONUNBUFFERED": "1"}
    # What XLA measures of a product while it compiles one step holds for all.
    autotuned = tempfile.TemporaryDirectory(prefix="jamp-autotuned-")
    flag = f"--xla_gpu_per_fusion_autotune_cache_dir={autotuned.name}"
    env["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()
    chosen = [
        job._replace(args=("-q", "-p", "no:cacheprovider", *job.args))
        for job in rest_of(jobs(options.rehearse), options.rest)
        if job.name.startswith((options.only, "device"))
    ]
    for name in ("gpu.jsonl", "gpu.json", "gpu_log.txt"):
        (options.results / name).unlink(missing_ok=True)
    runner = Runner(options.results / "gpu_log.txt", deadline, env)
    show = lambda text: print(text, flush=True)  # noqa: E731
    rows = write(runner.rows(chosen), options.results, show)
    counts = {
        o: sum(r.outcome == o for r in rows) for o in {r.outcome: 0 for r in rows}
    }
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    report = [
        sys.executable,
        "-m",
        "benchmarks.report",
        "--results",
        options.results.absolute(),
    ]
    subprocess.run(report, cwd=ROOT, env=env | {"JAX_PLATFORMS": "cpu"}, check=False)
    sys.exit(not set(counts) <= {"passed", "skipped", "not begun"})


if __name__ == "__main__":
    main()
