"""`explain`: which operation autocast runs in which precision, and why."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend import core as jc
from jax.typing import DTypeLike

from jamp._autocast import jax_internals
from jamp._autocast.lists import (
    FUNCTION_ROWS,
    LIBRARY_ROWS,
    ROWS,
    SOLVER_ROWS,
    AutocastLists,
    Row,
    Rule,
    library_place,
)
from jamp._autocast.program import (
    KERNEL,
    MARKERS,
    PRECISION,
    Decision,
    dtype_of,
    is_float32,
    size_of,
)
from jamp._autocast.transform import Promote, decisions, scope_of
from jamp._state.amp_state import AmpState
from jamp.diagnostics._explanation import Explanation, Operation
from jamp.diagnostics._flops import flops, sizes
from jamp.diagnostics._source import module_path, user_line
from jamp.diagnostics._step import StepFn, step_fn, traced

_REASONS = {
    "feeder": "What reads its result runs in float32.",
    "bias": "It is the bias of a product, which is part of the product.",
    "fusion": "It is one of a chain on one array, which is fused: rounded at its end.",
    "norm": "It is part of a norm: computed in float32, it goes out in half.",
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
    "level": "The program has it so at this level.",
}
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
            arguments = {"args": args[1:], "kwargs": kwargs}
            return explain_in(step_fn(fn), args[0], arguments)
        decided = decisions(fn, args, kwargs, scope)
        found = _operations(decided, scope.policy.lists, _Place())
        return Explanation(str(scope.policy.dtype), tuple(found), promote=promote)

    return explained


def explain_in(fn: StepFn, state: AmpState, arguments: dict[str, Any]) -> Explanation:
    """Explains a function of a state and arguments that gives loss and gradients."""
    program = traced(fn, (state, arguments)).program
    properties = state.properties
    lists = properties.lists or AutocastLists()
    half = properties.cast_model_type or properties.patch_functions_type
    found = _operations(_recorded(program, lists), lists, _Place())
    # Not what nobody wrote: the scale, the finite check.
    return Explanation(
        dtype=str(half or jnp.dtype(jnp.float32)),
        level=properties.opt_level,
        operations=tuple(op for op in found if op.module or op.source),
    )


def _recorded(
    program: jc.Jaxpr, lists: AutocastLists, names: str = ""
) -> list[Decision]:
    """The equations of a program as it is, as if each had been decided so."""
    decided = []
    for eqn in program.eqns:
        rule = lists.rule_of(jax_internals.primitive_name(eqn))
        here = f"{names}/{jax_internals.name_stack(eqn)}"
        inside = jax_internals.programs_in(eqn)
        programs = tuple(_recorded(p, lists, here) for p in inside)
        why = "program" if programs else "level"
        decided.append(Decision(eqn, here, rule, None, why, "", programs))
    return decided


class _Place(NamedTuple):
    """Where a program stands: inside of what, on which line, how often it runs."""

    path: tuple[str, ...] = ()
    source: str = ""
    times: int = 1


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
            yield from _operations(program, lists, _Place(path, source, times))


def _operation(decision: Decision, lists: AutocastLists, place: _Place) -> Operation:
    eqn = decision.eqn
    count = flops(eqn)
    why = "precision" if decision.region == PRECISION else decision.why
    if why not in ("program", "level") and not any(
        is_float32(v) for v in (*eqn.invars, *eqn.outvars)
    ):
        why = "no float32"
    chosen = decision.dtype
    if why in ("no float32", "level") or chosen is None:
        chosen = _own_dtype(eqn, is_matmul=count is not None)
    return Operation(
        path=place.path,
        source=place.source,
        name_stack="/".join(filter(None, decision.names.split("/"))),
        module=module_path(decision.names),
        primitive=eqn.primitive.name,
        trips=_trips(eqn),
        in_dtypes=_dtypes(eqn.invars),
        dtype=None if why == "program" or chosen is None else str(chosen),
        rule=decision.rule.value if decision.rule else None,
        why=why,
        reason=_reason(decision, why, lists),
        flops=None if count is None else count * place.times,
        sizes=sizes(eqn),
        bytes=_bytes(eqn, decision.dtype) * place.times,
    )


def _own_dtype(eqn: jc.JaxprEqn, is_matmul: bool) -> str | None:
    """What an operation runs in that autocast leaves alone; None without a result."""
    if is_matmul:  # `preferred_element_type` may say otherwise of the result
        return max(_dtypes(eqn.invars[:2]), key=lambda d: jnp.dtype(d).itemsize)
    return next(iter(_dtypes(eqn.outvars)), None)


def _bytes(eqn: jc.JaxprEqn, chosen: Any) -> int:
    """Of operands and results, with what is float32 in the dtype that was chosen."""
    atoms = (*eqn.invars, *eqn.outvars)
    dtypes = (
        chosen if chosen is not None and is_float32(v) else dtype_of(v) for v in atoms
    )
    pairs = zip(atoms, dtypes, strict=True)
    return sum(size_of(v) * getattr(dtype, "itemsize", 0) for v, dtype in pairs)


def _dtypes(atoms: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(v.aval.dtype) for v in atoms if hasattr(v.aval, "dtype"))


def _reason(decision: Decision, why: str, lists: AutocastLists) -> str:
    name, region = decision.eqn.primitive.name, decision.region
    if why == "list" or why == "recorded":
        if name in dict(lists.primitives):
            return f"`lists.with_primitive({name!r}, ...)`."
        return _reason_of_row(ROWS, name)
    if why != "region":
        return _REASONS[why]
    if region in _MARKED_BY:
        return _MARKED_BY[region]
    if region in dict(lists.regions):
        return f"`lists.with_region({region!r}, ...)`."
    place, users = library_place(region), dict(lists.functions)
    for name in (region, region.rpartition(".")[2], place):
        if name in users:
            return f"`lists.with_function({name!r}, ...)`."
    rows = (*FUNCTION_ROWS, *LIBRARY_ROWS, *SOLVER_ROWS)
    return f"`{region}`: {_reason_of_row(rows, place or region)}"


def _reason_of_row(rows: tuple[Row, ...], name: str) -> str:
    return next((row.reason for row in rows if name in row.primitives), "")


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
