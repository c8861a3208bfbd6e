"""Print the cost of compiled steps and the lines of the model that move most bytes.

    step = h200.compile_step(train_step, state, batch)
    print(report({"O2": step, "by hand": h200.compile_step(by_hand, params, batch)}))

The first program is 100 %.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.hlo import Program
from jamp.diagnostics._source import is_installed, module_path

_SHOWN = 6


class Part(NamedTuple):
    """The bytes that the kernels of one line of a module read and write."""

    module: str
    source: str  # `file:line`, or "" if unknown
    kernels: int
    traffic: int


def report(programs: Mapping[str, Program]) -> str:
    """Prints a line per program, then its matmuls, collectives and traffic by line."""
    first, *_ = programs.values()
    lines = []
    for name, program in programs.items():
        share = program.traffic / first.traffic
        lines.append(
            f"{name}: {program.kernels} kernels move {program.traffic / 1e6:.3f} MB "
            f"({share:.0%}), temp {program.temp / 1e6:.3f} MB"
        )
    for name, program in programs.items():
        lines += [f"{name}: {n} {' x '.join(k)}" for k, n in program.products.items()]
        for (kind, dtype), n in program.collectives.items():
            lines.append(f"{name}: a device gives {n} B of {dtype} to {kind}")
        for part in parts(program)[:_SHOWN]:
            where = " ".join(filter(None, part[:2])) or "(no name)"
            lines.append(
                f"{name}: {part.traffic / 1e6:.3f} MB, {part.kernels} kernels: {where}"
            )
    return "\n".join(lines)


def parts(program: Program) -> list[Part]:
    """Returns the costs by module and line, with the largest first."""
    lines = _lines_of_frames(program.text)
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for instruction, cost in program.launches():
        names = instruction.attribute(r'op_name="([^"]*)"') or ""
        frame = instruction.attribute(r"stack_frame_id=(\d+)")
        # Drop the jitted function and the operation.
        module, _, _ = module_path(names.partition("/")[2]).rpartition("/")
        key = module, lines.get(frame or "", "")
        found.setdefault(key, []).append(cost)
    made = [
        Part(*key, *(round(sum(column)) for column in zip(*costs, strict=True)))
        for key, costs in found.items()
    ]
    return sorted(made, key=lambda part: -part.traffic)


def _lines_of_frames(text: str) -> dict[str, str]:
    """Maps each stack frame to the innermost line of the user's code."""
    _, _, names = text.partition("\nFileNames\n")
    names, _, _ = names.partition("\nFunctionNames\n")
    files = dict(re.findall(r'^(\d+) "(.*)"$', names, re.MULTILINE))
    place = r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+) "
    places = {
        number: f"{files[file]}:{line}"
        for number, file, line in re.findall(place, text, re.MULTILINE)
        if file in files and not is_installed(files[file])
    }
    frame = r"^(\d+) \{file_location_id=(\d+)(?: parent_frame_id=(\d+))?"
    lines: dict[str, str] = {}
    for number, at, parent in re.findall(frame, text, re.MULTILINE):
        outer = str(int(parent or 0) - 1)  # `parent` is its number plus one
        lines[number] = places.get(at) or lines.get(outer, "")  # already read
    return lines
