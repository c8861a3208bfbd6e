"""Read a program's matmuls and convolutions from its jaxpr."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn

PRODUCTS = frozenset(
    "conv_general_dilated dot_general ragged_dot_general jamp_product".split()
)
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
