"""Implements `explain`, which shows the precision of each operation and the reason."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast import jax_internals
from jamp._autocast.decide import TABLE
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
from jamp._autocast.reasons import CAST, Note, note_in, notes_in, noting, without_notes
from jamp._autocast.scope import KEPT, NO_MODEL, PRECISION, dtypes_of
from jamp._autocast.subjaxprs import subjaxprs_of
from jamp._autocast.tracing import disabled
from jamp._autocast.transform import Promote, rewritten_jaxpr, scope_of
from jamp._state.amp_state import AmpState
from jamp.diagnostics._explanation import Explanation, Operation, flops_of, is_fp8
from jamp.diagnostics._source import is_backward, module_path, user_line
from jamp.diagnostics._step import function_first, matmul_dtype, trace_step

_REASONS = {
    **{row.why: row.says for row in TABLE},
    "precision": "Its `precision`, algorithm or result dtype requests float32.",
    "own dtype": "The program itself uses a float dtype other than float32.",
    "no float32": "It has no float32 value to cast.",
    "unknown primitive": "No list contains it, so it keeps the dtypes of the program.",
    "program": "It contains a program. See the operations inside.",
    "half condition": "Its condition depends on a half matmul, so rounding may keep "
    "it from ending. Compute the residual in float32, loosen the tolerance, or limit "
    "the iterations.",
    "kept": "Its weight is a param that this level keeps in float32.",
    "no half param": "None of its operands depends on a half param.",
    "fp8": "It is a large matmul of an activation and a weight.",
    "fp8 weight": "It stays in half: it is not a plain matmul with one weight.",
    "fp8 input": "It stays in half because it reads an input of the model.",
    "fp8 last": "It stays in half, as logits do: no later matmul depends on it.",
    "fp8 order": "It stays in half: `top_k`, `sort` or `argmax` orders its result.",
    "fp8 kept": "It stays in half because `Fp8(keep=)` selects its weight.",
    "fp8 derivative": "It stays in half inside a function with a custom derivative.",
    "fp8 disabled": "It stays in half inside `disable_fp8`.",
    "fp8 small": "It stays in half because it is small; see `Fp8(smallest=)`.",
    "level": "O0 casts nothing.",
    "gradient": "It computes a gradient, which has the dtype of its primal.",
}
_FUNCTION_ROWS = (*FUNCTION_ROWS, *LIBRARY_ROWS, *SOLVER_ROWS)
_WHY_IN_FLOAT32 = {PRECISION: "precision", KEPT: "kept", NO_MODEL: "no half param"}
_MARKED_BY = {
    MARKERS[Rule.HALF]: "`half_function` or `register_half_function` marks it.",
    MARKERS[Rule.FLOAT32]: "`float_function` or `register_float_function` marks it.",
    MARKERS[Rule.PROMOTE]: "`promote_function` or `register_promote_function` marks "
    "it.",
    MARKERS[Rule.RECORDED]: "It is inside `disable_casts`.",
    KERNEL: "A `half_kernel` gets half operands, and autocast casts nothing inside.",
}


@function_first
def explain(
    fn: Callable[..., Any],
    dtype: DTypeLike = jnp.float16,
    *,
    lists: AutocastLists | None = None,
    promote: Promote = "widest",
) -> Callable[..., Explanation]:
    """Explains the precision of each operation in a function or a training step.

    `explain(fn, dtype)(*args)` explains `autocast(fn, dtype)`. `explain(loss_fn)(state,
    *args)` explains a step at the level of an AmpState, forward and backward. It
    compiles and runs nothing, so arguments may be `jax.ShapeDtypeStruct`s.

    Args:
        fn: any function of arrays, as for `autocast`, or a loss function, as for
            `scaled_value_and_grad`.
        dtype: float16 or bfloat16. For a state, the level sets `dtype`, `lists` and
            `promote`.
        lists: additions to the table of operations.
        promote: "widest" or "narrowest".

    Returns:
        A function `f(*args, **kwargs) -> Explanation`, or for a state
        `f(state, *args, **kwargs) -> Explanation`. Print the explanation.

    Raises:
        ValueError: `dtype` or `promote` is invalid.
        TypeError: `explain` also got the arguments of `fn`.

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
            program = rewritten_jaxpr(fn, args, kwargs, scope)
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
    """The context of a program inside the explained program."""

    lists: AutocastLists  # the user's
    # The `why` of an operation without a note. It is "" for a function, because there
    # autocast added every operation without a note.
    default: str = ""
    path: tuple[str, ...] = ()
    source: str = ""
    names: str = ""  # the name stack of the equation that contains the program
    times: int = 1  # the number of times that the program runs
    # False for a program that autocast added, such as a checkpoint.
    is_users: bool = True


