"""Runs that take long: each is a line of a file, and only what is missing is run.

run_missing(RESULTS, ("model", "seed"), [("CNN", 0), ("CNN", 1)], run)
{"model": "CNN", "seed": 0, "loss": 0.31}     # was there
{"model": "CNN", "seed": 1, "loss": 0.29, "seconds": 8, ...}  # of `run("CNN", 1)`
"""

import argparse
import datetime
import json
import pathlib
import subprocess
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import optax

type Run = dict[str, Any]


def read(path: pathlib.Path) -> list[Run]:
    """The runs that are there."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def add(path: pathlib.Path, run: Run) -> None:
    """Writes a run behind the others."""
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps(run) + "\n")


def run_missing(
    path: pathlib.Path,
    names: Sequence[str],
    cells: Iterable[tuple[Any, ...]],
    run: Callable[..., Run],
) -> None:
    """Runs the cells that no line has under these names, and adds a line for each."""
    done = {tuple(known[name] for name in names) for known in read(path)}
    for cell in cells:
        if cell not in done:
            start = time.monotonic()
            found = dict(zip(names, cell, strict=True)) | run(*cell)
            seconds = round(time.monotonic() - start)
            add(path, found | {"seconds": seconds} | conditions())
            print(*found.values(), flush=True)


def command(
    doc: str | None, run_missing: Callable[[], None], table: Callable[[], str]
) -> None:
    """Runs what is missing, but with `--table`, and prints a table."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="run nothing")
    if not parser.parse_args().table:
        run_missing()
    print(table())


def conditions() -> dict[str, str]:
    """What the figures depend on: `commit` is the last that changed the source."""
    import flax

    names = {"jax": jax, "flax": flax, "optax": optax}
    versions = {name: module.__version__ for name, module in names.items()}
    device, today = jax.devices()[0].device_kind, datetime.date.today()
    commit = commit_of("jamp", "pallas_kernels")
    return versions | {"device": device, "date": today.isoformat(), "commit": commit}


def commit_of(*folders: str) -> str:
    """The last commit that changed something there."""
    command = ["git", "log", "-1", "--format=%h", "--", *folders]
    root = pathlib.Path(__file__).parents[1]
    return subprocess.check_output(command, text=True, cwd=root).strip()
