"""`explain`: which operation autocast runs in which precision, and why."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast import jax_internals
from jamp._autocast.decide import TABLE
from jamp._autocast.frames import frames_of
from jamp._autocast.lists import (
    FUNCTION_ROWS,
    LIBRARY_ROWS,
    SOLVER_ROWS,
    AutocastLists,
    What,
    library_place,
    rule_of,
    rules_for,
)
from jamp._autocast.loops import waits_for_half
from jamp._autocast.marks import KERNEL, MARKERS
from jamp._autocast.primitives import (
    ROWS,
    Row,
    Rule,
    Shape,
    primitive_name,
    traits_of,
)
from jamp._autocast.program import KEPT, NO_MODEL, PRECISION, dtypes_of
from jamp._autocast.reasons import CAST, Note, note_in, notes_in, noting, without_notes
from jamp._autocast.tracing import disabled
from jamp._autocast.transform import Promote, scope_of, written_program
from jamp._state.amp_state import AmpState
from jamp.diagnostics._explanation import Explanation
from jamp.diagnostics._operation import Operation, flops_of, is_fp8
from jamp.diagnostics._source import is_backward, module_path, user_line
from jamp.diagnostics._step import function_first, matmul_dtype, trace_step

_REASONS = {
    **{row.why: row.says for row in TABLE},
    "precision": "It asks for float32 by its `precision`, algorithm or result.",
    "own dtype": "The program itself has a float dtype other than float32 here.",
    "no float32": "Nothing that could be cast.",
    "unknown primitive": "No list has it: it runs as the float32 program has it.",
    "program": "It holds a program: see inside.",
    "half condition": "Its condition depends on a matmul in half, whose rounding may "
    "never let it end. Compute the residual in float32, loosen the tolerance, or limit "
    "the iterations.",
    "kept": "Its weight is a param that this level keeps in float32.",
    "no half param": "None of its operands depends on a param in half.",
    "fp8": "It is a large product of an activation by a weight.",
    "fp8 weight": "Half, not fp8: no plain product of an activation by a weight.",
    "fp8 input": "Half, not fp8: it reads what the model is given.",
    "fp8 last": "Half, not fp8: no product reads what is made of it, as of logits.",
    "fp8 order": "Half, not fp8: `top_k`, `sort` or `argmax` orders its results.",
    "fp8 kept": "Half, not fp8: `Fp8(keep=)` names its weight.",
    "fp8 derivative": "Half, not fp8: a function has a derivative of its own.",
    "fp8 disabled": "Half, not fp8: `disable_fp8`.",
    "fp8 small": "Half, not fp8: too small to gain, see `Fp8(smallest=)`.",
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


@function_first
def explain(
    fn: Callable[..., Any],
    dtype: DTypeLike = jnp.float16,
    *,
    lists: AutocastLists | None = None,
    promote: Promote = "widest",
) -> Callable[..., Explanation]:
    """Explains the precision of each operation, of a function or of a step.

    `explain(fn, dtype)(*args)` explains `autocast(fn, dtype)`. `explain(loss_fn)(state,
    *args)` explains a step at the level of an AmpState, forward and backward. It
    compiles nothing and runs nothing, so that arrays may be `jax.ShapeDtypeStruct`s.

    Args:
        fn: any function of arrays, as for `autocast`; or a loss function, as for
            `scaled_value_and_grad`.
        dtype: float16 or bfloat16. For a state, the level decides this, `lists` and
            `promote`.
        lists: additions to the table of operations.
        promote: "widest" or "narrowest".

    Returns:
        `f(*args, **kwargs) -> Explanation`, or `f(state, *args, **kwargs)`: print it.

    Raises:
        ValueError: `dtype` or `promote` is none of these.
        TypeError: it is given arguments of `fn`.

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
            return _explain_step(fn, args[0], args[1:], kwargs)
        with noting(True):
            program = written_program(fn, args, kwargs, scope)
        default = "region" if disabled.value else ""
        found = _operations(program, _Enclosing(scope.policy.lists, default))
        return Explanation(str(scope.policy.dtype), tuple(found), promote=promote)

    return explained


