"""Store each long run as a line of a file, and run only the missing ones."""

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
    """Returns the saved runs."""
    lines = path.read_text().splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


def run_missing(
    path: pathlib.Path,
    names: Sequence[str],
    cells: Iterable[tuple[Any, ...]],
    run: Callable[..., Run],
) -> None:
    """Runs the cells without a saved line, and adds a line for each."""
    done = {tuple(known[name] for name in names) for known in read(path)}
    for cell in cells:
        if cell not in done:
            start = time.monotonic()
            found = dict(zip(names, cell, strict=True)) | run(*cell)
            seconds = round(time.monotonic() - start)
            line = json.dumps(found | {"seconds": seconds} | conditions())
            with path.open("a") as file:
                print(line, file=file)
            print(*found.values(), flush=True)


def command(
    doc: str | None, run_missing: Callable[[], None], table: Callable[[], str]
) -> None:
    """Adds the missing runs and prints the table. `--table` only prints the table."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--table", action="store_true", help="run nothing")
    if not parser.parse_args().table:
        run_missing()
    print(table())


def conditions() -> dict[str, str]:
    """The conditions of the figures; `commit` is the last that changed the source."""
    import flax

    names = {"jax": jax, "flax": flax, "optax": optax}
    versions = {name: module.__version__ for name, module in names.items()}
    device, today = jax.devices()[0].device_kind, datetime.date.today()
    commit = commit_of("jamp", "pallas_kernels")
    return versions | {"device": device, "date": today.isoformat(), "commit": commit}


def commit_of(*folders: str) -> str:
    """Returns the last commit that changed these paths."""
    command = ["git", "log", "-1", "--format=%h", "--", *folders]
    root = pathlib.Path(__file__).parents[1]
    return subprocess.check_output(command, text=True, cwd=root).strip()
