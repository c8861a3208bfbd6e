"""An explanation as one HTML page: modules, operations, lines of the source."""

import linecache
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from jamp.diagnostics._modules import Module, flops_of, label, magnitude, modules_of
from jamp.diagnostics._operation import Operation
from jamp.diagnostics._table import short
from jamp.tools._page_style import SCRIPT, STYLE

_AROUND = range(-2, 3)  # the lines shown beside one with operations
_COLUMNS = ("operation", "runs in", "module", "line", "FLOPs", "bytes", "why")


def page(title: str, operations: Iterable[Operation], warnings: Iterable[str]) -> str:
    """The page, of the operations that compute floats."""
    shown = [op for op in operations if op.matters]
    lines = {line: i for i, line in enumerate(dict.fromkeys(op.source for op in shown))}
    rows = (_row(i, op, lines[op.source]) for i, op in enumerate(shown))
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    listed = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    legend = "".join(
        f'<span class="chip {kind}">{words}</span> '
        for kind, words in (("half", "half"), ("wide", "float32"), ("both", "both"))
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>jamp: {escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<header>
<h1>What runs in which precision</h1>
<p>{escape(title)}</p>
<p><input id="search" type="search" placeholder="search: exp float32, model.py:12"
 aria-label="search"> <span id="count"></span> {legend}</p>
</header>
<main>
<nav><h2>Modules</h2><ul>{"".join(_modules(modules_of(shown), 1))}</ul></nav>
<section><h2>Operations</h2>
<div class="list">
<table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table>
</div></section>
<section><h2>Source</h2>{"".join(_sources(shown, lines))}</section>
<section{"" if listed else " hidden"}><h2>Warnings</h2><ul>{listed}</ul></section>
</main>
<script>{SCRIPT}</script>
</body>
</html>
"""


def _row(i: int, op: Operation, line: int) -> str:
    place = escape(short(op.source))
    module = escape(op.module).replace("/", "/<wbr>")
    cells = (
        f'<td><a href="#op{i}">{escape(op.primitive)}</a></td>',
        f'<td><span class="chip {_kind([op])}">{op.dtype}</span></td>',
        f"<td>{module}{' (backward)' if op.is_backward else ''}</td>",
        f'<td><a href="#line{line}">{place}</a></td>',
        f'<td class="number">{magnitude(op.flops or 0)}</td>',
        f'<td class="number">{magnitude(op.bytes)}</td>',
        f'<td title="{escape(op.reason)}">{escape(op.why)}</td>',
    )
    return f'<tr id="op{i}" data-line="line{line}">{"".join(cells)}</tr>'


def _modules(module: Module, depth: int) -> Iterator[str]:
    for group in module.groups():
        first = group[0]
        name = f'<a href="#q={escape(first.path)}">{escape(label(group))}</a>'
        share = first.share()
        numbers = flops_of(group) + (f", {share} in half" if share else "")
        width = share.rstrip("%") or "0"
        bar = f'<meter max="100" value="{width}"></meter>' if share else ""
        line = f"{name} <small>{numbers} {bar}</small>"
        inside = "".join(_modules(first, depth + 1))
        if inside:
            is_open = " open" if depth < 3 else ""
            line = f"<summary>{line}</summary><ul>{inside}</ul>"
            line = f"<details{is_open}>{line}</details>"
        yield f'<li class="{_kind(first.all())}">{line}</li>'


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
        text = linecache.getlines(file)
        if not text:
            continue
        yield f"<h3>{escape(short(file))}</h3><pre>"
        before = 0
        near = {n + d for n in marked for d in _AROUND}
        for number in sorted(near.intersection(range(1, len(text) + 1))):
            if before and number > before + 1:
                yield '<span class="gap">⋮</span>'
            before = number
            code = escape(text[number - 1].rstrip("\n")) or " "
            if number not in marked:
                yield f"<span><i>{number}</i> {code}</span>"
                continue
            source = marked[number][0].source
            link = f'<a href="#q={escape(short(source))}">{number}</a>'
            kind = _kind(marked[number])
            yield (
                f'<span id="line{lines[source]}" class="{kind}">'
                f"<i>{link}</i> {code}</span>"
            )
        yield "</pre>"
