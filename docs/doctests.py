"""Adapt docstrings to the parser of the site's reference."""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?:^>>> .*\n?)(?:^.+\n?)*", re.MULTILINE)
_RETURNS = re.compile(r"^Returns:\n(?:    .*\n?)+", re.MULTILINE)
_COLON = re.compile(r"(`[^`]*`)|:(?=\s)")


class Doctests(griffe.Extension):
    """Fences each paragraph that begins with `>>>`, and keeps sentences whole."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        del kwargs
        if obj.docstring:
            text = _DOCTEST.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n",
                obj.docstring.value,
            )
            text = text.replace("Raises (when called):", "Raises:")
            obj.docstring.value = _RETURNS.sub(_sentence, text)


def _sentence(found: re.Match[str]) -> str:
    """Escapes the colon in a `Returns:` section, which the parser takes for a type."""
    head, _, text = found[0].partition("\n")
    return head + "\n" + _COLON.sub(lambda m: m[1] or "&#58;", text)
