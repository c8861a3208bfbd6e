"""Why each operation of a step is as it is: notes that survive differentiation.

`jamp.explain` of a function gets the decisions from `rewrite`. Of a step it sees the
program after differentiation, which holds no decisions; but backward operations keep
the name scopes of their forward ones. So while a step is explained, `rewrite` writes
its decisions into these.
"""

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

import jax
from jax.extend import core as jc

from jamp._autocast import jax_internals

# Whether notes are written. It is part of the key of JAX's trace caches.
noting = jax.make_user_context(default_value=False)
_NOTE = re.compile(":".join(["jamp_why", *[r"([^:/()]*)"] * 4]))


class Note(NamedTuple):
    """What decided on which operation, as in `Decision`; `dtype` is "" if none did."""

    why: str
    region: str
    primitive: str
    dtype: str


def noted(eqn: jc.JaxprEqn, note: Note) -> jc.JaxprEqn:
    """An equation with a note."""
    return jax_internals.in_scope(eqn, ":".join(["jamp_why", *map(_quoted, note)]))


def note_in(names: str) -> Note | None:
    """The note in a name stack, if there is one; of an autocast in another, its own."""
    found = _NOTE.search(names)
    return Note(*map(unquote, found.groups())) if found else None


def without_notes(names: str) -> str:
    """A name stack as it is when nobody explains it."""
    return re.sub(rf"/?{_NOTE.pattern}", "", names)


def _quoted(text: str) -> str:
    """A text that no mark is found in, and no scope begins or ends in."""
    return quote(text, safe="").replace("_", "%5F")
