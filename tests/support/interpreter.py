"""Run a function operation by operation, which compiles no whole program.

`jax.disable_jit` would trace another program, without calls and loops.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal

CALLS = frozenset("jit remat2 closed_call custom_jvp_call custom_vjp_call".split())


def interpreter(fn: Callable, *args: Any) -> Callable[..., list[Any]]:
    """Traces `fn` once. Returns a function from such arguments to its leaves."""
    traced = jax.make_jaxpr(fn)(*args)

    def run(*args):
        with np.errstate(all="ignore"):
            return _run(traced.jaxpr, traced.consts, jax.tree.leaves(args))

    return run


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))

    def read(atom):
        if isinstance(atom, Literal):
            return np.asarray(atom.val, atom.aval.dtype)
        return env[atom]

    for eqn in jaxpr.eqns:
        outs = _evaluate(eqn, list(map(read, eqn.invars)))
        env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def _evaluate(eqn: JaxprEqn, ins: list[Any]) -> Sequence[Any]:
    primitive, params = eqn.primitive, eqn.params
    if primitive.name in IN_NUMPY:
        return [IN_NUMPY[primitive.name](eqn, *map(np.asarray, ins))]
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if primitive.name == "scan":
        return _loop(params, inner, ins)
    if primitive.name == "cond":
        inner, ins = params["branches"][int(ins[0])], ins[1:]
    if primitive.name in CALLS or primitive.name == "cond":
        consts = getattr(inner, "consts", ())
        return _run(getattr(inner, "jaxpr", inner), consts, ins)
    outs = primitive.bind(*ins, **primitive.get_bind_params(params))
    return outs if primitive.multiple_results else [outs]


def _loop(params: dict[str, Any], body: Jaxpr, ins: list[Any]) -> list[Any]:
    consts, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
    fixed, xs = ins[:consts], list(map(np.asarray, ins[consts + carried :]))
    carry, found = ins[consts : consts + carried], []
    trips = range(params["length"])
    for i in reversed(trips) if params["reverse"] else trips:
        outs = _run(body, (), [*fixed, *carry, *(x[i] for x in xs)])
        carry = outs[:carried]
        found.append(outs[carried:])
    found = found[::-1] if params["reverse"] else found
    return [*carry, *(np.stack(ys) for ys in zip(*found, strict=True))]


# ---- operations that NumPy rounds like XLA, which would compile each shape
# Matmuls and sums have float32 terms, in another order than XLA's.


def _elementwise(fn: Callable) -> Callable:
    return lambda eqn, *ins: fn(*ins).astype(eqn.outvars[0].aval.dtype)


def _broadcast(eqn: JaxprEqn, x: np.ndarray, *sizes: Any) -> np.ndarray:
    shape, axes = eqn.outvars[0].aval.shape, eqn.params["broadcast_dimensions"]
    kept = [n if i in axes else 1 for i, n in enumerate(shape)]
    kept = [x.shape[axes.index(i)] if i in axes else n for i, n in enumerate(kept)]
    return np.broadcast_to(x.reshape(kept), shape)


def _slice(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    return x[tuple(map(slice, starts, limits, eqn.params["strides"] or [1] * x.ndim))]


def _reshape(eqn: JaxprEqn, x: np.ndarray) -> np.ndarray:
    return x.reshape(eqn.outvars[0].aval.shape)


def _ratio(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.trunc(x / y) if x.dtype.kind in "iu" else x / y


def _reduction(fn: Callable) -> Callable:
    return lambda eqn, x: fn(_wide(x), axis=eqn.params["axes"]).astype(_dtype(eqn))


def _matmul(eqn: JaxprEqn, lhs: np.ndarray, rhs: np.ndarray) -> np.ndarray:
    contracted, batch = (
        list(zip(*x, strict=True)) for x in eqn.params["dimension_numbers"]
    )
    left, right = np.arange(lhs.ndim), np.arange(rhs.ndim) + lhs.ndim
    for i, j in contracted + batch:
        right[j] = left[i]
    free = [*np.setdiff1d(left, right), *np.setdiff1d(right, left)]
    names = [*(left[i] for i, _ in batch), *free]
    out = np.einsum(_wide(lhs), left, _wide(rhs), right, names, optimize=True)
    return out.astype(_dtype(eqn))


def _iota(eqn: JaxprEqn) -> np.ndarray:
    return np.indices(eqn.params["shape"])[eqn.params["dimension"]].astype(_dtype(eqn))


def _dtype(eqn: JaxprEqn) -> np.dtype:
    return eqn.outvars[0].aval.dtype


def _wide(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.name in HALVES else x


def _select(eqn: JaxprEqn, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    return np.choose(which, cases)


HALVES = frozenset(("float16", "bfloat16"))
ELEMENTWISE = {
    "add": np.add,
    "add_any": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "max": np.maximum,
    "min": np.minimum,
    "div": _ratio,
    "sqrt": np.sqrt,
    "square": np.square,
    "floor": np.floor,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "not": np.invert,
    "neg": np.negative,
    "abs": np.abs,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "gt": np.greater,
    "le": np.less_equal,
    "ge": np.greater_equal,
    "convert_element_type": np.asarray,
}
IN_NUMPY = {name: _elementwise(fn) for name, fn in ELEMENTWISE.items()} | {
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _reshape,
    "slice": _slice,
    "select_n": _select,
    "concatenate": lambda eqn, *ins: np.concatenate(ins, eqn.params["dimension"]),
    "dot_general": _matmul,
    "reduce_sum": _reduction(np.sum),
    "reduce_max": _reduction(np.max),
    "iota": _iota,
    "transpose": lambda eqn, x: x.transpose(eqn.params["permutation"]),
}
