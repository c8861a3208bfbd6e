"""`explain`: which operation autocast runs in which precision, and why."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast import jax_internals
from jamp._autocast.lists import AutocastLists
from jamp._autocast.program import Decision, dtype_of, is_float32, size_of
from jamp._autocast.reasons import noting, without_notes
from jamp._autocast.transform import Promote, decisions, scope_of
from jamp._state.amp_state import AmpState
from jamp.diagnostics._explanation import Explanation, Operation
from jamp.diagnostics._flops import flops, sizes
from jamp.diagnostics._reasons import because, dtypes_of, own_dtype
from jamp.diagnostics._source import module_path, user_line
from jamp.diagnostics._step import StepFn, step_fn, traced


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
            arguments = {"args": args[1:], "kwargs": kwargs}
            return explain_step(step_fn(fn), args[0], arguments)
        decided = decisions(fn, args, kwargs, scope)
        found = _operations(decided, scope.policy.lists, _Place())
        return Explanation(str(scope.policy.dtype), tuple(found), promote=promote)

    return explained


def explain_step(fn: StepFn, state: AmpState, arguments: dict[str, Any]) -> Explanation:
    """Explains a function of a state and arguments that gives loss and gradients."""
    with noting(True):
        program = traced(fn, (state, arguments)).program
    properties = state.properties
    lists = properties.lists or AutocastLists()
    half = properties.cast_model_type or properties.patch_functions_type
    default = "level" if properties.opt_level == "O0" else "gradient"
    decided = _recorded(program, lists, default)
    found = _operations(decided, lists, _Place(is_written=True))
    # Not what nobody wrote: the scale, the finite check.
    return Explanation(
        dtype=str(half or jnp.dtype(jnp.float32)),
        level=properties.opt_level,
        operations=tuple(op for op in found if op.module or op.source),
    )


def _recorded(
    program: jc.Jaxpr, lists: AutocastLists, why: str, names: str = ""
) -> list[Decision]:
    """The equations of a program that is written: what decided is in its notes.

    `why` is the word for what has none, `names` the name stack around the program.
    """
    decided = []
    for eqn in program.eqns:
        rule = lists.rule_of(jax_internals.primitive_name(eqn))
        here = f"{names}/{jax_internals.name_stack(eqn)}"
        inside = jax_internals.programs_in(eqn)
        programs = tuple(_recorded(p, lists, why, here) for p in inside)
        word = "program" if programs else why
        decided.append(Decision(eqn, here, rule, None, word, "", programs))
    return decided


class _Place(NamedTuple):
    """Where a program stands: inside of what, on which line, how often it runs.

    It may be written already, in the dtypes that were chosen.
    """

    path: tuple[str, ...] = ()
    source: str = ""
    times: int = 1
    is_written: bool = False


def _operations(
    decided: Sequence[Decision], lists: AutocastLists, place: _Place
) -> Iterator[Operation]:
    for decision in decided:
        # JAX keeps no line of what its own jitted functions hold.
        source = user_line(decision.eqn) or place.source
        yield _operation(decision, lists, place._replace(source=source))
        name, trips = decision.eqn.primitive.name, _trips(decision.eqn)
        times = place.times * (trips or 1)
        for label, program in _programs(decision):
            path = (*place.path, f"{name} {label}".strip())
            here = place._replace(path=path, source=source, times=times)
            yield from _operations(program, lists, here)


def _operation(decision: Decision, lists: AutocastLists, place: _Place) -> Operation:
    eqn, names = decision.eqn, without_notes(decision.names)
    why, reason = because(decision, lists, place.is_written)
    chosen = decision.dtype
    if why == "no float32" or chosen is None:
        chosen = own_dtype(eqn)
    count = flops(eqn)
    return Operation(
        path=place.path,
        source=place.source,
        name_stack="/".join(filter(None, names.split("/"))),
        module=module_path(names),
        primitive=eqn.primitive.name,
        trips=_trips(eqn),
        in_dtypes=dtypes_of(eqn.invars),
        dtype=None if why == "program" or chosen is None else str(chosen),
        rule=decision.rule.value if decision.rule else None,
        why=why,
        reason=reason,
        flops=None if count is None else count * place.times,
        sizes=sizes(eqn),
        bytes=_bytes(eqn, decision.dtype) * place.times,
    )


def _bytes(eqn: jc.JaxprEqn, chosen: Any) -> int:
    """Of operands and results, with what is float32 in the dtype that was chosen."""
    atoms = (*eqn.invars, *eqn.outvars)
    dtypes = (
        chosen if chosen is not None and is_float32(v) else dtype_of(v) for v in atoms
    )
    pairs = zip(atoms, dtypes, strict=True)
    return sum(size_of(v) * getattr(dtype, "itemsize", 0) for v, dtype in pairs)


def _trips(eqn: jc.JaxprEqn) -> int | None:
    """How often an operation runs the program that it holds; None if nobody knows."""
    if eqn.primitive.name == "scan":
        return eqn.params["length"]
    return None if eqn.primitive.name == "while" else 1


def _programs(decision: Decision) -> Iterator[tuple[str, list[Decision]]]:
    """The programs that an operation holds, each with a label if there are several."""
    programs = decision.programs
    if decision.eqn.primitive.name == "while":
        return zip(("cond", "body"), programs, strict=True)
    if decision.eqn.primitive.name == "cond":
        return ((f"branch {i}", program) for i, program in enumerate(programs))
    return (("", program) for program in programs)