def _explain_step(
    loss_fn: Callable[..., Any],
    state: AmpState,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Explanation:
    with noting(True):
        program = trace_step(loss_fn, state, args, kwargs).program
    properties = state.properties
    lists = properties.lists or AutocastLists()
    default = "level" if properties.opt_level == "O0" else "gradient"
    found = _operations(program, _Enclosing(lists, default))
    return Explanation(
        dtype=str(matmul_dtype(properties) or "float32"),
        level=properties.opt_level,
        # Drop what the user did not write: the loss scaling and the finite check.
        operations=tuple(op for op in found if op.module or op.source),
    )


class _Enclosing(NamedTuple):
    """The surroundings of a program."""

    lists: AutocastLists  # the user's
    # Why an operation of a step without a note has its dtype; "" for a function, whose
    # operations without a note are not the user's.
    default: str = ""
    path: tuple[str, ...] = ()
    source: str = ""
    names: str = ""  # the name stack of the holder
    times: int = 1  # how often the program runs
    # False for a program that autocast added, such as a checkpoint.
    is_users: bool = True


def _operations(program: jc.Jaxpr, around: _Enclosing) -> Iterator[Operation]:
    decision_on = _decision_in_step if around.default else _decision_in_function
    for eqn in program.eqns:
        own = jax_internals.name_stack(eqn)
        inner = around._replace(names=f"{around.names}/{own}", is_users=False)
        if around.is_users or notes_in(own):
            # JAX keeps no line of what its own jitted functions hold.
            inner = inner._replace(source=user_line(eqn) or around.source)
        decision = decision_on(eqn, own, around)
        if decision is not None:
            yield _operation(eqn, *decision, inner)
        for frame in frames_of(eqn):
            if decision is not None:
                name = f"{eqn.primitive.name} {frame.label}".strip()
                inner = inner._replace(
                    path=(*around.path, name),
                    times=around.times * (frame.trips or 1),
                    is_users=True,
                )
            yield from _operations(frame.program, inner)


def _operation(
    eqn: jc.JaxprEqn, note: Note, reason: str, around: _Enclosing
) -> Operation:
    names = without_notes(around.names)
    dtype = None if note.why == "program" else note.dtype or _own_dtype(eqn)
    flops = flops_of(eqn) if "float" in str(dtype) else None
    is_late = is_backward(names) or note.why in ("derivative", "gradient")
    waits = eqn.primitive.name == "while" and waits_for_half(eqn)
    return Operation(
        path=around.path,
        source=around.source,
        module=module_path(names),
        phase="backward" if is_late else "forward",
        primitive=eqn.primitive.name,
        dtype=dtype,
        rule=note.rule or None,
        why="half condition" if waits else note.why,
        reason=_REASONS["half condition"] if waits else reason,
        flops=None if flops is None else flops * around.times,
    )


def _own_dtype(eqn: jc.JaxprEqn) -> str | None:
    """The dtype of an operation as it is written; None without a result."""
    if traits_of(eqn.primitive.name).shape is Shape.PRODUCT:
        # `preferred_element_type` may say otherwise of the result.
        return max(dtypes_of(eqn.invars[:2]), key=lambda d: jnp.dtype(d).itemsize)
    return next(iter(dtypes_of(eqn.outvars)), None)


# ---- what decided, and why


def _decision_in_function(
    eqn: jc.JaxprEqn, own: str, around: _Enclosing
) -> tuple[Note, str] | None:
    """The note on an operation of the user's function; None for autocast's own.

    `own` is the equation's name stack.
    """
    if frames_of(eqn):
        note = next((note for note in notes_in(own) if note.holds_program), None)
    elif note := note_in(own):
        note = None if note.operands == CAST else note
    elif (note := note_in(around.names)) and not around.is_users:
        note = _note_inside(eqn, note, around)
    else:
        note = None
    return None if note is None else _with_reason(note, around)


def _note_inside(eqn: jc.JaxprEqn, note: Note, around: _Enclosing) -> Note | None:
    """The note on an equation of a function by which autocast computes an operation.

    The equation of the same primitive has the operation's note. The sums and
    exponentials of a softmax follow the lists.
    """
    name = primitive_name(eqn)
    if note.primitive == name:
        return note
    rule = rule_of(around.lists, name)
    if rule is None or name == "convert_element_type":
        return None
    why = "list" if rule is Rule.FLOAT32 else "operands"
    return Note(name, why, rule.value)


def _decision_in_step(
    eqn: jc.JaxprEqn, own: str, around: _Enclosing
) -> tuple[Note, str]:
    """The note on an equation of a program that JAX has differentiated."""
    name, names = primitive_name(eqn), f"{around.names}/{own}"
    listed = rule_of(around.lists, name)
    rule = listed.value if listed else ""
    written = Note(name, around.default, rule, _own_dtype(eqn) or "")
    if around.default == "region":  # of `disable_casts`
        leave = Rule.RECORDED
        written = written._replace(rule=leave.value, region=MARKERS[leave])
    note = note_in(names)
    if frames_of(eqn):
        written = written._replace(why="program")
    elif note and note_in(own) is None and listed is Rule.FLOAT32:
        written = written._replace(why="list")  # of what jamp has put there
    elif note:
        note, reason = _with_reason(note, around)
        if name == note.primitive and not is_backward(names):
            return written._replace(why=note.why), reason
        if note.dtype in ("", written.dtype) or is_fp8(note.dtype, written.dtype):
            reason = f"It is of the derivative of `{note.primitive}`: {reason}"
            return written._replace(why="derivative"), reason
        written = written._replace(why="gradient")
    return _with_reason(written, around)


def _with_reason(note: Note, around: _Enclosing) -> tuple[Note, str]:
    """A note with its final `why`, and the reason in a sentence."""
    note = note._replace(why=_WHY_IN_FLOAT32.get(note.region, note.why))
    return note, _sentence(note, around.lists)


def _sentence(note: Note, lists: AutocastLists) -> str:
    name, region = note.primitive, note.region
    if note.why in ("list", "recorded"):
        return _users_rule(lists, What.PRIMITIVE, name) or _reason_in(ROWS, name)
    if note.why != "region":
        return _REASONS[note.why]
    place = library_place(region)
    return (
        _MARKED_BY.get(region)
        or _users_rule(lists, What.REGION, region)
        or _users_rule(lists, What.FUNCTION, region, region.rpartition(".")[2], place)
        or f"`{region}`: {_reason_in(_FUNCTION_ROWS, place or region)}"
    )


def _users_rule(lists: AutocastLists, what: What, *names: str) -> str:
    """The user's rule for one of some names; "" if there is none."""
    users = dict(rules_for(lists, what))
    found = (name for name in names if name in users)
    return next((f"`lists.with_{what.value}({name!r}, ...)`." for name in found), "")


def _reason_in(rows: tuple[Row, ...], name: str) -> str:
    return next((row.reason for row in rows if name in row.primitives), "")
