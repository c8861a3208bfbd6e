"""Runs programs operation by operation, over many draws of their arguments at once.

An operation compiles once for all programs of a process: of many small programs,
compiling takes nearly all the time.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from jamp._autocast.frames import Frame, Kind, frames_of

# By primitive, parameters and types; `jax.clear_caches` leaves them.
COMPILED: dict[Any, Callable] = {}
NUMBERS: dict[Any, jax.Array] = {}
FLAT: set[Any] = set()  # primitives that hold no program


class Value(NamedTuple):
    """An array; where it differs by draw, its first axis is of the draws."""

    array: Any
    drawn: bool = True


def interpret(closed: ClosedJaxpr, args: Sequence[Any]) -> list[Value]:
    """The results of a program; its arguments are drawn."""
    return _run(closed, list(map(Value, args)))


def _run(jaxpr: Jaxpr, args: Sequence[Value]) -> list[Value]:
    consts = (Value(x, drawn=False) for x in jaxpr.consts)
    values = dict(zip(jaxpr.constvars, consts, strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))

    def read(atom):
        return _number(atom) if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        outs = _results(eqn, list(map(read, eqn.invars)))
        values.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def _number(literal: Literal) -> Value:
    key = repr(literal.val), str(literal.aval)
    if key not in NUMBERS:
        NUMBERS[key] = jax.numpy.asarray(literal.val, literal.aval.dtype)
    return Value(NUMBERS[key], drawn=False)


def _results(eqn: JaxprEqn, operands: list[Value]) -> list[Value]:
    frames = frames_of(eqn) if eqn.primitive not in FLAT else []
    if frames and frames[0].kind is Kind.CALL:
        return _run(frames[0].program, operands)
    if eqn.primitive.name == "scan":
        return _loop(frames[0], operands, eqn.params["reverse"])
    if not frames:
        FLAT.add(eqn.primitive)
    outs = _compiled(eqn, operands)(*(x.array for x in operands))
    drawn = any(x.drawn for x in operands)
    return [Value(x, drawn) for x in outs]


def _compiled(eqn: JaxprEqn, operands: list[Value]) -> Callable:
    types = [(x.array.shape, x.array.dtype, x.drawn) for x in operands]
    params = [(name, _key(value)) for name, value in eqn.params.items()]
    key = eqn.primitive, *params, *types
    if key not in COMPILED:
        COMPILED[key] = _compile(eqn, operands)
    return COMPILED[key]


def _key(param: Any) -> Any:
    """Of a parameter: two programs that read the same are the same."""
    return repr(param) if isinstance(param, Jaxpr | ClosedJaxpr) else param


def _compile(eqn: JaxprEqn, operands: list[Value]) -> Callable:
    params = eqn.primitive.get_bind_params(eqn.params)

    def fn(*arrays):
        outs = eqn.primitive.bind(*arrays, **params)
        return outs if eqn.primitive.multiple_results else [outs]

    axes = [0 if x.drawn else None for x in operands]
    fn = jax.vmap(fn, axes) if 0 in axes else fn
    return jax.jit(fn).lower(*(x.array for x in operands)).compile()


def _loop(frame: Frame, operands: list[Value], reverse: bool) -> list[Value]:
    """The trips of a scan, of which a result may be drawn from some trip on."""
    fixed = frame.consts + frame.carries
    consts, carry = operands[: frame.consts], operands[frame.consts : fixed]
    slices = [Value(np.asarray(x), drawn) for x, drawn in operands[fixed:]]
    trips, rows = range(frame.trips or 0), []
    for i in reversed(trips) if reverse else trips:
        given = [Value(x[:, i] if drawn else x[i], drawn) for x, drawn in slices]
        outs = _run(frame.program, [*consts, *carry, *given])
        carry = outs[: frame.carries]
        rows.append(outs[frame.carries :])
    rows = rows[::-1] if reverse else rows
    return [*carry, *map(_stacked, zip(*rows, strict=True))]


def _stacked(rows: Sequence[Value]) -> Value:
    arrays = [np.asarray(x.array) for x in rows]
    if not any(x.drawn for x in rows):
        return Value(np.stack(arrays), drawn=False)
    draws = next(len(x.array) for x in rows if x.drawn)
    arrays = [
        a if x.drawn else np.broadcast_to(a, (draws, *a.shape))
        for x, a in zip(rows, arrays, strict=True)
    ]
    return Value(np.stack(arrays, axis=1))
