"""`explain`: which operation autocast runs in which precision, and why."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jc
from jax.typing import DTypeLike

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
from jamp._autocast.reasons import CAST, Note, note_in, notes_in, noting, without_notes
from jamp._autocast.transform import Promote, scope_of, written_program
from jamp._state.amp_state import AmpState
from jamp.diagnostics._explanation import Explanation
from jamp.diagnostics._operation import Operation, bytes_of, flops, sizes
from jamp.diagnostics._source import is_backward, module_path, user_line
from jamp.diagnostics._step import Call, call_of, traced

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


def explain(
    fn: Callable[..., Any],
    dtype: DTypeLike = jnp.float16,
    *,
    lists: AutocastLists | None = None,
    promote: Promote = "widest",
) -> Callable[..., Explanation]:
    """Says what runs in which precision: of a function under autocast, or of a step.

    `explain(fn, dtype)(*args)` says what `autocast(fn, dtype)` does with each
    operation, and why; the answer comes from autocast itself. `explain(loss_fn)(state,
    *args)` says what a step at the level of an AmpState runs, forward and backward.
    Nothing is compiled and nothing runs, so that `jax.ShapeDtypeStruct` will do for
    arrays.

    Args:
        fn: any function of arrays, as for `autocast`; or a loss function, as for
            `scaled_value_and_grad`.
        dtype: float16 or bfloat16. Of a state, the level decides this and what follows.
        lists: additions to the table of operations.
        promote: "widest" or "narrowest".

    Returns:
        A function of the arguments of `fn`, or of a state and the arguments after the
        params, that returns an `Explanation`: `print` it.

    Raises:
        ValueError: `dtype` or `promote` is none of these.

    >>> import jax, jax.numpy as jnp
    >>> x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    >>> explanation = explain(lambda w, x: jnp.exp(x @ w))(x, x)
    >>> for op in explanation.operations:
    ...     print(op.primitive, op.dtype, op.rule, op.flops)
    dot_general float16 half 1024
    exp float32 float32 None
    >>> explanation.half_share
    1.0
    """
    scope = scope_of(dtype, lists, promote)

    def explained(*args: Any, **kwargs: Any) -> Explanation:
        if args and isinstance(args[0], AmpState):
            return explain_step(call_of("explain", fn, args[0], args[1:], kwargs))
        with noting(True):
            program = written_program(fn, args, kwargs, scope)
        found = _operations(program, scope.policy.lists, _Enclosing())
        return Explanation(str(scope.policy.dtype), tuple(found), promote=promote)

    return explained


def explain_step(call: Call) -> Explanation:
    """Explains a step, forward and backward."""
    with noting(True):
        program = traced(call).program
    properties = call.state.properties
    lists = properties.lists or AutocastLists()
    half = properties.cast_model_type or properties.patch_functions_type
    default = "level" if properties.opt_level == "O0" else "gradient"
    found = _operations(program, lists, _Enclosing(default=default))
    # Not what nobody wrote: the scale, the finite check.
    return Explanation(
        dtype=str(half or jnp.dtype(jnp.float32)),
        level=properties.opt_level,
        operations=tuple(op for op in found if op.module or op.source),
    )


class _Enclosing(NamedTuple):
    """What a program is inside of, on which line, and how often it runs there."""

    path: tuple[str, ...] = ()  # this and the next as of an `Operation`
    source: str = ""
    names: str = ""  # the name stack of what holds the program
    times: int = 1
    # Whether the user's program has it too: not if autocast has put it there, as a
    # checkpoint or to compute an operation.
    is_users: bool = True
    # Of a step, whose operations are all shown, why those without a note are as they
    # are; "" of a function: of that, the user's are shown.
    default: str = ""


def _operations(
    program: jc.Jaxpr, lists: AutocastLists, around: _Enclosing
) -> Iterator[Operation]:
    for eqn in program.eqns:
        own = jax_internals.name_stack(eqn)
        here = around._replace(names=f"{around.names}/{own}")
        if around.is_users or notes_in(own):
            # JAX keeps no line of what its own jitted functions hold.
            here = here._replace(source=user_line(eqn) or around.source)
        note = _note_of(eqn, own, lists, around)
        is_shown = note is not None or bool(around.default)
        if is_shown:
            yield _operation(eqn, note, lists, here)
        for frame in frames_of(eqn):
            inner = here._replace(is_users=is_shown)
            if is_shown:
                name = f"{eqn.primitive.name} {frame.label}".strip()
                times = around.times * (frame.trips or 1)
                inner = inner._replace(path=(*around.path, name), times=times)
            yield from _operations(frame.program, lists, inner)


def _note_of(
    eqn: jc.JaxprEqn, own: str, lists: AutocastLists, around: _Enclosing
) -> Note | None:
    """What was decided on an operation of the user's function; None if it is not one.

    The equation is as autocast wrote it, and `own` is its name stack.
    """
    if around.default:
        return None
    if frames_of(eqn):
        return next((note for note in notes_in(own) if note.holds_program), None)
    if note := note_in(own):
        return None if note.operands == CAST else note
    note, name = note_in(around.names), eqn.primitive.name
    if around.is_users or note is None:
        return None
    # Autocast computes an operation by a function of its own: what does the same there
    # stands for it. A softmax's sums and exponentiates too, by the lists.
    if note.primitive == name:
        return note
    rule = lists.rule_of(jax_internals.primitive_name(eqn))
    if rule is None or name == "convert_element_type":
        return None
    why = "list" if rule is Rule.FLOAT32 else "operands"
    return Note(name, why, rule.value, operands=" ".join(dtypes_of(eqn.invars)))


def _operation(
    eqn: jc.JaxprEqn, note: Note | None, lists: AutocastLists, around: _Enclosing
) -> Operation:
    names, count = without_notes(around.names), flops(eqn)
    frames = frames_of(eqn)
    if note is None:
        why, reason = _reason_in_step(eqn, around.names, lists, around.default)
        listed = lists.rule_of(jax_internals.primitive_name(eqn))
        rule, dtype = listed.value if listed else None, _own_dtype(eqn)
        in_dtypes = dtypes_of(eqn.invars)
    else:
        why, reason = _reason_of_note(note, lists)
        rule, dtype = note.rule or None, note.dtype or _own_dtype(eqn)
        in_dtypes = tuple(note.operands.split())
    return Operation(
        path=around.path,
        source=around.source,
        name_stack="/".join(filter(None, names.split("/"))),
        module=module_path(names),
        primitive=eqn.primitive.name,
        trips=frames[0].trips if frames else 1,
        in_dtypes=in_dtypes,
        dtype=None if why == "program" else dtype,
        rule=rule,
        why=why,
        reason=reason,
        flops=None if count is None else count * around.times,
        sizes=sizes(eqn),
        bytes=bytes_of(eqn) * around.times,
    )


# ---- why


def _reason_of_note(note: Note, lists: AutocastLists) -> tuple[str, str]:
    """What decided on an operation of the user's, in a word and in a sentence."""
    why = _WHY_IN_FLOAT32.get(note.region, note.why)
    return why, _sentence(why, note.region, note.primitive, lists)


def _reason_in_step(
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
    why, reason = _reason_of_note(note, lists)
    if name == note.primitive and not is_backward(names):
        return why, reason
    if note.dtype not in ("", _own_dtype(eqn)):
        return "gradient", _REASONS["gradient"]
    return "derivative", f"It is of the derivative of `{note.primitive}`: {reason}"


def _own_dtype(eqn: jc.JaxprEqn) -> str | None:
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
