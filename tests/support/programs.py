"""Read a program's matmuls and convolutions from its jaxpr."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

PRODUCTS = frozenset(
    "conv_general_dilated dot_general ragged_dot_general jamp_product".split()
)
CALLS = frozenset("jit remat2 closed_call custom_jvp_call custom_vjp_call".split())
FAST = {"xla_backend_optimization_level": 0}
WIDE = frozenset(("float32", "float64", "f32", "f64"))  # the last two are XLA's names


class Product(NamedTuple):
    """A matmul or convolution, and the dtypes of its operands."""

    op: str
    lhs: str
    rhs: str
    where: str

    @property
    def is_wide(self) -> bool:
        return not WIDE.isdisjoint((self.lhs, self.rhs))


def products(fn: Callable, *args: Any) -> list[Product]:
    """Returns all matmuls of `fn` and its sub-programs; `args` may be shapes.

    To count a custom derivative, pass a function that differentiates.
    """
    return products_of(jax.make_jaxpr(fn)(*args).jaxpr)


def products_of(jaxpr: Jaxpr) -> list[Product]:
    """Returns all matmuls of a traced program."""
    return [_product(e) for e in walk(jaxpr) if is_product(e)]


def is_product(equation: JaxprEqn) -> bool:
    """Returns whether this is a convolution, or a matmul with K > 1 and M N > 1."""
    if equation.primitive.name != "dot_general":
        return equation.primitive.name in PRODUCTS
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    lhs, rhs = (v.aval.shape for v in equation.invars)
    b, k = (math.prod(lhs[i] for i in axes) for axes in (batch, contracted))
    return k != 1 and math.prod(lhs) * math.prod(rhs) != (b * k) ** 2


def equations(fn: Callable, names: Sequence[str], *args: Any) -> list[JaxprEqn]:
    """Returns the equations of these primitives, in all sub-programs."""
    found = walk(jax.make_jaxpr(fn)(*args).jaxpr)
    return [e for e in found if e.primitive.name in names]


def results(fn: Callable, names: Sequence[str], *args: Any) -> list[str]:
    """Returns the dtypes of the results of these primitives."""
    return [str(e.outvars[0].aval.dtype) for e in equations(fn, names, *args)]


def evaluate(fn: Callable, *args: Any) -> Any:
    """Calls `fn` without compiler optimizations, which take most of a test's time."""
    return jax.jit(fn).lower(*args).compile(compiler_options=FAST)(*args)


def interpreted(fn: Callable, *args: Any) -> list[Any]:
    """Calls `fn` operation by operation, and returns the leaves of its result.

    JAX compiles each operation once per process. `jax.disable_jit` would trace another
    program, without calls and loops.
    """
    traced = jax.make_jaxpr(fn)(*args)
    return _interpret(traced.jaxpr, traced.consts, jax.tree.leaves(args))


def _interpret(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
    read = lambda atom: atom.val if isinstance(atom, Literal) else env[atom]  # noqa: E731
    for eqn in jaxpr.eqns:
        outs = _evaluate(eqn, list(map(read, eqn.invars)))
        env.update(zip(eqn.outvars, outs, strict=True))
    return list(map(read, jaxpr.outvars))


def _evaluate(eqn: JaxprEqn, ins: list[Any]) -> Sequence[Any]:
    primitive, params = eqn.primitive, eqn.params
    inner = params.get("jaxpr", params.get("call_jaxpr"))
    if primitive.name == "scan":
        return _loop(params, inner, ins)
    if primitive.name in CALLS:
        consts = getattr(inner, "consts", ())
        return _interpret(getattr(inner, "jaxpr", inner), consts, ins)
    outs = primitive.bind(*ins, **primitive.get_bind_params(params))
    return outs if primitive.multiple_results else [outs]


def _loop(params: dict[str, Any], body: Jaxpr, ins: list[Any]) -> list[Any]:
    consts, carried, _ = (len(list(part)) for part in params["ft_in"].unpack())
    fixed, xs = ins[:consts], ins[consts + carried :]
    carry, found = ins[consts : consts + carried], []
    trips = range(params["length"])
    for i in reversed(trips) if params["reverse"] else trips:
        # NumPy compiles no slice for each iteration.
        outs = _interpret(body, (), [*fixed, *carry, *(np.asarray(x)[i] for x in xs)])
        carry = outs[:carried]
        found.append(outs[carried:])
    found = found[::-1] if params["reverse"] else found
    return [*carry, *(np.stack(ys) for ys in zip(*found, strict=True))]


def walk(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    """Yields the equations of a jaxpr and of all jaxprs in their parameters.

    If a program differs by platform, yields the default, which CPUs use.
    """
    for equation in jaxpr.eqns:
        yield equation
        for inner in _jaxprs_in(equation):
            yield from walk(inner)


def product_runs(jaxpr: Jaxpr, times: int = 1) -> Counter[tuple[str, ...]]:
    """Counts matmuls by the dtypes of their operands, once per iteration of a scan."""
    found: Counter[tuple[str, ...]] = Counter()
    for equation in jaxpr.eqns:
        if is_product(equation):
            found[_dtypes(equation)] += times
        is_scan = equation.primitive.name == "scan"
        trips = equation.params["length"] if is_scan else 1
        for inner in _jaxprs_in(equation):
            found += product_runs(inner, times * trips)
    return found


def _jaxprs_in(equation: JaxprEqn) -> Iterator[Jaxpr]:
    params = dict(equation.params)
    if params.get("branches_platforms"):
        params["branches"] = params["branches"][-1]
    return _jaxprs(params)


def _jaxprs(value: Any) -> Iterator[Jaxpr]:
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif hasattr(value, "in_avals_flat"):  # a hijax object
        yield from _jaxprs(value.params)
    elif isinstance(value, jax.stages.Traced):
        yield from _jaxprs(value.jaxpr)
    elif isinstance(value, dict):
        yield from _jaxprs(tuple(value.values()))
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _jaxprs(item)


def _product(equation: JaxprEqn) -> Product:
    lhs, rhs = _dtypes(equation)[:2]
    name, where = equation.primitive.name, equation.source_info.name_stack
    return Product(name, lhs, rhs, str(where))


def _dtypes(equation: JaxprEqn) -> tuple[str, ...]:
    """Returns the dtypes in which a matmul reads its operands."""
    half = equation.params.get("half")  # jamp's own primitive casts its operands
    return tuple(str(half or v.aval.dtype) for v in equation.invars)
