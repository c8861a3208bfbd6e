"""Runs that take long: each is a line of a file, and only what is missing is run.

run_missing(RESULTS, ("model", "seed"), [("CNN", 0), ("CNN", 1)], run)
{"model": "CNN", "seed": 0, "loss": 0.31}     # was there
{"model": "CNN", "seed": 1, "loss": 0.29, "seconds": 8, ...}  # of `run("CNN", 1)`

A line's `commit` is the last change of the source at which its figures were seen.
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


def drop_changed(
    path: pathlib.Path, names: Sequence[str], run: Callable[..., Run]
) -> None:
    """Runs one seed of each anew, and keeps the lines of those that give every digit.

    Other seeds are other arguments of the same programs. What is kept is of this
    commit; what is not counts as missing. Threads can move a digit of the same program,
    which is run for nothing then.
    """
    commit = conditions()["commit"]
    same: dict[tuple[Any, ...], bool] = {}
    kept = []
    for line in read(path):
        *like, seed = (line[name] for name in names)
        if tuple(like) not in same:
            is_same = run(*like, seed).items() <= line.items()
            same[tuple(like)] = is_same
            print(*like, seed, "as before" if is_same else "other digits", flush=True)
        if same[tuple(like)]:
            kept.append(json.dumps(line | {"commit": commit}) + "\n")
    path.write_text("".join(kept))


def command(
    doc: str | None,
    run_missing: Callable[[], None],
    table: Callable[[], str],
    drop_changed: Callable[[], None] = lambda: None,
) -> None:
    """Runs what is missing, or has changed, and prints a table: `--table` only that."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--again", action="store_true", help="one seed of each, too")
    args = parser.parse_args()
    if args.again:
        drop_changed()
    if not args.table:
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
