"""Measure each mechanism of autocast: compile training steps with it switched off.

    python -m benchmarks.ablations            # adds missing runs
    python -m benchmarks.ablations gpt2 vit --modes O5 --without softmax,islands
    python -m benchmarks.ablations --table    # prints saved results

Steps are compiled for an H200, as in `benchmarks.lean`, and compared with steps by
hand. An entry of benchmarks/results/ablations.json is a model, a mode and at most one
of `benchmarks.mechanisms`. The script saves each entry at once, so you can stop it and
continue later. It does not compile a program twice. A change of jamp/_autocast makes
earlier entries count as missing.
"""

import argparse
import contextlib
import itertools
import json
import pathlib
import warnings
from collections.abc import Iterable
from typing import Any

from benchmarks import lean
from benchmarks.mechanisms import MECHANISMS, without

type Entry = dict[str, Any]

RESULTS = pathlib.Path(__file__).parent / "results" / "ablations.json"
MODES = ("widest", "narrowest", "O5")
AS_IS = "none"
# A difference matters above this share of the traffic or the memory by hand.
TRAFFIC, TEMP = 0.002, 0.01
# Sorted by compile time, from 10 seconds to a minute.
CHEAPEST_FIRST = (
    *("gpt2", "vit", "lstm", "bert", "mixer", "resnet50", "gpt2-scan", "linen"),
    *("tied", "words", "llama", "moe", "convnext", "unet", "efficientnet"),
)


# Measure.


def read() -> list[Entry]:
    return json.loads(RESULTS.read_text()) if RESULTS.exists() else []


def _write(entries: list[Entry]) -> None:
    lines = ",\n".join(map(json.dumps, entries))
    RESULTS.write_text(f"[\n{lines}\n]\n")


def _key(entry: Entry) -> tuple[str, str, str]:
    return entry["model"], entry["mode"], entry["without"]


def measure(model: str, mode: str, mechanism: str) -> Entry:
    """Returns the entry of a step without a mechanism, or of the step as it is."""
    off = contextlib.nullcontext() if mechanism == AS_IS else without(mechanism)
    by_hand = lean.measure(model, mode, False)
    with off:
        found = lean.measure(model, mode, True).over(by_hand)
    figures = {name: round(x, 4) for name, x in found._asdict().items()}
    return {"model": model, "mode": mode, "without": mechanism} | figures


def measure_missing(wanted: Iterable[tuple[str, str, str]]) -> None:
    """Adds missing entries, and replaces entries of another version of autocast."""
    here = lean.conditions("H200")
    entries = {_key(entry): entry for entry in read()}
    for key in wanted:
        if here.items() <= entries.get(key, {}).items():
            continue
        entries[key] = entry = measure(*key) | here
        _write(list(entries.values()))
        print(*key, *(entry[name] for name in lean.Measured._fields), flush=True)


# The table.


def table(entries: list[Entry]) -> str:
    """Lists the steps where each mechanism matters and where it does not.

    A figure is the extra cost without the mechanism, relative to the step by hand.
    """
    by_key = {_key(entry): entry for entry in entries}
    lines = ["| without | traffic, temp | no difference |", "|---|---|---|"]
    for name, row in MECHANISMS.items():
        matters, same = [], []
        for model, mode, _ in [key for key in by_key if key[2] == name]:
            more = _more(by_key[model, mode, name], by_key.get((model, mode, AS_IS)))
            if more is None:
                continue
            if abs(more[0]) > TRAFFIC or abs(more[1]) > TEMP:
                matters.append(f"{model} {mode} {more[0]:+.3f}, {more[1]:+.3f}")
            else:
                same.append((model, mode))
        lines.append(
            f"| {name}: {row.says} | {'; '.join(matters)} | {_grouped(same)} |"
        )
    return "\n".join(lines)


def _more(entry: Entry, as_is: Entry | None) -> tuple[float, float] | None:
    """Returns the difference in traffic and temp, or None if the conditions differ."""
    if as_is is None or any(entry[name] != as_is[name] for name in ("jax", "commit")):
        return None
    return tuple(entry[name] - as_is[name] for name in ("traffic", "temp"))


def _grouped(steps: list[tuple[str, str]]) -> str:
    modes: dict[str, list[str]] = {}
    for model, mode in steps:
        modes.setdefault(model, []).append(mode)
    return "; ".join(f"{model} {', '.join(found)}" for model, found in modes.items())


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
    names = (AS_IS, *args.without.split(","))
    wanted = itertools.product(models, names, modes)
    measure_missing((model, mode, name) for model, name, mode in wanted)


if __name__ == "__main__":
    main()
