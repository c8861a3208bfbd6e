"""Why an operation runs in a dtype: what decided, in a word and in a sentence."""

import jax.numpy as jnp
from jax.extend import core as jc

from jamp._autocast import jax_internals
from jamp._autocast.frames import frames_of
from jamp._autocast.lists import (
    FUNCTION_ROWS,
    LIBRARY_ROWS,
    ROWS,
    SOLVER_ROWS,
    AutocastLists,
    Row,
    Rule,
    What,
    library_place,
)
from jamp._autocast.program import (
    KEPT,
    KERNEL,
    MARKERS,
    NO_MODEL,
    PRECISION,
    dtypes_of,
)
from jamp._autocast.reasons import Note, note_in
from jamp.diagnostics._flops import sizes
from jamp.diagnostics._source import is_backward

_REASONS = {
    "feeder": "What reads its result runs in float32.",
    "bias": "It is the bias of a product, which is part of the product.",
    "fusion": "It is one of a chain on one array, which is fused: rounded at its end.",
    "norm": "It is part of a norm: computed in float32, it goes out in half.",
    "carry": "A loop carries its result in float32: a sum keeps its digits.",
    "operands": "Its operands are in this dtype.",
    "widest": "Its operands differ, and the widest decides.",
    "narrowest": "Its operands differ, and the narrowest decides.",
    "literal": "An operand is a constant that half cannot hold.",
    "smaller operand": "A smaller float32 is broadcast: it is computed in float32.",
    "no vote": "Its operands are constants or masks, which decide nothing.",
    "precision": "It asks for float32 by its `precision`, algorithm or result.",
    "own dtype": "The program itself has a float dtype other than float32 here.",
    "no float32": "Nothing that could be cast.",
    "unknown primitive": "No list has it: it runs as the float32 program has it.",
    "program": "It holds a program: see inside.",
    "kept": "Its weight is a param that this level keeps in float32.",
    "no half param": "None of its operands depends on a param in half.",
    "level": "O0 casts nothing.",
    "gradient": "It is of a gradient, which has the dtype of its value.",
}
_FUNCTION_ROWS = (*FUNCTION_ROWS, *LIBRARY_ROWS, *SOLVER_ROWS)
_WHY_IN_FLOAT32 = {PRECISION: "precision", KEPT: "kept", NO_MODEL: "no half param"}
_MARKED_BY = {
    MARKERS[Rule.HALF]: "`half_function` or `register_half_function`.",
    MARKERS[Rule.FLOAT32]: "`float_function` or `register_float_function`.",
    MARKERS[Rule.PROMOTE]: "`promote_function` or `register_promote_function`.",
    MARKERS[Rule.RECORDED]: "`disable_casts`.",
    KERNEL: "`half_kernel`: it is called with half operands.",
}


def reason_of_note(note: Note, lists: AutocastLists) -> tuple[str, str]:
    """What decided on an operation of the user's, in a word and in a sentence."""
    why = _WHY_IN_FLOAT32.get(note.region, note.why)
    return why, _sentence(why, note.region, note.primitive, lists)


def reason_in_step(
    eqn: jc.JaxprEqn, names: str, lists: AutocastLists, default: str
) -> tuple[str, str]:
    """The same of an equation of a program that JAX has differentiated.

    Args:
        eqn: the equation.
        names: all name scopes that it is in.
        lists: of the level.
        default: the word for what has no note.
    """
    note, name = note_in(names), eqn.primitive.name
    if frames_of(eqn):
        return "program", _REASONS["program"]
    if note is None:
        return default, _REASONS[default]
    own, listed = jax_internals.name_stack(eqn), jax_internals.primitive_name(eqn)
    if note_in(own) is None and lists.rule_of(listed) is Rule.FLOAT32:
        return "list", _sentence("list", "", name, lists)  # of what jamp has put there
    why, reason = reason_of_note(note, lists)
    if name == note.primitive and not is_backward(names):
        return why, reason
    if note.dtype not in ("", own_dtype(eqn)):
        return "gradient", _REASONS["gradient"]
    return "derivative", f"It is of the derivative of `{note.primitive}`: {reason}"


def own_dtype(eqn: jc.JaxprEqn) -> str | None:
    """What an operation runs in as it stands; None without a result."""
    if sizes(eqn):  # `preferred_element_type` may say otherwise of the result
        return max(dtypes_of(eqn.invars[:2]), key=lambda d: jnp.dtype(d).itemsize)
    return next(iter(dtypes_of(eqn.outvars)), None)


def _sentence(why: str, region: str, name: str, lists: AutocastLists) -> str:
    if why in ("list", "recorded"):
        return _of_user(lists, What.PRIMITIVE, name) or _of_table(ROWS, name)
    if why != "region":
        return _REASONS[why]
    if region in _MARKED_BY:
        return _MARKED_BY[region]
    place = library_place(region)
    return (
        _of_user(lists, What.REGION, region)
        or _of_user(lists, What.FUNCTION, region, region.rpartition(".")[2], place)
        or f"`{region}`: {_of_table(_FUNCTION_ROWS, place or region)}"
    )


def _of_user(lists: AutocastLists, what: What, *names: str) -> str:
    """What the user has typed for one of some names; "" if for none."""
    users = dict(lists.rules_for(what))
    found = (name for name in names if name in users)
    return next((f"`lists.with_{what.value}({name!r}, ...)`." for name in found), "")


def _of_table(rows: tuple[Row, ...], name: str) -> str:
    return next((row.reason for row in rows if name in row.primitives), "")
