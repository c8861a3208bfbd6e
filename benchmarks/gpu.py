"""Time and test jamp on a GPU: `make gpu`.

    python -m benchmarks.gpu --part 1                 # in under 8 minutes
    python -m benchmarks.gpu --part 2
    python -m benchmarks.gpu --only "training step"   # jobs by prefix

Each job is a process with a time limit, so a crash or a hang costs one job. The script
writes gpu.jsonl (a row per job), gpu.json (figures in pytest-benchmark's format) and
gpu_log.txt (the output) into --results.
"""

import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from benchmarks import specs

ROOT = pathlib.Path(__file__).parents[1]
RESULTS = pathlib.Path(__file__).parent / "results"
STEP = "benchmarks/test_optimizer_step.py::test_"
CONTESTANTS = ("optax chain", "jamp fused, xla", "jamp fused, mosaic")
BY_HAND, TORCH = "by hand, bfloat16", "torch bfloat16, compiled"
# The most important jobs are first, in case time runs out. O0 with 64 sequences does
# not fit into the memory.
TRAINED = {
    "fused, 8": ("O5", BY_HAND, TORCH, "O2", "O4", "O6", "O0"),
    "fused, 64": ("O5", BY_HAND, TORCH, "O2", "O4", "O6"),
    "written out, 8": ("O5", BY_HAND, TORCH),
    "1.3B, 8": ("O5", "O6", TORCH),
}
FIRST_PART = ("fused, 8", "fused, 64")
# With more leaves, XLA takes minutes to compile the chain.
MOST_LEAVES_OF_CHAIN = 400
# Tests whose programs compile differently on a GPU.
TESTED = ("optimizers", "pallas_kernels", "state/test_amp_state.py", "scaling")
TESTED += ("policy/test_forward_programs.py", "autocast/test_kernels.py")


class Job(NamedTuple):
    """A pytest run in one process, with its time limit."""

    name: str
    args: tuple[str, ...]
    seconds: float = 60


def jobs(part: int) -> Iterator[Job]:
    for size, contestants in TRAINED.items():
        for who in contestants if (size in FIRST_PART) == (part == 1) else ():
            name = f"benchmarks/test_train_step.py::test_train_step[{size}-{who}]"
            yield Job(f"training step: {size}, {who}", (name,), 100)
    if part == 1:
        return
    yield Job("copy", (f"{STEP}copy",))
    for tree in specs.gpu_specs():
        names = CONTESTANTS[len(tree.shapes) > MOST_LEAVES_OF_CHAIN :]
        args = tuple(f"{STEP}optimizer_step[{tree.name}-{who}]" for who in names)
        yield Job(f"optimizer steps: {tree.name}", args, 150)
    for tree in specs.gpu_specs()[1:4]:  # BERT-large, ResNet-50 and Llama
        args = (f"{STEP}optimizer_step[{tree.name}-jamp fused, 8 bits]",)
        yield Job(f"optimizer steps in 8 bits: {tree.name}", args, 60)
    yield Job("kernels", ("tests/pallas_kernels/test_kernels.py",), 120)
    for path in TESTED:
        yield Job(f"tests: {path}", (f"tests/{path}", "-m", "not h200"), 200)


def run(job: Job, limit: float, env: dict[str, str], log: Any) -> tuple[dict, Any]:
    """Runs a job, and returns its row and the figures of pytest-benchmark."""
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        saved = pathlib.Path(folder, "saved.json")
        command = [sys.executable, "-m", "pytest", "-q", "-pno:cacheprovider"]
        if job.args[0].startswith("benchmarks"):
            command += [f"--benchmark-json={saved}", "-Wignore:Not saving anything"]
        else:
            # Tests expect every rounding to half, and XLA may drop a pair of casts.
            flags = f"{env.get('XLA_FLAGS', '')} --xla_allow_excess_precision=false"
            env = env | {"XLA_FLAGS": flags.strip()}
        print(f"==== {job.name}", file=log, flush=True)
        streams = {"stdout": log, "stderr": subprocess.STDOUT, "cwd": ROOT, "env": env}
        try:
            code = subprocess.run([*command, *job.args], **streams, timeout=limit)
            known = {0: "passed", 4: "no such test on this device"}
            outcome = known.get(code.returncode, f"exit {code.returncode}")
        except subprocess.TimeoutExpired:
            outcome = "too long"
        text = saved.read_text() if saved.exists() else ""
    row = {"job": job.name, "outcome": outcome}
    row["seconds"] = round(time.monotonic() - start, 1)
    return row, json.loads(text) if text else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=460, help="limit of all jobs")
    parser.add_argument("--part", type=int, choices=(1, 2), default=1)
    parser.add_argument("--only", default="", metavar="NAME", help="jobs by prefix")
    parser.add_argument("--results", type=pathlib.Path, default=RESULTS)
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    options.results.mkdir(parents=True, exist_ok=True)
    env = os.environ | {"JAMP_GPU": "1", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    env.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")  # one program at a time
    rows, figures = [], None
    with (
        (options.results / "gpu_log.txt").open("w") as log,
        (options.results / "gpu.jsonl").open("w") as file,
    ):
        for job in (
            job for job in jobs(options.part) if job.name.startswith(options.only)
        ):
            limit = min(job.seconds, deadline - time.monotonic())
            row, found = {"job": job.name, "outcome": "not begun"}, None
            if limit > 2:
                row, found = run(job, limit, env, log)
            rows.append(row)
            print(json.dumps(row), file=file, flush=True)
            print(*row.values(), flush=True)
            if found:
                earlier = figures["benchmarks"] if figures else []
                figures = found | {"benchmarks": earlier + found["benchmarks"]}
                (options.results / "gpu.json").write_text(json.dumps(figures, indent=1))
    sys.exit(any(row["outcome"] not in ("passed", "not begun") for row in rows))


if __name__ == "__main__":
    main()
