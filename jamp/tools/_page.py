"""An explanation as one HTML page: modules, operations, lines of the source."""

import importlib.resources
import linecache
import string
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from jamp.diagnostics._explanation import Explanation
from jamp.diagnostics._operation import Operation
from jamp.diagnostics._table import CELLS, ModuleGroup, modules_of, short

_AROUND = range(-2, 3)  # the lines shown beside one with operations
_COLUMNS = ("operation", "runs in", "module", "line", "FLOPs", "bytes", "why")
_COLORS = (("half", "half"), ("wide", "float32"), ("both", "both"))


def page(explanation: Explanation) -> str:
    """The page, of the operations that compute floats."""
    shown = [op for op in explanation.operations if op.matters]
    lines = {line: i for i, line in enumerate(dict.fromkeys(op.source for op in shown))}
    chips = (f'<span class="chip {kind}">{words}</span> ' for kind, words in _COLORS)
    warnings = "".join(f"<li>{escape(text)}</li>" for text in explanation.warnings)
    products_first = sorted(
        enumerate(shown), key=lambda row: not row[1].is_float_matmul
    )
    template = importlib.resources.files("jamp.tools").joinpath("page.html")
    return string.Template(template.read_text("utf-8")).substitute(
        title=escape(explanation.title),
        legend="".join(chips),
        modules="".join(_modules(modules_of(shown), 1)),
        head="".join(f"<th>{name}</th>" for name in _COLUMNS),
        rows="".join(_row(i, op, lines[op.source]) for i, op in products_first),
        sources="".join(_sources(shown, lines)),
        hidden="" if warnings else " hidden",
        warnings=warnings,
    )


def _row(i: int, op: Operation, line: int) -> str:
    cells = {name: escape(CELLS[name](op)) for name in _COLUMNS}
    cells |= {
        "operation": f'<a href="#op{i}">{escape(op.primitive)}</a>',
        "runs in": f'<span class="chip {_kind([op])}">{op.dtype}</span>',
        "module": cells["module"].replace("/", "/<wbr>")
        + (" (backward)" if op.is_backward else ""),
        "line": f'<a href="#line{line}">{cells["line"]}</a>',
    }
    attributes = {
        "why": f' title="{escape(op.reason)}"',
        **dict.fromkeys(("FLOPs", "bytes"), ' class="number"'),
    }
    tds = (f"<td{attributes.get(n, '')}>{cell}</td>" for n, cell in cells.items())
    return f'<tr id="op{i}" data-line="line{line}">{"".join(tds)}</tr>'


def _modules(groups: Iterable[ModuleGroup], depth: int) -> Iterator[str]:
    for group in groups:
        share = group.share
        name = f'<a href="#q={escape(group.path)}">{escape(group.label)}</a>'
        numbers = group.flops + (f", {share} in half" if share else "")
        bar = f'<meter max="100" value="{share.rstrip("%")}"></meter>' if share else ""
        line = f"{name} <small>{numbers} {bar}</small>"
        if group.inside:
            inside = "".join(_modules(group.inside, depth + 1))
            is_open = " open" if depth < 3 else ""
            line = f"<summary>{line}</summary><ul>{inside}</ul>"
            line = f"<details{is_open}>{line}</details>"
        yield f'<li class="{_kind(group.operations)}">{line}</li>'


def _kind(operations: Iterable[Operation]) -> str:
    """The color: "half", "wide" for wider ones, or "both"."""
    kinds = {"half" if op.is_half else "wide" for op in operations}
    return "both" if len(kinds) > 1 else kinds.pop()


def _sources(shown: Sequence[Operation], lines: dict[str, int]) -> Iterator[str]:
    """The lines with operations, and a few around them, by file."""
    files: dict[str, dict[int, list[Operation]]] = {}
    for op in shown:
        file, _, number = op.source.rpartition(":")
        if number.isdigit():
            files.setdefault(file, {}).setdefault(int(number), []).append(op)
    for file, marked in files.items():
        text = dict(enumerate(linecache.getlines(file), 1))
        near = {n + d for n in marked for d in _AROUND}
        spans = []
        for number in sorted(near & text.keys()):
            if spans and number - 1 not in near:
                spans.append('<span class="gap">⋮</span>')
            where, label = "", str(number)
            if operations := marked.get(number, []):
                source = operations[0].source
                where = f' id="line{lines[source]}" class="{_kind(operations)}"'
                label = f'<a href="#q={escape(short(source))}">{number}</a>'
            code = escape(text[number].rstrip("\n")) or " "
            spans.append(f"<span{where}><i>{label}</i> {code}</span>")
        if spans:
            yield f"<h3>{escape(short(file))}</h3><pre>{''.join(spans)}</pre>"
