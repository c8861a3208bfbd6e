"""Notes in the rewritten program on why each operation has its dtype.

For `jamp.explain`, `rewrite` writes its decisions into the name scopes of the new
equations. JAX keeps name scopes when it differentiates: backward operations have the
scopes of their forward operations.
"""

import re
from typing import NamedTuple
from urllib.parse import quote, unquote

import jax
from jax.extend import core as jc

from jamp._autocast import jax_internals

# Whether `rewrite` writes notes. This is part of the key of JAX's trace caches.
noting = jax.make_user_context(default_value=False)
_NOTE = re.compile(":".join(["jamp_why", *[r"([^:/()]*)"] * 6]))
# The `operands` in the note on a cast that autocast adds before an operation.
CAST = "cast"


class Note(NamedTuple):
    """The decision on an equation of the user's program."""

    primitive: str
    why: str  # one or two words; `jamp.diagnostics` has the sentences
    rule: str = ""  # the rule in the lists, if there is one
    dtype: str = ""  # the dtype of its float32 values; "" if nothing chose it
    region: str = ""  # the mark, function or regex that sets the rule, if any
    operands: str = ""  # the dtypes of its operands in the user's program

    @property
    def holds_jaxpr(self) -> bool:
        """Returns whether the equation contains programs with their own notes."""
        return self.why == "program"


def noted(eqn: jc.JaxprEqn, note: Note) -> jc.JaxprEqn:
    """Adds a note to an equation."""
    return jax_internals.with_scope(eqn, ":".join(["jamp_why", *map(_quoted, note)]))


def notes_in(names: str) -> list[Note]:
    """Returns the notes in a name stack, of an inner autocast first."""
    return [Note(*map(unquote, found)) for found in _NOTE.findall(names)]


def note_in(names: str) -> Note | None:
    """Returns the first note on an operation, not on an equation that contains it."""
    return next((n for n in notes_in(names) if not n.holds_jaxpr), None)


def without_notes(names: str) -> str:
    """Removes the notes from a name stack."""
    return re.sub(rf"/?{_NOTE.pattern}", "", names)


def _quoted(text: str) -> str:
    """Escapes a text so that it contains no marks and no borders of scopes."""
    return quote(text, safe="").replace("_", "%5F")
