r"""Convert `$\eta$` and `$$w - \eta g$$` into MathML, which browsers draw."""

import re
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

_FORMULA = r"\$\$(?P<block>[^$]+)\$\$|\$(?P<line>[^\s$](?:[^$]*[^\s$])?)\$"
_AFTER_CODE = 185  # and before backslash escapes, which would break formulas


class _Formulas(InlineProcessor):
    def handleMatch(self, m: re.Match[str], data: str) -> tuple[Any, int, int]:  # noqa: N802
        del data
        display = "block" if m["block"] else "inline"
        mathml = convert(m["block"] or m["line"], display=display)
        return self.md.htmlStash.store(mathml), m.start(0), m.end(0)


class Formulas(Extension):
    def extendMarkdown(self, md: Markdown) -> None:  # noqa: N802
        md.inlinePatterns.register(_Formulas(_FORMULA, md), "formulas", _AFTER_CODE)
