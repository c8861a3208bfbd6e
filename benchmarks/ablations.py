"""Measure each mechanism of autocast: compile training steps with it switched off.

    python -m benchmarks.ablations            # adds missing runs
    python -m benchmarks.ablations gpt2 vit --modes O5 --without softmax,islands
    python -m benchmarks.ablations --table    # prints saved results

Steps are compiled for an H200, as in `benchmarks.lean`. An entry of
benchmarks/results/ablations.json is a model, a mode and one of `benchmarks.mechanisms`,
with the extra cost without the mechanism as a share of the cost by hand. The script
does not compile a program that a switch leaves as it is: an entry with "same" lists
these mechanisms. The script saves each entry at once, so you can stop it and continue
later. After a change of the code in jamp/_autocast, earlier entries count as missing.
A comment or a docstring is no change.
"""

import argparse
import ast
import hashlib
import itertools
import json
import pathlib
import warnings
from collections.abc import Iterable
from typing import Any

import jamp._autocast
from benchmarks import lean
from benchmarks.mechanisms import MECHANISMS, without

type Entry = dict[str, Any]

RESULTS = pathlib.Path(__file__).parent / "results" / "ablations.json"
AUTOCAST = pathlib.Path(jamp._autocast.__file__).parent
MODES = ("widest", "narrowest", "O5")
SAME = "same"
# A difference matters above this share of the traffic or the memory by hand.
TRAFFIC, TEMP = 0.002, 0.01
# Sorted by compile time, from 10 seconds to a minute.
CHEAPEST_FIRST = (
    *("gpt2", "vit", "lstm", "bert", "mixer", "resnet50", "gpt2-scan", "linen"),
    *("tied", "words", "llama", "moe", "convnext", "unet", "efficientnet"),
)


# Measure.


def read() -> list[Entry]:
    return json.loads(RESULTS.read_text())


def _write(entries: list[Entry]) -> None:
    lines = ",\n".join(map(json.dumps, entries))
    RESULTS.write_text(f"[\n{lines}\n]\n")


def _key(entry: Entry) -> tuple[str, str, str]:
    return entry["model"], entry["mode"], entry.get("without", SAME)


def measure(model: str, mode: str, mechanism: str) -> Entry | None:
    """Returns the extra cost without a mechanism; None if the program is the same."""
    as_is = lean.lower(model, mode, True, "H200").as_text()
    costs = [lean.measure(model, mode, ours) for ours in (False, True)]
    with without(mechanism):
        lean.lower.cache_clear()  # it does not know the mechanism
        if lean.lower(model, mode, True, "H200").as_text() == as_is:
            return None
        costs.append(lean.measure(model, mode, True))
    lean.lower.cache_clear()
    entry: Entry = {"model": model, "mode": mode, "without": mechanism}
    pairs = zip(lean.Measured._fields, zip(*costs, strict=True), strict=True)
    for name, (by_hand, as_is, found) in pairs:
        entry[name] = round((found - as_is) / by_hand, 4)
    return entry


def code_of(folder: pathlib.Path) -> str:
    """Returns a digest of the code in a folder, without comments and docstrings."""
    programs = []
    for file in sorted(folder.glob("*.py")):
        program = ast.parse(file.read_text())
        for node in ast.walk(program):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                node.body = node.body[ast.get_docstring(node) is not None :]
        programs.append(ast.dump(program))  # without line numbers
    return hashlib.sha256("\n".join(programs).encode()).hexdigest()[:8]


def measure_missing(wanted: Iterable[tuple[str, str, str]]) -> None:
    """Adds missing entries, and replaces entries of another version of autocast."""
    here: Entry = lean.conditions("H200") | {"code": code_of(AUTOCAST)}
    here.pop("commit")  # a comment changes it
    entries = {_key(entry): entry for entry in read()}
    for model, mode, name in wanted:
        same: Entry = entries.get((model, mode, SAME), {})
        if not here.items() <= same.items():
            same = {"model": model, "mode": mode, SAME: []} | here
        known = here.items() <= entries.get((model, mode, name), {}).items()
        if known or name in same[SAME]:
            continue
        entry = measure(model, mode, name)
        if entry is None:
            same[SAME].append(name)
            entries[model, mode, SAME] = same
            entries.pop((model, mode, name), None)
        else:
            entries[model, mode, name] = entry | here
        _write(list(entries.values()))
        print(model, mode, name, entry or SAME, flush=True)


# The table.


def table(entries: list[Entry]) -> str:
    """Lists the steps where each mechanism matters and where it does not."""
    lines = ["| without | traffic, temp | no difference |", "|---|---|---|"]
    for name, row in MECHANISMS.items():
        matters: dict[str, list[str]] = {}
        same: dict[str, list[str]] = {}
        for entry in entries:
            found, mode = same, entry["mode"]
            if entry.get("without") == name:
                traffic, temp = entry["traffic"], entry["temp"]
                if abs(traffic) > TRAFFIC or abs(temp) > TEMP:
                    found, mode = matters, f"{mode} {traffic:+.3f}, {temp:+.3f}"
            elif name not in entry.get(SAME, ()):
                continue
            found.setdefault(entry["model"], []).append(mode)
        cells = f"{name}: {row.says}", _grouped(matters), _grouped(same)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _grouped(steps: dict[str, list[str]]) -> str:
    return "; ".join(f"{model} {', '.join(found)}" for model, found in steps.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", help=f"of {', '.join(lean.CASES)}")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--without", default=",".join(MECHANISMS))
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    if args.table:
        print(table(read()))
        return
    warnings.simplefilter("ignore")
    models, modes = args.names or CHEAPEST_FIRST, args.modes.split(",")
    names = args.without.split(",")
    wanted = itertools.product(models, names, modes)
    measure_missing((model, mode, name) for model, name, mode in wanted)


if __name__ == "__main__":
    main()
