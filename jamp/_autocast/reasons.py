"""Why each operation is as it is: notes in the written program, for `jamp.explain`.

While somebody explains, `rewrite` writes its decisions into the name scopes of what it
writes. These survive differentiation: backward operations keep the scopes of their
forward ones.
"""

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

import jax
from jax.extend import core as jc

from jamp._autocast import jax_internals

# Whether notes are written. It is part of the key of JAX's trace caches.
noting = jax.make_user_context(default_value=False)
_NOTE = re.compile(":".join(["jamp_why", *[r"([^:/()]*)"] * 6]))
# The `operands` of a cast that autocast has put before an operation.
CAST = "cast"


class Note(NamedTuple):
    """What was decided for an equation of the user's program."""

    primitive: str
    why: str  # one or two words; `jamp.diagnostics` has the sentences
    rule: str = ""  # that was looked up, if one was
    dtype: str = ""  # what its float32 values run in; "" if that was not to be chosen
    region: str = ""  # the mark, function or regex that the rule comes from, if it does
    operands: str = ""  # their dtypes in the user's program

    @property
    def holds_program(self) -> bool:
        """Whether it is of an equation that holds programs, which have their own."""
        return self.why == "program"


def noted(eqn: jc.JaxprEqn, note: Note) -> jc.JaxprEqn:
    """An equation with a note."""
    return jax_internals.with_scope(eqn, ":".join(["jamp_why", *map(_quoted, note)]))


def notes_in(names: str) -> list[Note]:
    """The notes in a name stack; of an autocast in another, its own come first."""
    return [Note(*map(unquote, found)) for found in _NOTE.findall(names)]


def note_in(names: str) -> Note | None:
    """The first that is of an operation, and not of what holds it."""
    return next((n for n in notes_in(names) if not n.holds_program), None)


def without_notes(names: str) -> str:
    """A name stack as it is when nobody explains it."""
    return re.sub(rf"/?{_NOTE.pattern}", "", names)


def _quoted(text: str) -> str:
    """A text that no mark is found in, and no scope begins or ends in."""
    return quote(text, safe="").replace("_", "%5F")
