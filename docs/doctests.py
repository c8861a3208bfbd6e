"""For the reference: a docstring's doctests become code blocks of the page."""

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?:^>>> .*\n?)(?:^.+\n?)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Fences each paragraph of a docstring that begins with `>>>`."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        del kwargs
        if obj.docstring:
            obj.docstring.value = _DOCTEST.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n",
                obj.docstring.value,
            )