def _operations(program: jc.Jaxpr, around: _Enclosing) -> Iterator[Operation]:
    decision_on = _decision_in_step if around.default else _decision_in_function
    for eqn in program.eqns:
        own = str(jax_internals.scopes(eqn))
        inner = around._replace(names=f"{around.names}/{own}", is_users=False)
        if around.is_users or notes_in(own):
            # JAX records no user lines inside its own jitted functions.
            inner = inner._replace(source=user_line(eqn) or around.source)
        decision = decision_on(eqn, own, around)
        if decision is not None:
            yield _operation(eqn, *decision, inner)
        for sub in subjaxprs_of(eqn):
            if decision is not None:
                name = f"{eqn.primitive.name} {sub.label}".strip()
                inner = inner._replace(
                    path=(*around.path, name),
                    times=around.times * (sub.trips or 1),
                    is_users=True,
                )
            yield from _operations(sub.jaxpr, inner)


def _operation(
    eqn: jc.JaxprEqn, note: Note, reason: str, around: _Enclosing
) -> Operation:
    names = without_notes(around.names)
    dtype = None if note.why == "program" else note.dtype or _own_dtype(eqn)
    flops = flops_of(eqn) if "float" in str(dtype) else None
    is_late = is_backward(names) or note.why in ("derivative", "gradient")
    why = note.why
    if eqn.primitive.name == "while" and waits_for_half(eqn):
        why, reason = "half condition", _REASONS["half condition"]
    return Operation(
        path=around.path,
        source=around.source,
        module=module_path(names),
        phase="backward" if is_late else "forward",
        primitive=eqn.primitive.name,
        dtype=dtype,
        rule=note.rule or None,
        why=why,
        reason=reason,
        flops=None if flops is None else flops * around.times,
    )


def _own_dtype(eqn: jc.JaxprEqn) -> str | None:
    """Returns the dtype of an operation in the written program, if it has a result."""
    if traits_of(eqn.primitive.name).shape is Shape.MATMUL:
        # `preferred_element_type` may give the result another dtype.
        return max(dtypes_of(eqn.invars[:2]), key=lambda d: jnp.dtype(d).itemsize)
    return next(iter(dtypes_of(eqn.outvars)), None)


# ---- decisions and their reasons


def _decision_in_function(
    eqn: jc.JaxprEqn, own: str, around: _Enclosing
) -> tuple[Note, str] | None:
    """Returns the note on an operation, or None if autocast added the operation.

    `own` is the equation's name stack.
    """
    if subjaxprs_of(eqn):
        note = next((note for note in notes_in(own) if note.holds_jaxpr), None)
    elif note := note_in(own):
        is_own = note.operands != CAST and note.primitive == primitive_name(eqn)
        note = note if is_own else None
    elif (note := note_in(around.names)) and not around.is_users:
        note = _note_inside(eqn, note, around)
    else:
        note = None
    return None if note is None else _with_reason(note, around)


def _note_inside(eqn: jc.JaxprEqn, note: Note, around: _Enclosing) -> Note | None:
    """Returns the note on an equation inside a function that replaces an operation.

    The equation with the operation's primitive has the operation's note. Other
    equations, such as the sums and exponentials of a softmax, follow the lists.
    """
    name = primitive_name(eqn)
    if note.primitive == name:
        return note
    rule = rule_of(around.lists, name)
    if rule is None or name.startswith(("convert_element_type", "jamp_")):
        return None
    why = "list" if rule is Rule.FLOAT32 else "operands"
    return Note(name, why, rule.value)


def _decision_in_step(
    eqn: jc.JaxprEqn, own: str, around: _Enclosing
) -> tuple[Note, str]:
    """Returns the note on an equation of a differentiated program."""
    name, names = primitive_name(eqn), f"{around.names}/{own}"
    listed = rule_of(around.lists, name)
    rule = listed.value if listed else ""
    written = Note(name, around.default, rule, _own_dtype(eqn) or "")
    if around.default == "region":  # inside `disable_casts`
        leave = Rule.RECORDED
        written = written._replace(rule=leave.value, region=MARKERS[leave])
    note = note_in(names)
    if subjaxprs_of(eqn):
        written = written._replace(why="program")
    elif note and note_in(own) is None and listed is Rule.FLOAT32:
        written = written._replace(why="list")  # jamp added this equation
    elif note:
        note, reason = _with_reason(note, around)
        if name == note.primitive and not is_backward(names):
            return written._replace(why=note.why), reason
        if note.dtype in ("", written.dtype) or is_fp8(note.dtype, written.dtype):
            reason = f"It belongs to the derivative of `{note.primitive}`: {reason}"
            return written._replace(why="derivative"), reason
        written = written._replace(why="gradient")
    return _with_reason(written, around)


def _with_reason(note: Note, around: _Enclosing) -> tuple[Note, str]:
    """Returns a note with its final `why`, and a sentence with the reason."""
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
    """Names the user's rule for one of the names; "" if there is none."""
    users = dict(rules_for(lists, what))
    found = (name for name in names if name in users)
    rule = next((f"`lists.with_{what.value}({name!r}, ...)`" for name in found), "")
    return rule and f"{rule} sets its rule."


def _reason_in(rows: tuple[Row, ...], name: str) -> str:
    return next((row.reason for row in rows if name in row.primitives), "")
